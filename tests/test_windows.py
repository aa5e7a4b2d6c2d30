from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.inferers.utils import sliding_window_inference
from torch import Tensor

from service.errors import Cancelled, NonFiniteScores
from service.windows import Blending, Grid, Slab, SlidingWindow, importance_map, row_weight

CPU = torch.device("cpu")

edges = st.integers(1, 15)
sizes = st.tuples(edges, edges, edges)
rois = st.tuples(*[st.integers(2, 8)] * 3)
overlaps = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75])
batch_sizes = st.integers(1, 5)
blendings = st.builds(Blending, st.sampled_from(["constant", "gaussian"]), st.sampled_from([0.05, 0.125, 0.4]))


class Spy:
    """A network with two outputs that depend on the place in the window, and that remembers how it was called."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.strides: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        self.strides.append(x.stride())
        place = sum(torch.arange(edge).reshape([-1] + [1] * axis) for axis, edge in enumerate(reversed(x.shape[2:])))
        return torch.cat([x[:, :1] * place, x.mean((1, 2, 3, 4), keepdim=True) - x[:, -1:] ** 2], dim=1)


def sliding(
    network: Any, roi: tuple[int, int, int], batch: int = 2, channels: int = 1, **keywords: Any
) -> SlidingWindow:
    options = {"blending": Blending(), "device": CPU} | keywords
    return SlidingWindow(network, channels, roi, batch, **options)


def assemble(slabs: list[Slab]) -> Tensor:
    """All slabs as one volume; they must follow one another without gaps."""
    for before, after in itertools.pairwise(slabs):
        assert after.z0 == before.z0 + before.scores.shape[2]
    assert slabs[0].z0 == 0
    return torch.cat([slab.scores for slab in slabs], dim=2)


def image_of(size: tuple[int, int, int], channels: int = 1) -> Tensor:
    return torch.rand((1, channels, *size), generator=torch.Generator().manual_seed(sum(size)))


@given(sizes, rois, overlaps, batch_sizes, blendings)
@settings(max_examples=80, deadline=None)
def test_identity_network_gives_the_image_back(
    size: tuple[int, int, int], roi: tuple[int, int, int], overlap: float, batch: int, blending: Blending
) -> None:
    image = image_of(size)
    result = assemble(list(sliding(lambda x: x, roi, batch, blending=blending).run(image, overlap)))
    torch.testing.assert_close(result, image, rtol=1e-5, atol=1e-6)


@given(sizes, rois, overlaps, batch_sizes, blendings, st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_equals_monai(
    size: tuple[int, int, int],
    roi: tuple[int, int, int],
    overlap: float,
    batch: int,
    blending: Blending,
    channels: int,
) -> None:
    image = image_of(size, channels)
    expected = sliding_window_inference(
        image, roi, batch, Spy(), overlap=overlap, mode=blending.mode, sigma_scale=blending.sigma
    )
    result = assemble(list(sliding(Spy(), roi, batch, channels, blending=blending).run(image, overlap)))
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() < 1e-5


@pytest.mark.parametrize("size", [(16, 32, 32), (24, 70, 80), (9, 40, 33)])
def test_equals_monai_with_a_real_network(bands_network: torch.nn.Module, size: tuple[int, int, int]) -> None:
    image = image_of(size)
    with torch.inference_mode():
        expected = sliding_window_inference(image, (16, 32, 32), 4, bands_network, overlap=0.25, mode="gaussian")
    result = assemble(list(sliding(bands_network, (16, 32, 32), 4).run(image, 0.25)))
    assert (result - expected).abs().max() < 1e-5


@given(sizes, rois, overlaps, batch_sizes)
@settings(max_examples=40, deadline=None)
def test_one_shape_and_no_more_calls_than_needed(
    size: tuple[int, int, int], roi: tuple[int, int, int], overlap: float, batch: int
) -> None:
    spy = Spy()
    list(sliding(spy, roi, batch).run(image_of(size), overlap))
    assert set(spy.shapes) == {(batch, 1, *roi)}
    assert len(set(spy.strides)) == 1
    assert len(spy.shapes) == -(-Grid.cover(size, roi, overlap).count // batch)


@given(sizes, rois, overlaps)
@settings(max_examples=40, deadline=None)
def test_row_weight_is_the_sum_over_the_windows_of_a_row(
    size: tuple[int, int, int], roi: tuple[int, int, int], overlap: float
) -> None:
    grid = Grid.cover(size, roi, overlap)
    importance = importance_map(roi, Blending(), CPU)
    expected = torch.zeros(grid.padded)
    weights = torch.zeros(grid.padded)
    for z, y, x in grid.positions():
        expected[z : z + roi[0], y : y + roi[1], x : x + roi[2]] += importance
    for z in grid.starts[0]:
        weights[z : z + roi[0]] += row_weight(grid, importance)
    torch.testing.assert_close(weights, expected)
    assert expected.min() > 0


def test_planes_leave_before_later_rows_are_computed() -> None:
    calls = itertools.count(1)
    seen: list[int] = []

    def network(x: Tensor) -> Tensor:
        seen.append(next(calls))
        return x

    slabs = sliding(network, (4, 8, 8), batch=1).run(image_of((16, 8, 8)), 0.25)
    first = next(slabs)
    assert first.scores.shape == (1, 1, 3, 8, 8)
    assert len(seen) == 2
    assert max(slab.scores.shape[2] for slab in slabs) <= 4
    assert len(seen) == 5


def test_a_slab_stays_as_it_was_given() -> None:
    """The decoder may keep a slab: later rows must not write into it."""
    slabs = sliding(lambda x: x, (4, 4, 4), batch=3).run(image_of((17, 9, 9)), 0.5)
    kept = [(slab, slab.scores.clone()) for slab in slabs]
    assert all(torch.equal(slab.scores, copy) for slab, copy in kept)


def test_the_last_batch_is_filled_up_with_windows_of_the_same_image() -> None:
    """One window in a batch of three: the other two slots must not change its scores."""
    image = image_of((4, 4, 4))
    window = sliding(Spy(), (4, 4, 4), batch=3)
    alone = assemble(list(sliding(Spy(), (4, 4, 4), batch=1).run(image, 0.25)))
    for _ in range(2):
        assert torch.equal(assemble(list(window.run(image, 0.25))), alone)


def test_cancelled_is_asked_before_every_batch() -> None:
    answers = iter([False, False, True])
    spy = Spy()
    slabs = sliding(spy, (4, 4, 4), batch=2).run(image_of((4, 4, 40)), 0.0, cancelled=lambda: next(answers))
    with pytest.raises(Cancelled, match="4 of 10 windows"):
        list(slabs)
    assert len(spy.shapes) == 2


def test_progress_counts_windows() -> None:
    seen: list[tuple[int, int]] = []
    list(sliding(Spy(), (4, 4, 4), 4).run(image_of((4, 4, 40)), 0.0, progress=lambda *step: seen.append(step)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("z", [0, 11])
def test_non_finite_scores_are_refused(value: float, z: int) -> None:
    image = torch.zeros((1, 1, 12, 8, 8))
    image[0, 0, z, 5, 5] = value
    with pytest.raises(NonFiniteScores, match="precision"):
        list(sliding(lambda x: x, (4, 8, 8)).run(image, 0.25))


def test_batches_have_the_dtype_and_memory_format_of_the_engine() -> None:
    spy = Spy()
    window = sliding(
        lambda x: spy(x).float(),
        (4, 8, 8),
        channels=3,
        dtype=torch.bfloat16,
        memory_format=torch.channels_last_3d,
    )
    assert window.batch.dtype == torch.bfloat16
    assert window.batch.is_contiguous(memory_format=torch.channels_last_3d)
    scores = assemble(list(window.run(image_of((6, 8, 8), 3), 0.25)))
    assert scores.dtype == torch.float32
    assert spy.strides[0] == window.batch.stride()


def test_another_network_shares_the_batch_buffer() -> None:
    window = sliding(lambda x: x, (4, 4, 4))
    doubled = window.with_network(lambda x: 2 * x)
    image = image_of((6, 6, 6))
    assert doubled.batch is window.batch
    torch.testing.assert_close(assemble(list(doubled.run(image, 0.25))), 2 * image)
    torch.testing.assert_close(assemble(list(window.run(image, 0.25))), image)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_equals_monai_on_cuda() -> None:
    device = torch.device("cuda:0")
    image = image_of((20, 45, 50)).to(device)
    expected = sliding_window_inference(image, (8, 16, 16), 4, lambda x: x.sin(), overlap=0.25, mode="gaussian")
    result = assemble(list(sliding(lambda x: x.sin(), (8, 16, 16), 4, device=device).run(image, 0.25)))
    assert (result - expected).abs().max() < 1e-5
