"""Skipping of empty windows, and the scores of skipped windows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from segmenters import make_settings, start_runner
from torch import Tensor
from torch.nn import functional

from service.core.config import override_settings
from service.core.quantities import Diameter
from service.core.types import Options, Volume
from service.inference.preprocessing.empty_windows import (
    MAX_BACKGROUND_FRACTION,
    NOISE_SIGMAS,
    EmptyWindowFilter,
    average_background_scores,
    estimate_background,
    survey_intensities,
)
from service.inference.preprocessing.normalize import IntensityScaling, NormalizedImage
from service.inference.runner.callbacks import Callbacks
from service.inference.segment import segment
from service.inference.types import SkippedWindows
from service.inference.windows.grid import Grid
from service.inference.windows.sliding_window import SparseImage
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

edges = st.integers(1, 12)
sizes = st.tuples(edges, edges, edges)
rois = st.tuples(*[st.integers(1, 6)] * 3)


def make_volume(pixels: NDArray[Any]) -> Volume:
    """Return a volume of one channel, unless the pixels have a channel axis."""
    return Volume.from_array(pixels if pixels.ndim == 4 else pixels[None])


@settings(max_examples=40)
@given(sizes, rois, st.sampled_from([0.0, 0.25, 0.6]), st.integers(1, 2), st.integers(0, 9))
def test_the_survey_finds_the_maximum_of_every_window(size, roi, overlap, channels, seed) -> None:
    pixels = np.random.default_rng(seed).integers(0, 1000, (channels, *size)).astype(np.uint16)
    grid = Grid.cover(size, roi, overlap)
    padded = np.zeros((channels, *grid.padded_size), np.uint16)
    padded[(slice(None), *(slice(b, b + n) for b, n in zip(grid.pad_before, size, strict=True)))] = pixels
    boxes = [tuple(slice(a, a + n) for a, n in zip(start, roi, strict=True)) for start in grid.positions()]
    expected = [[channel[box].max() for box in boxes] for channel in padded]
    found = survey_intensities(make_volume(pixels), grid).window_maxima
    np.testing.assert_array_equal(found.reshape(channels, -1), expected)


def test_a_volume_of_several_blocks_is_surveyed_as_a_whole() -> None:
    pixels = np.zeros((5, 2100, 2100), np.uint8)
    pixels[2, 2000, 7] = 200
    grid = Grid.cover((5, 2100, 2100), (2, 700, 700), 0)
    expected = np.zeros((3, 3, 3))
    expected[1, 2, 0] = 200
    survey = survey_intensities(make_volume(pixels), grid)
    np.testing.assert_array_equal(survey.window_maxima[0], expected)
    assert 2**19 < survey.samples[0].size < 2**21


@settings(max_examples=60)
@given(sizes, sizes, rois, st.sampled_from([0.0, 0.25]), st.data())
def test_no_resampled_window_exceeds_its_surveyed_maximum(size, scaled, roi, overlap, data) -> None:
    pixels = np.zeros(size, np.float32)
    pixels[tuple(data.draw(st.integers(0, edge - 1)) for edge in size)] = 1
    resampled = functional.interpolate(torch.from_numpy(pixels)[None, None], size=scaled, mode="trilinear")[0, 0]
    grid = Grid.cover(scaled, roi, overlap)
    brightest = survey_intensities(make_volume(pixels), grid).window_maxima.ravel()
    for start, maximum in zip(grid.positions(), brightest, strict=True):
        inside = (slice(max(a - b, 0), a - b + n) for a, b, n in zip(start, grid.pad_before, roi, strict=True))
        assert float(resampled[tuple(inside)].max()) <= maximum + 1e-6


def test_pixels_that_are_not_finite_are_ignored() -> None:
    pixels = np.full((4, 4, 8), 3.0, np.float32)
    pixels[1, 1, 1], pixels[2, 2, 6], pixels[:, :, 4:6] = np.nan, np.inf, -np.inf
    survey = survey_intensities(make_volume(pixels), Grid.cover((4, 4, 8), (4, 4, 4), 0))
    assert survey.window_maxima.tolist() == [[[[3, 3]]]]
    assert survey.samples[0].tolist() == [3.0] * (4 * 4 * 6 - 2)


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_the_background_covers_noise_but_little_of_the_intensity_range(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(500, 10, 300_000)
    bright = rng.uniform(500, 5000, 30_000)
    sample = np.concatenate([noise, bright]).round(0 if kind == "uint16" else 9).astype(kind)
    assert estimate_background(sample) == pytest.approx(500 + NOISE_SIGMAS * 10, abs=6)
    assert noise.max() < estimate_background(sample)
    tissue = rng.normal(300, 80, 200_000).clip(0).astype(kind)
    low, high = np.percentile(tissue, (1, 99.8))
    assert estimate_background(tissue) == pytest.approx(low + MAX_BACKGROUND_FRACTION * (high - low))


@pytest.mark.parametrize("value", [0, 7])
def test_the_background_is_the_value_of_most_pixels(value: int) -> None:
    sample = np.full(1000, value, np.uint8)
    assert estimate_background(sample) == value
    sample[:200] = np.arange(value + 1, value + 201)
    assert estimate_background(sample) == value


def make_empty_window_filter(
    pixels: NDArray[Any], spec: ModelSpec, score_windows: Any, batch_size: int = 2
) -> EmptyWindowFilter:
    depth, height, width = pixels.shape
    grid = Grid.cover((depth, height, width), spec.input.roi_size, 0.25)
    return EmptyWindowFilter(
        NormalizedImage(make_volume(pixels), [IntensityScaling(0, 1)]), grid, batch_size, spec, score_windows
    )


def make_network(max_background: float) -> Any:
    """Return a network for `bands` that classifies voxels up to this brightness as background; [N, 3, z, y, x]."""
    return lambda windows: torch.cat([0.5 - (windows > max_background).float(), windows * 0, windows * 0], 1)


def test_skipped_windows_get_the_scores_of_the_brightest_skipped_windows(bands: ModelSpec) -> None:
    pixels = np.full((16, 32, 256), 10, np.float32)
    pixels[3, 3, 140] = 1000
    pixels[0, 0, 40], pixels[0, 0, 212] = 20, 30
    scored = list[Tensor]()

    def score_windows(windows: Tensor) -> Tensor:
        scored.append(windows)
        return torch.cat([windows + 100, windows, windows], 1)

    image, skipped, notes = make_empty_window_filter(pixels, bands, score_windows).skip(make_volume(pixels), 30)
    assert isinstance(image, SparseImage)
    assert [float(window.max()) for window in scored[0]] == [30, 20]
    torch.testing.assert_close(image.scores, torch.tensor([100.0, 0, 0]) + scored[0].mean())
    assert skipped == SkippedWindows(10, 11, (30.0,))
    assert image.skipped_positions == {(0, 0, x) for x in (*range(0, 217, 24), 224) if x != 120}
    assert notes == ()


@pytest.mark.parametrize(
    ("width", "below", "batch_size", "total"), [(200, -1, 2, 8), (200, 9.99, 2, 8), (80, 10, 4, 3)]
)
def test_the_image_is_unchanged_if_too_few_windows_are_empty(bands, width, below, batch_size, total) -> None:
    """A few empty windows do not justify an additional call of the network."""
    pixels = np.full((16, 32, width), 10, np.float32)
    image, skipped, notes = make_empty_window_filter(pixels, bands, None, batch_size).skip(make_volume(pixels), below)
    assert not isinstance(image, SparseImage)
    assert skipped is not None
    assert (skipped.windows, skipped.total, notes) == (0, total, ())


def test_windows_with_objects_are_skipped_only_if_the_request_sets_the_limit(bands: ModelSpec) -> None:
    pixels = np.random.default_rng(0).normal(100, 2, (16, 64, 200)).astype(np.float32)
    pixels[:, :, :40] = 1000
    image, skipped, notes = make_empty_window_filter(pixels, bands, make_network(105)).skip(make_volume(pixels), "auto")
    assert (isinstance(image, SparseImage), skipped and skipped.windows) == (False, 0)
    assert "finds foreground" in notes[0]
    image, skipped, notes = make_empty_window_filter(pixels, bands, make_network(105)).skip(make_volume(pixels), 115)
    assert isinstance(image, SparseImage)
    assert image.scores.tolist() == [0.5, 0, 0]
    assert "Try a lower skip_below" in notes[0]
    image, _, notes = make_empty_window_filter(pixels, bands, make_network(0)).skip(make_volume(pixels), 115)
    assert not isinstance(image, SparseImage)
    assert "finds foreground" in notes[0]


def test_the_background_of_an_instance_model_excludes_its_foreground(random_nuclei: ModelSpec) -> None:
    decoding = Instances(kind="instances", minimum_size=3)
    spec = random_nuclei.model_copy(update={"decoding": decoding})
    scores = torch.full((1, 2, 4, 4, 4), -2.0)
    scores[0, :, 0, 0, :2] = 5
    background, found = average_background_scores(scores, spec)
    assert (background.tolist() if background is not None else None, found) == ([-2, -2], False)
    scores[0, :, 0, 0, :3] = 5
    assert average_background_scores(scores, spec)[1]
    assert average_background_scores(torch.full((1, 2, 2, 2, 2), 5.0), spec) == (None, True)


def test_some_empty_rows_are_computed_so_that_scores_are_passed_on_in_portions(bands: ModelSpec) -> None:
    pixels = np.zeros((16, 32 * 60, 32 * 8), np.uint8)
    spec = bands.model_copy(update={"outputs": tuple(f"output {n}" for n in range(40))})
    empty_window_filter = make_empty_window_filter(
        pixels, spec, lambda windows: torch.zeros(len(windows), 40, *windows.shape[2:])
    )
    grid = Grid.cover(pixels.shape, spec.input.roi_size, 0.25)
    max_skipped = grid.compute_max_skipped_rows(40, 2)
    image, _, _ = empty_window_filter.skip(make_volume(pixels), 0)
    assert isinstance(image, SparseImage)
    computed = {y for _, y, _ in set(grid.positions()) - image.skipped_positions}
    rows = [y in computed for y in grid.starts[1]]
    assert max_skipped < len(rows)
    assert all(any(rows[first : first + max_skipped + 1]) for first in range(len(rows) - max_skipped))
    assert sum(rows) <= len(rows) / max_skipped + 1


@pytest.fixture(scope="module")
def scattered(phantom: Any) -> Volume:
    """A stack of noise with a few spheres in one corner."""
    pixels = np.random.default_rng(1).normal(400, 20, (24, 200, 240)).astype(np.uint16)
    pixels[:, :70, :80] = phantom.image
    return make_volume(pixels)


@pytest.mark.parametrize(("output", "below"), [("classes", "auto"), ("probabilities", 600)])
def test_skipping_gives_almost_the_same_result_with_fewer_windows(bands, scattered: Volume, output, below) -> None:
    runner, calls = start_runner(bands, make_settings()), list[int]()

    def count_windows(network: Any) -> Any:
        return lambda batch: (calls.append(len(batch)), network(batch))[1]

    runner.instrument(count_windows)
    steps = list[tuple[int, int]]()
    unskipped = segment(runner, scattered, Options(output=output))
    windows_without_skipping, _ = sum(calls), calls.clear()
    result = segment(
        runner,
        scattered,
        Options(output=output, skip_below=below),
        callbacks=Callbacks(progress=lambda done, total: steps.append((done, total))),
    )
    expected, actual = unskipped.segmentation.pixels, result.segmentation.pixels
    if output == "classes":
        assert np.mean(expected != actual) < 1e-4
        np.testing.assert_array_equal(expected[:, :70, :80], actual[:, :70, :80])
    else:
        assert np.abs(expected - actual).mean() < 0.01
    assert unskipped.skipped is None
    assert result.skipped is not None
    total = runner.estimator.estimate(scattered, Options()).windows
    assert result.skipped.total == total
    assert result.skipped.windows > total / 2
    # Batches of two, and one more batch for the brightest skipped windows.
    assert len(calls) == -(-(total - result.skipped.windows) // 2) + 1
    assert windows_without_skipping == total
    assert steps[-1] == (total - result.skipped.windows,) * 2
    assert list(result.seconds) == ["prepare", "skip", "windows", "decode"]


def test_the_result_is_identical_if_no_window_is_below_the_limit(bands: ModelSpec, scattered: Volume) -> None:
    runner = start_runner(bands, override_settings(make_settings(), "windows", {"skip_below": 0}))
    without_skipping, with_skipping = (
        segment(runner, scattered, Options(output="probabilities", skip_below=below)) for below in ("none", None)
    )
    np.testing.assert_array_equal(without_skipping.segmentation.pixels, with_skipping.segmentation.pixels)
    assert (without_skipping.skipped, with_skipping.skipped and with_skipping.skipped.windows) == (None, 0)
    assert str(with_skipping.skipped).startswith("0 of ")


def test_an_empty_stack_is_background(random_nuclei: ModelSpec) -> None:
    runner = start_runner(random_nuclei, make_settings())
    background = torch.tensor([-3.0, 0.0])[:, None, None, None]
    runner.instrument(lambda _network: lambda batch: batch * 0 + background)
    result = segment(runner, make_volume(np.zeros((20, 40, 50), np.uint8)), Options(skip_below="auto"))
    assert result.segmentation.count == 0
    assert result.skipped is not None
    assert result.skipped.windows > result.skipped.total / 2


def test_skip_below_is_a_gray_value_of_the_original_stack(bands: ModelSpec, scattered: Volume) -> None:
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"diameter": 10.0})})
    runner = start_runner(spec, make_settings())
    expected, actual = (
        segment(runner, scattered, Options(diameter=Diameter((15.0,), "px"), skip_below=below))
        for below in ("none", 600)
    )
    assert np.mean(expected.segmentation.pixels != actual.segmentation.pixels) < 1e-3
    assert actual.skipped is not None
    assert 0 < actual.skipped.windows < actual.skipped.total
