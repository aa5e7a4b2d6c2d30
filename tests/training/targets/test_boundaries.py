import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from service.training.targets.boundaries import (
    AFFINITY_OFFSETS,
    BoundaryLoss,
    compute_label_targets,
    find_boundaries,
    shift,
)

OFFSETS = ((1, 0, 0), (0, 0, 4), (-2, 3, 0))


def draw_labels(seed: int = 0) -> NDArray[np.uint16]:
    """Return labels [8, 12, 16] of boxes that fill the volume, with gaps in their numbers."""
    boxes = np.random.default_rng(seed).choice([0, 5, 9, 40_000], (2, 3, 4))
    return np.kron(boxes, np.ones((4, 4, 4), np.uint16)).astype(np.uint16)


def make_targets(labels: NDArray[np.uint16], known: NDArray[np.bool_] | None = None) -> torch.Tensor:
    targets = compute_label_targets(labels)
    return torch.from_numpy(targets if known is None else np.concatenate([targets, known[None]]))[None].float()


def make_scores(labels: NDArray[np.uint16], offsets: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """Return the scores of a perfect network; 0 where the neighbor at the offset is outside the volume."""
    padded = np.pad(labels.astype(np.int64), 1, mode="edge")
    z, y, x = (slice(1, -1),) * 3
    neighbors = [padded[shifted] for shifted in ((slice(2, None), y, x), (slice(-2), y, x))]
    neighbors += [padded[z, slice(2, None), x], padded[z, slice(-2), x]]
    neighbors += [padded[z, y, slice(2, None)], padded[z, y, slice(-2)]]
    scores = [np.where(np.any([side != labels for side in neighbors], axis=0), 20.0, -20.0)]
    for offset in offsets:
        affinity = np.zeros(labels.shape)
        for voxel in np.ndindex(labels.shape):
            other = tuple(np.add(voxel, offset))
            if all(0 <= place < length for place, length in zip(other, labels.shape, strict=True)):
                affinity[voxel] = 20.0 if labels[voxel] == labels[other] else -20.0
        scores.append(affinity)
    return torch.from_numpy(np.stack(scores))[None].float()


@pytest.mark.parametrize("offsets", [(), OFFSETS])
def test_loss_is_zero_only_for_perfect_scores(offsets: tuple[tuple[int, int, int], ...]) -> None:
    labels = draw_labels()
    scores, targets, loss = make_scores(labels, offsets), make_targets(labels), BoundaryLoss(offsets)
    perfect = float(loss(scores, targets))
    assert perfect < 1e-3
    for output in range(scores.shape[1]):
        wrong = scores.clone()
        wrong[:, output] *= -1
        assert float(loss(wrong, targets)) > 1


def test_unknown_voxels_do_not_affect_the_loss() -> None:
    labels, known = draw_labels(), np.ones((8, 12, 16), np.bool_)
    known[..., 8:] = False
    other_labels = np.where(known, labels, draw_labels(1))
    scores, loss = make_scores(labels, OFFSETS), BoundaryLoss(OFFSETS)
    assert loss(scores, make_targets(labels, known)) == loss(scores, make_targets(other_labels, known))
    # Padding has the weight 0, so the outline of the volume is no boundary.
    padded = torch.nn.functional.pad(make_targets(labels), (4, 4, 4, 4, 4, 4))
    padded_scores = torch.nn.functional.pad(scores, (4, 4, 4, 4, 4, 4))
    assert float(loss(padded_scores, padded)) == pytest.approx(float(loss(scores, make_targets(labels))), abs=1e-6)


def test_boundaries_are_on_both_sides_of_a_face() -> None:
    labels = torch.tensor([1, 1, 1, 2, 2]).expand(1, 3, 3, 5)
    known = torch.ones_like(labels, dtype=torch.bool)
    assert find_boundaries(labels, known)[0, 1, 1].tolist() == [False, False, True, True, False]


def test_offsets_longer_than_the_volume_have_no_pairs() -> None:
    here, there = shift(torch.zeros(1, 4, 4, 4), (9, 0, 0))
    assert here.numel() == there.numel() == 0
    labels = draw_labels()[:, :, :4]
    assert torch.isfinite(
        BoundaryLoss(AFFINITY_OFFSETS)(make_scores(labels, ())[:, :1].expand(1, 10, 8, 12, 4), make_targets(labels))
    )
