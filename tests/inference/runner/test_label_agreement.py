import itertools
import math

import numpy as np
import pytest
import torch
from live import as_tiff

from service.core.types import Segmentation
from service.inference.runner.label_agreement import (
    COMPARISON_OVERLAP,
    LabelAgreement,
    compute_label_difference,
    load_sample_image,
    make_noise,
)
from service.inference.windows.blending import Blending
from service.inference.windows.grid import Grid
from service.inference.windows.sliding_window import SlidingWindow
from service.models.spec import Sample

CPU = torch.device("cpu")


def make_windows(spec, network, batch_size=2):
    return SlidingWindow(network, 1, spec.input.roi_size, batch_size, blending=Blending(), device=CPU)


@pytest.fixture
def agreement(bands, bands_network):
    return LabelAgreement(bands, CPU, lambda: make_windows(bands, bands_network))


def test_reference_agrees_only_with_itself(agreement, bands, bands_network):
    assert agreement.compute_difference(make_windows(bands, bands_network)) == 0
    assert 0.1 < agreement.compute_difference(make_windows(bands, lambda x: bands_network(x).flip(1))) <= 1
    assert math.isnan(agreement.compute_difference(make_windows(bands, lambda x: bands_network(x) * np.nan)))


# The sample has 8 windows, so a check of the labels alone does not reach the last windows of a larger batch.
LARGE_BATCH = 11


@pytest.fixture
def batch_agreement(bands, bands_network):
    return LabelAgreement(bands, CPU, lambda: make_windows(bands, bands_network, 1), compares_full_batch=True)


def change_last(network, change):
    """Return `network` with `change` applied in place to the scores of the last window of a large batch."""

    def call(x):
        scores = network(x).clone()
        if len(scores) == LARGE_BATCH:
            change(scores[-1])
        return scores

    return call


def test_large_batch_of_correct_or_rounded_scores_agrees(batch_agreement, bands, bands_network):
    assert batch_agreement.compute_difference(make_windows(bands, bands_network, LARGE_BATCH)) == 0
    window = make_windows(bands, lambda x: bands_network(x).bfloat16(), LARGE_BATCH)
    assert batch_agreement.compute_batch_difference(window) == 0


@pytest.mark.parametrize(
    ("change", "lower_bound"),
    [
        (lambda scores: scores.zero_(), 0.5),
        (lambda scores: scores[:, -4:].zero_(), 0.1),
        (lambda scores: scores.mul_(1e6), 0.5),
        (lambda scores: scores.copy_(scores.roll(5, -1)), 0.01),
    ],
    ids=["zeros", "zeros in the last planes", "huge", "shifted"],
)
def test_wrong_scores_in_the_last_window_of_a_large_batch_are_detected(
    agreement, batch_agreement, bands, bands_network, change, lower_bound
):
    window = make_windows(bands, change_last(bands_network, change), LARGE_BATCH)
    assert agreement.compute_difference(window) == 0, "the labels of the sample do not reveal the fault"
    assert lower_bound < batch_agreement.compute_batch_difference(window) <= 1
    assert batch_agreement.compute_difference(window) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_score_in_a_large_batch_is_detected(batch_agreement, bands, bands_network, value):
    window = make_windows(
        bands, change_last(bands_network, lambda scores: scores[0, -1, -1, -1].fill_(value)), LARGE_BATCH
    )
    assert math.isnan(batch_agreement.compute_difference(window))


def test_each_window_of_a_full_batch_is_a_part_of_the_image(batch_agreement, bands, bands_network):
    batches = []
    window = make_windows(bands, lambda x: batches.append(x.clone()) or bands_network(x), LARGE_BATCH)
    batch_agreement.compute_batch_difference(window)
    (batch,) = batches
    assert len(batch) == LARGE_BATCH
    assert batch.abs().sum((1, 2, 3, 4)).min() > 0
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(batch))


def test_row_repeats_the_image_to_the_requested_number_of_windows(agreement, bands):
    image, row = load_sample_image(bands), agreement.repeat_image(4)
    assert row.shape == (1, 1, 16, 32, 32 + 3 * 24)
    assert Grid.cover(row.shape[2:], bands.input.roi_size, COMPARISON_OVERLAP).starts == ((0,), (0,), (0, 24, 48, 72))
    assert torch.equal(row[..., :56], image[:, :, :16, :32])
    assert torch.equal(row[..., 56:], row[..., :48])


def test_sample_is_normalized_and_cropped_to_its_objects(bands, phantom, tmp_path):
    pixels = phantom.image.copy()
    pixels[:, :14] = pixels[:, :, :24] = 300
    (tmp_path / "sample.tif").write_bytes(as_tiff(pixels))
    spec = bands.model_copy(update={"folder": tmp_path, "sample": Sample()})
    image = load_sample_image(spec)
    assert image.shape == (1, 1, 24, 56, 56)
    expected = torch.from_numpy(pixels[:, 14:, 24:].astype(np.float32)) / 2800
    torch.testing.assert_close(image[0, 0], expected)


def test_noise_replaces_an_unreadable_sample(bands, tmp_path, caplog):
    spec = bands.model_copy(update={"folder": tmp_path, "sample": Sample()})
    assert torch.equal(load_sample_image(spec), make_noise((1, 1, 28, 56, 56)))
    assert "cannot read the sample" in caplog.text


def test_sample_may_be_smaller_than_a_window(bands, bands_network, tmp_path):
    (tmp_path / "sample.tif").write_bytes(as_tiff(np.full((3, 20, 40), 2400, np.uint16)))
    spec = bands.model_copy(update={"folder": tmp_path, "sample": Sample()})
    agreement = LabelAgreement(spec, CPU, lambda: make_windows(bands, bands_network))
    assert agreement.repeat_image(1).shape == (1, 1, 16, 32, 32)
    assert agreement.compute_difference(make_windows(bands, bands_network)) == 0


def test_label_comparison_ignores_object_numbers_but_not_voxels_and_classes():
    def labels(*row):
        return Segmentation(np.array([row], np.uint16), "labels", count=9)

    truth = labels(1, 1, 1, 0, 2, 2, 2, 0, 0, 0)
    assert compute_label_difference(truth, labels(7, 7, 7, 0, 3, 3, 3, 0, 0, 0)) == 0
    assert compute_label_difference(truth, labels(7, 7, 7, 7, 3, 3, 3, 0, 0, 0)) == pytest.approx(0.1)
    assert compute_label_difference(truth, labels(7, 7, 7, 0, 7, 7, 7, 0, 0, 0)) == pytest.approx(0.3)
    assert compute_label_difference(truth, labels(*[0] * 10)) == pytest.approx(0.6)
    first, second = (Segmentation(np.array([[0, 1, value]], np.uint8), "classes") for value in (1, 2))
    assert compute_label_difference(first, second) == pytest.approx(1 / 3)
