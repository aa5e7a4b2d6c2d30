"""A batch as one step gives the scores of windows one by one, and of MONAI."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn

from service.core.errors import NonFiniteScores
from service.core.volume import Size
from service.engine.cuda_graph import GraphedNetwork
from service.inference.batcher import WindowBatcher
from service.inference.windows.arena import (
    ArenaScan,
    ArenaWindow,
    Ranges,
    WindowStep,
    add_steps,
    make_arena,
    unused_table,
)
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow

CPU = torch.device("cpu")
edges = st.integers(1, 13)
rois = st.tuples(*[st.integers(1, 7)] * 3)


class Network(nn.Module):
    """Scores that depend on the place in the window; each voxel of a batch is computed alone."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x[0, 0].numel()).view(x.shape[2:])
        return torch.cat((x.sum(1, keepdim=True) * 2, x[:, :1] + place * 0.01, -x[:, -1:]), 1)


def make(
    roi: Size, batch_size: int = 2, channels: int = 1, nbytes: int = 2**22, **options: Any
) -> tuple[SlidingWindow, ArenaWindow]:
    network, blending = Network(), Blending(options.pop("mode", "gaussian"))
    window = SlidingWindow(network, channels, roi, batch_size, blending=blending, device=CPU, **options)
    arena = make_arena(window, 3, nbytes)
    return window, ArenaWindow(window, arena, WindowStep(network, arena, window.batch, 3, blending), 3)


def whole(window: SlidingWindow, image: Tensor, overlap: float) -> Tensor:
    scores = torch.full((1, 3, *image.shape[2:]), torch.nan)
    for z0, y0, slab in window.run(image, overlap):
        scores[:, :, z0 : z0 + slab.shape[2], y0 : y0 + slab.shape[3]] = slab
    return scores


@settings(max_examples=15, deadline=None)
@given(
    size=st.tuples(edges, edges, edges),
    roi=rois,
    overlap=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]),
    batch_size=st.integers(1, 5),
    channels=st.integers(1, 2),
    mode=st.sampled_from(["gaussian", "constant"]),
)
def test_a_step_gives_the_scores_of_windows_one_by_one_and_of_monai(
    size: Size, roi: Size, overlap: float, batch_size: int, channels: int, mode: str
) -> None:
    image = torch.randn(1, channels, *size)
    plain, steps = make(roi, batch_size, channels, mode=mode)
    assert isinstance(steps.scan(image, overlap), ArenaScan)
    found = whole(steps, image, overlap)
    torch.testing.assert_close(found, whole(plain, image, overlap), atol=1e-5, rtol=1e-5)
    expected = sliding_window_inference(image, roi, batch_size, Network(), overlap, mode=mode)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_images_of_several_requests_share_a_step_also_with_one_that_has_no_room() -> None:
    plain, steps = make((4, 4, 4), 3, nbytes=4 * 5 * 600)
    images = [torch.randn(1, 1, 6, 7, edge) for edge in (5, 9, 30)]
    scans = [steps.scan(image, 0.25) for image in images]
    assert [isinstance(scan, ArenaScan) for scan in scans] == [True, True, False]
    with torch.inference_mode():
        slabs: list[list[Tensor]] = [[], [], []]
        while any(scan.left for scan in scans):
            parts = [scan.take(1) for scan in scans if scan.left]
            for part, scores in zip(parts, steps.forward(parts), strict=True):
                slabs[scans.index(part.scan)] += [slab.scores for slab in part.scan.blend(part.places, scores)]
    for image, found in zip(images, slabs, strict=True):
        for one, other in zip(found, plain.run(image, 0.25), strict=True):
            torch.testing.assert_close(one, other.scores, atol=1e-5, rtol=1e-5)


def test_room_is_given_back_and_used_again() -> None:
    _plain, steps = make((4, 4, 4), nbytes=4 * 5 * 400)
    for _ in range(5):
        image = torch.randn(1, 1, 6, 6, 6)
        scan = steps.scan(image, 0.25)
        assert isinstance(scan, ArenaScan)
        assert not isinstance(steps.scan(image, 0.25), ArenaScan), "while the first is there"
        torch.testing.assert_close(whole(steps, image, 0.25)[:, :1], 2 * image, atol=1e-5, rtol=1e-5)
        del scan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms())
def test_ranges_never_overlap(lengths: list[int], random: Any) -> None:
    ranges, taken = Ranges(20), dict[int, int]()
    for length in lengths:
        first = ranges.take(length)
        if first is not None:
            assert first + length <= 20
            assert all(first + length <= start or first >= end for start, end in taken.items())
            taken[first] = first + length
        elif not taken:
            pytest.fail("there was room")
        if taken and random.random() < 0.5:
            given_back = random.choice(sorted(taken))
            ranges.give_back(given_back)
            del taken[given_back]


def test_scores_that_are_not_finite_never_leave_and_spoil_nobody_else() -> None:
    _plain, steps = make((4, 4, 4))
    bad = torch.zeros(1, 1, 9, 9, 9)
    bad[0, 0, 8, 8, 8] = torch.nan
    with pytest.raises(NonFiniteScores):
        whole(steps, bad, 0.25)
    assert torch.isfinite(whole(steps, torch.ones(1, 1, 9, 9, 9), 0.25)).all()


def test_a_device_runs_steps_ahead() -> None:
    plain, steps = make((4, 4, 4), 3)
    image = torch.randn(1, 1, 9, 20, 13)
    device = WindowBatcher("device", mark=lambda: lambda: None)
    device.start()
    slabs = list(device.run(steps, image, 0.25, cancelled=lambda: False, progress=lambda *_: None))
    device.close()
    assert device.join(10)
    for one, other in zip(slabs, plain.run(image, 0.25), strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_the_network_gets_windows_as_in_a_batch(layout: torch.memory_format) -> None:
    seen = list[Tensor]()

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    window = SlidingWindow(
        Spy(), 2, (4, 4, 4), 3, blending=Blending(), device=CPU, dtype=torch.bfloat16, memory_format=layout
    )
    arena = make_arena(window, 2, 2**20)
    steps = ArenaWindow(window, arena, WindowStep(Spy(), arena, window.batch, 2, Blending()), 2)
    list(steps.run(torch.rand(1, 2, 5, 5, 5), 0.25))
    assert {(each.shape, each.dtype, each.stride()) for each in seen} == {
        (window.batch.shape, window.batch.dtype, window.batch.stride())
    }


def test_copies_for_other_networks_have_no_steps() -> None:
    _plain, steps = make((4, 4, 4), 3)
    image = torch.rand(1, 1, 9, 9, 9)
    for other in (steps.with_network(lambda x: x.repeat(1, 3, 1, 1, 1)), steps.with_capacity(1)):
        assert not isinstance(other.scan(image, 0.25), ArenaScan)
        assert whole(other, image, 0.25).isfinite().all()


def test_a_table_without_windows_changes_no_sums_that_are_read() -> None:
    _plain, steps = make((4, 4, 4), 3)
    image = torch.rand(1, 1, 9, 9, 9)
    scan = steps.scan(image, 0.25)
    assert isinstance(scan, ArenaScan)
    assert steps._step is not None
    with torch.inference_mode():
        steps._step(unused_table(steps))
    assert not scan._sums.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_recorded_step_is_replayed_for_any_windows() -> None:
    device, blending = torch.device("cuda", 0), Blending()
    network = nn.Conv3d(1, 2, 3, padding=1).to(device).requires_grad_(requires_grad=False)
    plain = SlidingWindow(network, 1, (16, 32, 32), 4, blending=blending, device=device)
    steps, _nbytes = add_steps(plain, network, 2, 2**26, GraphedNetwork)
    for size in ((40, 50, 60), (7, 90, 33)):
        image = torch.rand(1, 1, *size, device=device)
        for one, other in zip(steps.run(image, 0.25), plain.run(image, 0.25), strict=True):
            torch.testing.assert_close(one.scores, other.scores, atol=1e-3, rtol=1e-3)
