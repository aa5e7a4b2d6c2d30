import math

import numpy as np
import pytest
import torch
from live import as_tiff

from service.core.volume import Segmentation
from service.inference.label_agreement import OVERLAP, LabelAgreement, image_of, noise, share_differing
from service.inference.windows.blending import Blending
from service.inference.windows.grid import Grid
from service.inference.windows.sliding_window import SlidingWindow
from service.models.spec import Sample

CPU = torch.device("cpu")


def windows_of(spec, network):
    return SlidingWindow(network, 1, spec.input.roi_size, 2, blending=Blending(), device=CPU)


@pytest.fixture
def parity(bands, bands_network):
    return LabelAgreement(bands, CPU, lambda: windows_of(bands, bands_network))


def test_the_reference_agrees_with_itself(parity, bands, bands_network):
    assert parity.difference(windows_of(bands, bands_network)) == 0


def test_another_network_differs(parity, bands, bands_network):
    share = parity.difference(windows_of(bands, lambda x: bands_network(x).flip(1)))
    assert 0.1 < share <= 1


def test_scores_that_are_not_finite_agree_with_nothing(parity, bands, bands_network):
    assert math.isnan(parity.difference(windows_of(bands, lambda x: bands_network(x) * np.nan)))


def test_a_row_has_as_many_windows_as_are_asked_for_and_shows_the_image_over_and_over(parity, bands):
    image, row = image_of(bands), parity.row(4)
    assert row.shape == (1, 1, 16, 32, 32 + 3 * 24)
    assert Grid.cover(row.shape[2:], bands.input.roi_size, OVERLAP).starts == ((0,), (0,), (0, 24, 48, 72))
    assert torch.equal(row[..., :56], image[:, :, :16, :32])
    assert torch.equal(row[..., 56:], row[..., :48])


def test_a_sample_is_normalised_and_its_middle_taken(bands, phantom, tmp_path):
    (tmp_path / "sample.tif").write_bytes(as_tiff(phantom.image))
    spec = bands.model_copy(update={"folder": tmp_path, "sample": Sample()})
    image = image_of(spec)
    assert image.shape == (1, 1, 24, 56, 56)
    expected = torch.from_numpy(phantom.image[:, 7:63, 12:68].astype(np.float32)) / 2800
    torch.testing.assert_close(image[0, 0], expected)


def test_noise_stands_for_a_sample_that_cannot_be_read(bands, tmp_path, caplog):
    spec = bands.model_copy(update={"folder": tmp_path, "sample": Sample()})
    assert torch.equal(image_of(spec), noise((1, 1, 28, 56, 56)))
    assert "cannot be read" in caplog.text


def test_a_sample_smaller_than_a_window_is_enough(bands, bands_network, tmp_path):
    (tmp_path / "sample.tif").write_bytes(as_tiff(np.full((3, 20, 40), 2400, np.uint16)))
    spec = bands.model_copy(update={"folder": tmp_path, "sample": Sample()})
    parity = LabelAgreement(spec, CPU, lambda: windows_of(bands, bands_network))
    assert parity.row(1).shape == (1, 1, 16, 32, 32)
    assert parity.difference(windows_of(bands, bands_network)) == 0


def labels(*rows):
    return Segmentation(np.array(rows, np.uint16), "labels", count=9)


def test_numbers_of_objects_do_not_matter_but_their_voxels_do():
    truth = labels([1, 1, 1, 0, 2, 2, 2, 0, 0, 0])
    assert share_differing(truth, labels([7, 7, 7, 0, 3, 3, 3, 0, 0, 0])) == 0
    assert share_differing(truth, labels([7, 7, 7, 7, 3, 3, 3, 0, 0, 0])) == pytest.approx(0.1)
    assert share_differing(truth, labels([7, 7, 7, 0, 7, 7, 7, 0, 0, 0])) == pytest.approx(0.3)
    assert share_differing(truth, labels([0] * 10)) == pytest.approx(0.6)


def test_classes_are_compared_voxel_by_voxel():
    one, other = (Segmentation(np.array([[0, 1, value]], np.uint8), "classes") for value in (1, 2))
    assert share_differing(one, other) == pytest.approx(1 / 3)
