import numpy as np
import pytest
import torch
from landscapes import decode
from numpy.typing import NDArray
from scipy.ndimage import label, maximum_filter

from scripts.recipes.synthetic_nuclei import synthesize
from service.training.evaluate import score
from service.training.targets.instances import DICE_LOSS, compute_distance_target, instance_loss


def make_ellipsoid(radii: tuple[float, float, float], size: tuple[int, int, int] = (21, 41, 41)) -> NDArray[np.uint16]:
    grid = np.ogrid[tuple(slice(edge) for edge in size)]
    mask = sum(((axis - edge // 2) / radius) ** 2 for axis, edge, radius in zip(grid, size, radii, strict=True)) <= 1
    return np.asarray(mask, np.uint16)


@pytest.mark.parametrize("radii", [(8, 8, 8), (4, 8, 8), (3, 6, 17)])
def test_distance_of_an_ellipsoid_has_one_maximum_at_its_center(radii: tuple[float, float, float]) -> None:
    labels = make_ellipsoid(radii)
    target = compute_distance_target(labels)
    maxima = (target == maximum_filter(target, 3)) & (labels > 0)
    assert label(maxima, np.ones((3, 3, 3)))[1] == 1
    assert target[10, 20, 20] == target.max() == pytest.approx(1, abs=1e-3)


def test_distance_is_zero_outside_and_at_most_one() -> None:
    for labels in (synthesize(np.random.default_rng(0), (24, 48, 48))[1], np.zeros((4, 5, 6), np.uint16)):
        target = compute_distance_target(labels)
        assert target.dtype == np.float32
        assert np.array_equal(target > 0, labels > 0)
        assert target.max() <= 1


def test_distance_is_low_at_the_contact_of_two_objects() -> None:
    labels = make_ellipsoid((8, 8, 16))
    labels[:, :, 20:] *= 2
    target = compute_distance_target(labels)
    assert target[10, 20, 19:21].max() < 0.25
    assert min(target[labels == n].max() for n in (1, 2)) > 0.8


def test_decoding_the_target_restores_the_labels() -> None:
    labels = np.zeros((24, 64, 64), np.uint16)
    for number, corner in enumerate([(1, 2, 3), (1, 20, 8), (3, 40, 40), (2, 19, 26)], start=1):
        box = tuple(slice(start, start + edge) for start, edge in zip(corner, (19, 19, 19), strict=True))
        region = labels[box]
        region[(make_ellipsoid((9, 9, 9), (19, 19, 19)) > 0) & (region == 0)] = number
    heights = np.where(labels > 0, compute_distance_target(labels), -np.inf).astype(np.float32)
    decoded, count = decode(heights, 0.1, 8)
    assert count == 4
    assert score(labels, decoded).iou > 0.98


def invert_sigmoid(targets: torch.Tensor) -> torch.Tensor:
    """Return scores whose sigmoid equals the targets."""
    return torch.logit(targets, eps=1e-6)


@pytest.fixture
def targets() -> torch.Tensor:
    foreground = torch.zeros(1, 1, 8, 8, 8)
    foreground[..., 2:6, 2:6, 2:6] = 1
    return torch.cat([foreground, foreground * 0.6], dim=1)


@pytest.mark.parametrize("channel", [0, 1])
def test_loss_is_zero_for_a_perfect_prediction_and_higher_if_either_output_is_wrong(targets, channel) -> None:
    scores = invert_sigmoid(targets)
    assert instance_loss(scores, targets) == pytest.approx(0, abs=1e-3)
    scores[:, channel] *= -1
    assert instance_loss(scores, targets) > 0.1


def test_dice_loss_is_computed_over_the_complete_batch(targets: torch.Tensor) -> None:
    scores = torch.zeros_like(targets)
    batch_targets = torch.cat([targets, torch.zeros_like(targets)])
    foreground, predicted = batch_targets[:, :1].sum(), 0.5 * batch_targets[:, :1].numel()
    dice = 1 - (2 * 0.5 * foreground + 1) / (predicted + foreground + 1)
    assert DICE_LOSS(torch.cat([scores, scores])[:, :1], batch_targets[:, :1]) == pytest.approx(dice)


def test_unknown_voxels_do_not_affect_the_loss(targets: torch.Tensor) -> None:
    scores = torch.randn(targets.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.ones(1, 1, 8, 8, 8)
    weighted_loss = instance_loss(scores, torch.cat([targets, weights], 1))
    assert weighted_loss.item() == pytest.approx(instance_loss(scores, targets).item())
    weights[..., 4:] = 0
    wrong_targets = targets.clone()
    wrong_targets[..., 4:] = 1 - targets[..., 4:]
    losses = [instance_loss(scores, torch.cat([values, weights], 1)) for values in (targets, wrong_targets)]
    assert losses[0] == losses[1]
    losses[0].backward()
    assert not scores.grad[..., 4:].any()
    assert scores.grad[..., :4].any()
