"""C++ kernels give the same results as NumPy and torch when they normalize and blend windows."""

import itertools

import numpy as np
import pytest
import torch
from fakes import bind_to_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from segmenters import make_settings, start_runner
from torch import Tensor

from service.core.errors import NonFiniteScores
from service.inference.preprocessing.normalize import IntensityScaling
from service.inference.windows.blending import Blending, BlendingSetup, Slab, make_blender
from service.inference.windows.grid import Grid
from service.inference.windows.kernels import PIXEL_DTYPES, OverlapSums, WindowKernels, window_kernels
from service.models.spec import ModelSpec

CPU = torch.device("cpu")
GAUSSIAN = Blending()
LAYOUTS = {
    "contiguous": lambda scores: scores,
    "channels last": lambda scores: scores.to(memory_format=torch.channels_last_3d),
    "bfloat16": lambda scores: scores.bfloat16(),
    "bfloat16, channels last": lambda scores: scores.bfloat16().to(memory_format=torch.channels_last_3d),
    "float64": lambda scores: scores.double(),
    "strided view": lambda scores: torch.cat([scores, scores], 4)[..., : scores.shape[4]],
}


@pytest.fixture(scope="module")
def kernel() -> WindowKernels:
    assert window_kernels.supports(CPU)
    return window_kernels


def blend(kernel: WindowKernels, grid: Grid, windows: Tensor, blending: Blending) -> list[Slab]:
    blender = make_blender(grid, windows.shape[1], BlendingSetup(blending, CPU, kernel))
    return blender.add(list(grid.positions()), windows)


OVERLAPS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9])
# Small shapes, and shapes with rows of many vectors.
SHAPES = st.tuples(st.tuples(*[st.integers(1, 13)] * 3), st.tuples(*[st.integers(1, 7)] * 3)) | st.tuples(
    st.tuples(st.just(3), st.just(5), st.integers(40, 150)),
    st.tuples(st.just(2), st.just(3), st.sampled_from([16, 19, 32, 37, 40])),
)


@given(
    seed=st.integers(0, 2**16),
    shape=SHAPES,
    overlap=OVERLAPS,
    outputs=st.integers(1, 6),
    layout=st.sampled_from(sorted(LAYOUTS)),
    mode=st.sampled_from(["constant", "gaussian"]),
    fault=st.sampled_from([None, None, torch.nan, torch.inf]),
    data=st.data(),
)
def test_kernel_blends_like_torch_and_detects_a_non_finite_score(
    kernel, seed, shape, overlap, outputs, layout, mode, fault, data
):
    torch.manual_seed(seed)
    grid = Grid.cover(*shape, overlap)
    windows = torch.randn(grid.num_windows, outputs, *grid.window_size)
    if fault is not None:
        # An axis with a single window may be padded, and scores in the padding are ignored.
        valid_scores = windows[(slice(None), slice(None), *grid.valid_region)]
        position = [data.draw(st.integers(0, edge - 1)) for edge in valid_scores.shape]
        valid_scores[tuple(position)] = fault
    windows = LAYOUTS[layout](windows)
    if fault is not None:
        for kernels in (bind_to_variants(window_kernels), kernel):
            with pytest.raises(NonFiniteScores):
                blend(kernels, grid, windows, Blending(mode))
        return
    expected_slabs, slabs = (
        blend(kernels, grid, windows, Blending(mode)) for kernels in (bind_to_variants(window_kernels), kernel)
    )
    for expected, slab in zip(expected_slabs, slabs, strict=True):
        assert slab[:2] == expected[:2]
        torch.testing.assert_close(slab.scores, expected.scores, atol=1e-6, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(*[st.integers(1, 13)] * 2, st.integers(1, 30)),
    roi=st.tuples(*[st.integers(1, 7)] * 3),
    overlap=st.sampled_from([0.0, 0.25, 0.5, 0.6, 0.9]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
)
def test_torch_blending_is_bitwise_the_same_for_any_split_into_batches(seed, size, roi, overlap, lengths):
    torch.manual_seed(seed)
    grid = Grid.cover(size, roi, overlap)
    windows, positions = torch.randn(grid.num_windows, 2, *roi), list(grid.positions())
    expected = blend(bind_to_variants(window_kernels), grid, windows, GAUSSIAN)
    blender, found = make_blender(grid, 2, BlendingSetup(GAUSSIAN, CPU, bind_to_variants(window_kernels))), list[Slab]()
    first, ends = 0, itertools.cycle(lengths)
    while first < len(positions):
        part = slice(first, first + next(ends))
        found += blender.add(positions[part], windows[part])
        first = part.stop
    assert [slab[:2] for slab in found] == [slab[:2] for slab in expected]
    assert all(torch.equal(a.scores, b.scores) for a, b in zip(found, expected, strict=True))


def test_slabs_reuse_the_memory_of_released_slabs(kernel):
    grid = Grid.cover((24, 32, 32), (8, 8, 8), 0.25)
    blender = make_blender(grid, 2, BlendingSetup(Blending(), CPU, kernel))
    positions, last, rows = set(), None, 0
    for position in grid.positions():
        for slab in blender.add([position], torch.ones(1, 2, *grid.window_size)):
            # Two slabs exist: this one and the previous one.
            assert last is None or last.scores.data_ptr() != slab.scores.data_ptr()
            last, rows = slab, rows + 1
            positions.add(slab.scores.data_ptr())
    assert rows > 10
    assert len(positions) == 2


@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("thread_count", [2, 5])
def test_blending_is_bitwise_the_same_for_any_number_of_threads(kernel, thread_count, overlap):
    grid = Grid.cover((9, 11, 50), (4, 6, 20), overlap)
    windows = torch.randn(grid.num_windows, 3, *grid.window_size)
    expected = blend(kernel, grid, windows, GAUSSIAN)
    previous_thread_count = torch.get_num_threads()
    torch.set_num_threads(thread_count)
    try:
        found = blend(kernel, grid, windows, GAUSSIAN)
    finally:
        torch.set_num_threads(previous_thread_count)
    assert all(torch.equal(a.scores, b.scores) for a, b in zip(expected, found, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(PIXEL_DTYPES),
    size=st.tuples(*[st.integers(1, 9)] * 3),
    steps=st.tuples(*[st.sampled_from([1, 2, -1])] * 3),
    is_bfloat16=st.booleans(),
    is_channels_last=st.booleans(),
    limits=st.sampled_from([(-1e6, 1e6), (0.0, 1.0)]),
)
def test_scaling_equals_numpy(kernel, seed, dtype, size, steps, is_bfloat16, is_channels_last, limits):
    random = np.random.default_rng(seed)
    full_size = tuple(length * abs(step) for length, step in zip(size, steps, strict=True))
    if dtype.kind == "f":
        pixels = (random.standard_normal(full_size) * 1e3).astype(dtype)
    else:
        pixels = random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, full_size, dtype, endpoint=True)
    pixels = pixels[tuple(slice(None, None, step) for step in steps)]
    pixels.flags.writeable = False
    scaling = IntensityScaling(*random.uniform(0.1, 300, 2).tolist(), *limits)
    out = torch.empty(1, 2, *size, dtype=torch.bfloat16 if is_bfloat16 else torch.float32)
    if is_channels_last:
        out = out.to(memory_format=torch.channels_last_3d)
    assert kernel.can_scale(pixels, out)
    kernel.scale(pixels, out[0, 1], scaling.offset, scaling.scale, limits)
    assert torch.equal(out[0, 1], torch.from_numpy(scaling.apply(pixels)).to(out.dtype))


def test_unsupported_dtypes_and_devices_are_reported(kernel):
    pixels = np.zeros((1, 2, 3), np.uint16)
    assert kernel.can_scale(pixels, torch.empty(1, 2, 3))
    assert not kernel.can_scale(pixels.astype(np.float64), torch.empty(1, 2, 3))
    unaligned = np.zeros((1, 2, 3), [("mask", np.uint8), ("pixel", np.uint16)])["pixel"]
    assert not kernel.can_scale(unaligned, torch.empty(1, 2, 3)), "the pixels are not aligned"
    assert not kernel.can_scale(pixels, torch.empty(1, 2, 3, dtype=torch.float16))
    assert not kernel.can_scale(pixels, torch.empty(1, 2, 3, device="meta"))
    assert not kernel.supports(torch.device("cuda"))
    assert not bind_to_variants(window_kernels).supports(CPU)


def test_invalid_arguments_are_rejected_before_memory_is_accessed(kernel):
    grid = Grid.cover((6, 6, 9), (4, 4, 4), 0.25)

    def sums(**changed):
        arguments = {"num_outputs": 2, "size": (6, 6, 9), "weights": (torch.ones(4),) * 3, "starts": grid.starts}
        return OverlapSums(**(arguments | {"min_weight": 1e-3} | changed))

    for changed in (
        {"weights": (torch.ones(4, dtype=torch.float64),) * 3},
        {"weights": (torch.ones(4), torch.ones(4), torch.ones(4, device="meta"))},
        {"weights": (torch.ones(4), torch.ones(4), torch.ones(3))},
        {"size": (6, 6, 8)},
        {"starts": ((0,), (0, 2), (0, 3, 5))},
        {"starts": ((0, 2), (0, 2), (0, 5))},
        {"starts": ((0, 2), (0, 2), (0, 3, 3, 5))},
        {"starts": ((0, 2), (0, 2), ())},
    ):
        with pytest.raises(ValueError, match=r"weights must|do not cover"):
            sums(**changed)
    scores, means = torch.zeros(2, 4, 4, 4), sums().allocate_means(2, 2)
    for window, index, memory in (
        (torch.zeros(2, 4, 4, 5), (0, 0, 0), means),
        (torch.zeros(2, 4, 4, 4, device="meta"), (0, 0, 0), means),
        (scores, (0, 0, 3), means),
        (scores, (0, 0, -1), means),
        (scores, (0, 1, 0), means),
        (scores, (1, 0, 0), means),
        (scores, (0, 0, 0), means.double()),
        (scores, (0, 0, 0), means.transpose(1, 2)),
        (scores, (0, 0, 0), means.to("meta")),
    ):
        with pytest.raises(ValueError, match=r"cannot add|cannot write"):
            kernel.blend(sums(), index, window, memory)
    with pytest.raises(ValueError, match="cannot scale"):
        kernel.scale(np.zeros((1, 2, 3), np.uint16), torch.zeros(1, 2, 4), 0.0, 1.0, (0.0, 1.0))


def test_report_warns_if_the_kernels_are_missing(bands: ModelSpec, monkeypatch):
    monkeypatch.setattr("service.inference.runner.model_runner.window_kernels", bind_to_variants(window_kernels))
    (warning,) = start_runner(bands, make_settings()).report().warnings
    assert "AVX2" in warning
