"""Windows that are left out because nothing is in them, and what stands for their scores."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from segmenters import settings_of, started
from torch import Tensor
from torch.nn import functional

from service.core.config import override_settings
from service.core.quantities import Diameter
from service.core.types import Options, Volume
from service.inference.preprocessing.empty_windows import (
    DIMMEST,
    NOISE,
    EmptyWindowFilter,
    estimate_background,
    survey_intensities,
    usual_scores,
)
from service.inference.preprocessing.normalize import IntensityScaling, NormalisedImage
from service.inference.runner.callbacks import Callbacks
from service.inference.segment import segment
from service.inference.types import Skipped
from service.inference.windows.grid import Grid
from service.inference.windows.sliding_window import SparseImage
from service.models.spec import Instances, ModelSpec

edges = st.integers(1, 12)
sizes = st.tuples(edges, edges, edges)
rois = st.tuples(*[st.integers(1, 6)] * 3)


def volume_of(pixels: NDArray[Any]) -> Volume:
    """One channel, unless there is an axis of them."""
    return Volume.from_array(pixels if pixels.ndim == 4 else pixels[None])


@settings(max_examples=40)
@given(sizes, rois, st.sampled_from([0.0, 0.25, 0.6]), st.integers(1, 2), st.integers(0, 9))
def test_the_brightest_voxel_of_every_window(size, roi, overlap, channels, seed) -> None:
    pixels = np.random.default_rng(seed).integers(0, 1000, (channels, *size)).astype(np.uint16)
    grid = Grid.cover(size, roi, overlap)
    padded = np.zeros((channels, *grid.padded), np.uint16)
    padded[(slice(None), *(slice(b, b + n) for b, n in zip(grid.pad_before, size, strict=True)))] = pixels
    places = [tuple(slice(a, a + n) for a, n in zip(place, roi, strict=True)) for place in grid.positions()]
    expected = [[channel[box].max() for box in places] for channel in padded]
    found = survey_intensities(volume_of(pixels), grid).brightest
    np.testing.assert_array_equal(found.reshape(channels, -1), expected)


def test_a_volume_of_several_blocks_is_surveyed_like_one() -> None:
    pixels = np.zeros((5, 2100, 2100), np.uint8)
    pixels[2, 2000, 7] = 200
    grid = Grid.cover((5, 2100, 2100), (2, 700, 700), 0)
    expected = np.zeros((3, 3, 3))
    expected[1, 2, 0] = 200
    survey = survey_intensities(volume_of(pixels), grid)
    np.testing.assert_array_equal(survey.brightest[0], expected)
    assert 2**19 < survey.samples[0].size < 2**21


@settings(max_examples=60)
@given(sizes, sizes, rois, st.sampled_from([0.0, 0.25]), st.data())
def test_no_window_of_a_resampled_volume_is_brighter_than_what_it_was_made_of(size, scaled, roi, overlap, data) -> None:
    pixels = np.zeros(size, np.float32)
    pixels[tuple(data.draw(st.integers(0, edge - 1)) for edge in size)] = 1
    resampled = functional.interpolate(torch.from_numpy(pixels)[None, None], size=scaled, mode="trilinear")[0, 0]
    grid = Grid.cover(scaled, roi, overlap)
    brightest = survey_intensities(volume_of(pixels), grid).brightest.ravel()
    for place, most in zip(grid.positions(), brightest, strict=True):
        inside = (slice(max(a - b, 0), a - b + n) for a, b, n in zip(place, grid.pad_before, roi, strict=True))
        assert float(resampled[tuple(inside)].max()) <= most + 1e-6


def test_pixels_that_are_not_finite_are_dark() -> None:
    pixels = np.full((4, 4, 8), 3.0, np.float32)
    pixels[1, 1, 1], pixels[2, 2, 6], pixels[:, :, 4:6] = np.nan, np.inf, -np.inf
    survey = survey_intensities(volume_of(pixels), Grid.cover((4, 4, 8), (4, 4, 4), 0))
    assert survey.brightest.tolist() == [[[[3, 3]]]]
    assert survey.samples[0].tolist() == [3.0] * (4 * 4 * 6 - 2)


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_background_is_what_noise_explains_but_far_below_what_the_stack_makes_use_of(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(500, 10, 300_000)
    bright = rng.uniform(500, 5000, 30_000)
    sample = np.concatenate([noise, bright]).round(0 if kind == "uint16" else 9).astype(kind)
    assert estimate_background(sample) == pytest.approx(500 + NOISE * 10, abs=6)
    assert noise.max() < estimate_background(sample)
    tissue = rng.normal(300, 80, 200_000).clip(0).astype(kind)
    low, high = np.percentile(tissue, (1, 99.8))
    assert estimate_background(tissue) == pytest.approx(low + DIMMEST * (high - low))


@pytest.mark.parametrize("value", [0, 7])
def test_background_of_a_stack_that_is_mostly_one_value_is_that_value(value: int) -> None:
    sample = np.full(1000, value, np.uint8)
    assert estimate_background(sample) == value
    sample[:200] = np.arange(value + 1, value + 201)
    assert estimate_background(sample) == value


def skipper(pixels: NDArray[Any], spec: ModelSpec, look: Any, batch_size: int = 2) -> EmptyWindowFilter:
    depth, height, width = pixels.shape
    grid = Grid.cover((depth, height, width), spec.input.roi_size, 0.25)
    return EmptyWindowFilter(NormalisedImage(volume_of(pixels), [IntensityScaling(0, 1)]), grid, batch_size, spec, look)


def seen(bright: float) -> Any:
    """Background wherever it is no brighter; scores [N, 3, z, y, x] for the model `bands`."""
    return lambda windows: torch.cat([0.5 - (windows > bright).float(), windows * 0, windows * 0], 1)


def test_scores_of_skipped_windows_are_those_of_the_brightest_of_them(bands: ModelSpec) -> None:
    pixels = np.full((16, 32, 256), 10, np.float32)
    pixels[3, 3, 140] = 1000
    pixels[0, 0, 40], pixels[0, 0, 212] = 20, 30
    looked = list[Tensor]()

    def look(windows: Tensor) -> Tensor:
        looked.append(windows)
        return torch.cat([windows + 100, windows, windows], 1)

    image, skipped, notes = skipper(pixels, bands, look).skip(volume_of(pixels), 30)
    assert isinstance(image, SparseImage)
    assert [float(window.max()) for window in looked[0]] == [30, 20]
    torch.testing.assert_close(image.scores, torch.tensor([100.0, 0, 0]) + looked[0].mean())
    assert skipped == Skipped(10, 11, (30.0,))
    assert image.skipped == {(0, 0, x) for x in (*range(0, 217, 24), 224) if x != 120}
    assert notes == ()


@pytest.mark.parametrize(
    ("width", "below", "batch_size", "total"), [(200, -1, 2, 8), (200, 9.99, 2, 8), (80, 10, 4, 3)]
)
def test_where_nothing_or_too_little_is_dark_the_image_stays_as_it_is(bands, width, below, batch_size, total) -> None:
    """Few dark windows are not worth asking the network for."""
    pixels = np.full((16, 32, width), 10, np.float32)
    image, skipped, notes = skipper(pixels, bands, None, batch_size).skip(volume_of(pixels), below)
    assert not isinstance(image, SparseImage)
    assert skipped is not None
    assert (skipped.windows, skipped.total, notes) == (0, total, ())


def test_where_the_network_finds_something_in_the_dark_only_a_stated_value_is_believed(bands: ModelSpec) -> None:
    pixels = np.random.default_rng(0).normal(100, 2, (16, 64, 200)).astype(np.float32)
    pixels[:, :, :40] = 1000
    image, skipped, notes = skipper(pixels, bands, seen(105)).skip(volume_of(pixels), "auto")
    assert (isinstance(image, SparseImage), skipped and skipped.windows) == (False, 0)
    assert "finds something" in notes[0]
    image, skipped, notes = skipper(pixels, bands, seen(105)).skip(volume_of(pixels), 115)
    assert isinstance(image, SparseImage)
    assert image.scores.tolist() == [0.5, 0, 0]
    assert "lower it" in notes[0]
    image, _, notes = skipper(pixels, bands, seen(0)).skip(volume_of(pixels), 115)
    assert not isinstance(image, SparseImage)
    assert "finds something" in notes[0]


def test_background_of_a_model_of_objects_is_all_but_its_foreground(random_nuclei: ModelSpec) -> None:
    decoding = Instances(kind="instances", minimum_size=3)
    spec = random_nuclei.model_copy(update={"decoding": decoding})
    scores = torch.full((1, 2, 4, 4, 4), -2.0)
    scores[0, :, 0, 0, :2] = 5
    usual, found = usual_scores(scores, spec)
    assert (usual.tolist() if usual is not None else None, found) == ([-2, -2], False)
    scores[0, :, 0, 0, :3] = 5
    assert usual_scores(scores, spec)[1]
    assert usual_scores(torch.full((1, 2, 2, 2, 2), 5.0), spec) == (None, True)


def test_now_and_then_a_dark_row_is_computed_so_that_slabs_leave_in_portions(bands: ModelSpec) -> None:
    pixels = np.zeros((16, 32 * 60, 32 * 8), np.uint8)
    spec = bands.model_copy(update={"outputs": tuple(f"output {n}" for n in range(40))})
    made = skipper(pixels, spec, lambda windows: torch.zeros(len(windows), 40, *windows.shape[2:]))
    grid = Grid.cover(pixels.shape, spec.input.roi_size, 0.25)
    most = grid.max_skipped_rows(40, 2)
    image, _, _ = made.skip(volume_of(pixels), 0)
    assert isinstance(image, SparseImage)
    computed = {y for _, y, _ in set(grid.positions()) - image.skipped}
    rows = [y in computed for y in grid.starts[1]]
    assert most < len(rows)
    assert all(any(rows[first : first + most + 1]) for first in range(len(rows) - most))
    assert sum(rows) <= len(rows) / most + 1


@pytest.fixture(scope="module")
def scattered(phantom: Any) -> Volume:
    """A few spheres in one corner of a stack of noise."""
    pixels = np.random.default_rng(1).normal(400, 20, (24, 200, 240)).astype(np.uint16)
    pixels[:, :70, :80] = phantom.image
    return volume_of(pixels)


@pytest.mark.parametrize(("output", "below"), [("classes", "auto"), ("probabilities", 600)])
def test_a_sparse_stack_is_segmented_alike_with_less_work(bands, scattered: Volume, output, below) -> None:
    runner, calls = started(bands, settings_of()), list[int]()

    def counted(network: Any) -> Any:
        return lambda batch: (calls.append(len(batch)), network(batch))[1]

    runner.instrument(counted)
    steps = list[tuple[int, int]]()
    whole = segment(runner, scattered, Options(output=output))
    every, _ = sum(calls), calls.clear()
    result = segment(
        runner,
        scattered,
        Options(output=output, skip_below=below),
        callbacks=Callbacks(progress=lambda done, total: steps.append((done, total))),
    )
    one, other = whole.segmentation.pixels, result.segmentation.pixels
    if output == "classes":
        assert np.mean(one != other) < 1e-4
        np.testing.assert_array_equal(one[:, :70, :80], other[:, :70, :80])
    else:
        assert np.abs(one - other).mean() < 0.01
    assert whole.skipped is None
    assert result.skipped is not None
    total = runner.estimator.estimate(scattered, Options()).windows
    assert result.skipped.total == total
    assert result.skipped.windows > total / 2
    # Batches of two, and one more for the brightest of those that are skipped.
    assert len(calls) == -(-(total - result.skipped.windows) // 2) + 1
    assert every == total
    assert steps[-1] == (total - result.skipped.windows,) * 2
    assert list(result.seconds) == ["prepare", "skip", "windows", "decode"]


def test_with_nothing_below_it_the_result_is_the_same_to_the_bit(bands: ModelSpec, scattered: Volume) -> None:
    runner = started(bands, override_settings(settings_of(), "windows", {"skip_below": 0}))
    without, with_it = (
        segment(runner, scattered, Options(output="probabilities", skip_below=below)) for below in ("none", None)
    )
    np.testing.assert_array_equal(without.segmentation.pixels, with_it.segmentation.pixels)
    assert (without.skipped, with_it.skipped and with_it.skipped.windows) == (None, 0)
    assert str(with_it.skipped).startswith("0 of ")


def test_a_stack_without_anything_in_it_is_background(random_nuclei: ModelSpec) -> None:
    runner = started(random_nuclei, settings_of())
    usual = torch.tensor([-3.0, 0.0])[:, None, None, None]
    runner.instrument(lambda _network: lambda batch: batch * 0 + usual)
    result = segment(runner, volume_of(np.zeros((20, 40, 50), np.uint8)), Options(skip_below="auto"))
    assert result.segmentation.count == 0
    assert result.skipped is not None
    assert result.skipped.windows > result.skipped.total / 2


def test_a_resampled_stack_is_skipped_by_its_own_grey_values(bands: ModelSpec, scattered: Volume) -> None:
    wanting = bands.model_copy(update={"input": bands.input.model_copy(update={"diameter": 10.0})})
    runner = started(wanting, settings_of())
    one, other = (
        segment(runner, scattered, Options(diameter=Diameter((15.0,), "px"), skip_below=below))
        for below in ("none", 600)
    )
    assert np.mean(one.segmentation.pixels != other.segmentation.pixels) < 1e-3
    assert other.skipped is not None
    assert 0 < other.skipped.windows < other.skipped.total
