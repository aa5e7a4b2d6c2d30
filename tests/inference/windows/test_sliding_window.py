import numpy as np
import pytest
import torch
from fakes import bind_to_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn
from torch.nn import functional

from service.core.errors import Cancelled, NonFiniteScores
from service.inference.windows.blending import Blending, compute_importance_map
from service.inference.windows.grid import Grid, fit_window_length, round_up
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import SlidingWindow, SparseImage
from service.models.spec_parts import Tiling

CPU = torch.device("cpu")
GAUSSIAN = Blending("gaussian", 0.125)
CONSTANT = Blending("constant")

edges = st.integers(1, 13)
rois = st.tuples(*[st.integers(1, 7)] * 3)
sizes = st.tuples(edges, edges, edges)
overlaps = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75])
blendings = st.sampled_from([GAUSSIAN, CONSTANT])


kernels = pytest.mark.parametrize("kernel", [bind_to_variants(window_kernels), window_kernels], ids=["torch", "kernel"])


@pytest.fixture(scope="module", autouse=True)
def _require_kernels():
    assert window_kernels.supports(CPU)


def make_window(network, roi, batch_size=2, blending=GAUSSIAN, channels=1, kernels=window_kernels):
    return SlidingWindow(network, channels, roi, batch_size, blending=blending, device=CPU, kernels=kernels)


def join_slabs(slabs) -> Tensor:
    """Join the slabs. They must tile the volume: rows without gaps, then planes without gaps."""
    layers, rows, z, y = [], [], 0, 0
    for slab in slabs:
        if slab.z0 != z:
            layers.append(torch.cat(rows, 3))
            z, y, rows = z + layers[-1].shape[2], 0, []
        assert (slab.z0, slab.y0) == (z, y)
        y += slab.scores.shape[3]
        rows.append(slab.scores)
    return torch.cat([*layers, torch.cat(rows, 3)], 2)


@kernels
@settings(max_examples=40, deadline=None)
@given(size=sizes, roi=rois, overlap=overlaps, batch_size=st.integers(1, 4), blending=blendings)
def test_scores_equal_those_of_monai(kernel, size, roi, overlap, batch_size, blending):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1)).eval()
    image = torch.randn(1, 2, *size)
    with torch.inference_mode():
        expected = sliding_window_inference(
            image, roi, 1, network, overlap=overlap, mode=blending.mode, sigma_scale=blending.sigma
        )
        scores = join_slabs(make_window(network, roi, batch_size, blending, 2, kernel).run(image, overlap))
    assert scores.shape == expected.shape
    assert (scores - expected).abs().max() < 1e-5


@settings(max_examples=20, deadline=None)
@given(size=sizes, roi=rois, overlap=overlaps)
def test_volumes_that_are_short_along_two_axes_are_padded_with_mirror_images(size, roi, overlap):
    torch.manual_seed(0)
    network, image = nn.Conv3d(1, 2, 3, padding=1), torch.randn(1, 1, *size)
    missing = [max(window_length - length, 0) for length, window_length in zip(size, roi, strict=True)]
    padding = [(0, 0), (0, 0), *((n // 2, n - n // 2) for n in missing)]
    mode = "symmetric" if sum(n > 0 for n in missing) >= 2 else "constant"
    padded = torch.from_numpy(np.pad(image.numpy(), padding, mode=mode))
    parts = tuple(slice(n // 2, n // 2 + length) for n, length in zip(missing, size, strict=True))
    mirrored = Blending("constant", tiling=Tiling(is_mirrored=True))
    with torch.inference_mode():
        expected = join_slabs(make_window(network, roi, blending=CONSTANT).run(padded, overlap))
        scores = join_slabs(make_window(network, roi, blending=mirrored).run(image, overlap))
    assert (scores - expected[(..., *parts)]).abs().max() < 1e-5


@pytest.mark.parametrize("size", [(16, 16, 16), (3, 5, 9), (9, 17, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_network_always_gets_the_same_shape_in_the_requested_dtype_and_layout(size, dtype, layout):
    seen = set()

    def network(x: Tensor) -> Tensor:
        seen.add((tuple(x.shape), x.dtype, x.is_contiguous(memory_format=layout), x.stride(), x.data_ptr()))
        return x.float()

    options = {"blending": GAUSSIAN, "device": CPU, "dtype": dtype, "memory_format": layout}
    image = torch.rand(1, 2, *size).bfloat16().float()
    scores = join_slabs(SlidingWindow(network, 2, (8, 8, 8), 3, **options).run(image, 0.25))
    torch.testing.assert_close(scores, image, atol=1e-6, rtol=1e-5)
    assert [each[:3] for each in seen] == [((3, 2, 8, 8, 8), dtype, True)]


def test_padding_does_not_contain_windows_of_an_earlier_volume():
    window = make_window(lambda x: x, (4, 4, 4), 4)
    join_slabs(window.run(torch.full((1, 1, 8, 8, 8), 7.0), 0))
    assert torch.equal(join_slabs(window.run(torch.zeros(1, 1, 3, 3, 3), 0)), torch.zeros(1, 1, 3, 3, 3))


@pytest.mark.parametrize("owns_scores", [False, True])
def test_scores_of_a_single_window_are_copied_unless_the_network_owns_them(owns_scores):
    scores = torch.rand(1, 2, 4, 4, 4)
    window = make_window(lambda _batch: scores, (4, 4, 4), 1)
    window = window.with_network(window.network, owns_scores=owns_scores)
    (slab,) = window.run(torch.zeros(1, 1, 4, 4, 4), 0)
    assert torch.equal(slab.scores, scores)
    assert (slab.scores.data_ptr() == scores.data_ptr()) == owns_scores


def test_slabs_are_yielded_as_soon_as_no_later_window_covers_them():
    calls = []

    def network(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    window = make_window(network, (4, 4, 4), 1)
    slabs = window.run(torch.rand(1, 1, 6, 10, 7), 0.5)
    events = [(slab.z0, slab.y0, tuple(slab.scores.shape[2:]), len(calls)) for slab in slabs]
    # Three windows along x in each row, rows at y = 0, 2, 4 and 6, layers at z = 0 and 2.
    assert events == [
        *((0, 0, (2, 2, 7), 3), (0, 2, (2, 2, 7), 6), (0, 4, (2, 2, 7), 9), (0, 6, (2, 4, 7), 12)),
        *((2, 0, (4, 2, 7), 15), (2, 2, (4, 2, 7), 18), (2, 4, (4, 2, 7), 21), (2, 6, (4, 4, 7), 24)),
    ]


def test_progress_counts_windows_and_cancellation_stops_before_the_next_batch():
    calls, steps = [], []
    window = make_window(lambda x: calls.append(len(x)) or x, (4, 4, 4), 3)

    def record(*done):
        steps.append(done)

    join_slabs(window.run(torch.rand(1, 1, 8, 8, 4), 0, progress=record))
    assert steps == [(3, 4), (4, 4)]
    with pytest.raises(Cancelled, match="after 6 of 8"):
        join_slabs(window.run(torch.rand(1, 1, 8, 8, 8), 0, cancelled=lambda: len(steps) == 4, progress=record))
    assert steps[2:] == [(3, 8), (6, 8)]
    assert len(calls) == 4


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("z", [0, 9])
def test_non_finite_scores_are_rejected(value, z, kernel):
    image = torch.zeros(1, 1, 10, 6, 6)
    image[0, 0, z, 3, 3] = value
    with pytest.raises(NonFiniteScores, match="fp32"):
        join_slabs(make_window(lambda x: x, (4, 4, 4), kernels=kernel).run(image, 0.25))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(4, 4, 4), (2, 3, 4)])
def test_scores_of_a_single_window_are_checked(dtype, size, kernel):
    window = make_window(lambda x: x.to(dtype), (4, 4, 4), kernels=kernel)
    image = torch.rand(1, 1, *size).to(dtype).float()
    (slab,) = window.run(image, 0.25)
    assert torch.equal(slab.scores.float(), image)
    assert slab.scores.dtype in {torch.float32, dtype}
    image[0, 0, -1, -1, -1] = float("nan")
    with pytest.raises(NonFiniteScores, match="fp32"):
        list(window.run(image, 0.25))


def test_network_that_accepts_any_batch_size_gets_only_the_remaining_windows():
    lengths = []

    def network(x):
        lengths.append(len(x))
        return 2 * x

    image = torch.rand(1, 1, 4, 4, 12)
    fixed_batch_size = make_window(network, (4, 4, 4), batch_size=2)
    accepts_partial_batches = fixed_batch_size.with_network(network, accepts_partial_batches=True)
    expected = join_slabs(fixed_batch_size.run(image, 0.0))
    assert lengths == [2, 2]
    assert torch.equal(join_slabs(accepts_partial_batches.run(image, 0.0)), expected)
    assert lengths == [2, 2, 2, 1]
    assert (fixed_batch_size.get_batch_size(1), accepts_partial_batches.get_batch_size(1)) == (2, 1)
    assert not accepts_partial_batches.with_network(network).accepts_partial_batches, (
        "the property belongs to the network"
    )


def test_another_network_uses_the_same_batch_buffer():
    window, image = make_window(lambda x: x, (4, 4, 4)), torch.rand(1, 1, 5, 5, 5)
    doubled = window.with_network(lambda x: 2 * x, owns_scores=True)
    assert doubled.owns_scores
    assert not doubled.with_network(lambda x: x).owns_scores, "the property belongs to the network"
    assert doubled.batch is window.batch
    torch.testing.assert_close(join_slabs(doubled.run(image, 0.25)), 2 * image)
    torch.testing.assert_close(join_slabs(window.run(image, 0.25)), image)


def blend_reference(image: Tensor, grid: Grid, skipped: frozenset, scores: Tensor, blending: Blending) -> Tensor:
    """Return the blended scores [1, K, Z, Y, X] of an identity network, with `scores` [K] in skipped windows."""
    importance = compute_importance_map(grid.window_size, blending, CPU)
    edges = zip(grid.pad_before, grid.padded_size, grid.size, strict=True)
    padding = [(before, edge - length - before) for before, edge, length in edges]
    padded = nn.functional.pad(image[0], [amount for pair in reversed(padding) for amount in pair])
    sums, weights = torch.zeros_like(padded), torch.zeros(grid.padded_size)
    for position in grid.positions():
        box = tuple(slice(start, start + edge) for start, edge in zip(position, grid.window_size, strict=True))
        region = (slice(None), *box)
        sums[region] += importance * (scores[:, None, None, None] if position in skipped else padded[region])
        weights[box] += importance
    inside = (slice(before, before + length) for before, length in zip(grid.pad_before, grid.size, strict=True))
    return (sums / weights)[(None, slice(None), *inside)]


@kernels
@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=sizes, roi=rois, overlap=overlaps, blending=blendings)
def test_skipped_windows_contribute_their_scores_and_weights(kernel, data, size, roi, overlap, blending):
    batch_size, random = data.draw(st.integers(1, 4)), data.draw(st.randoms(use_true_random=False))
    grid = Grid.cover(size, roi, overlap)
    computed = random.sample(list(grid.positions()), random.randint(1, grid.num_windows))
    skipped = frozenset(grid.positions()) - set(computed)
    image, scores, calls = torch.rand(1, 2, *size), torch.tensor([0.25, -3.0]), []

    def network(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    window = make_window(network, roi, batch_size, blending, 2, kernel)
    found = join_slabs(window.run(SparseImage(image, skipped, scores), overlap))
    torch.testing.assert_close(found, blend_reference(image, grid, skipped, scores, blending), atol=1e-5, rtol=1e-5)
    assert len(calls) == -(-len(computed) // batch_size)


STRIDED = Tiling("stardist", (2, 4, 2), (1, 2, 2))


def make_strided_network() -> nn.Module:
    """Return a network without translation invariance below (2, 4, 2) voxels, with a receptive radius of 3 scores."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 3, 3, (1, 2, 2), padding=1), nn.Tanh(), nn.Conv3d(3, 2, 3, padding=1), nn.MaxPool3d((2, 2, 1)),
        nn.Upsample(scale_factor=(2, 2, 1)),
    ).eval()  # fmt: skip


@kernels
@settings(max_examples=15, deadline=None)
@given(size=st.tuples(st.integers(13, 34), st.integers(25, 64), st.integers(25, 64)), batch_size=st.integers(1, 3))
def test_nearest_windows_that_overlap_enough_equal_the_whole_volume(kernel, size, batch_size):
    """As in StarDist, the end of the volume is mirrored up to a multiple of the alignment."""
    network, image = make_strided_network(), torch.rand(1, 1, *size)
    alignment, aligned_size = STRIDED.alignment, round_up(size, STRIDED.alignment)
    padding = [side for length, n in zip(size[::-1], aligned_size[::-1], strict=True) for side in (0, n - length)]
    roi = tuple(map(fit_window_length, aligned_size, (20, 40, 40), [0.6] * 3, alignment))
    window = SlidingWindow(network, 1, roi, batch_size, blending=Blending(tiling=STRIDED), device=CPU, kernels=kernel)
    with torch.inference_mode():
        expected = network(functional.pad(image, padding, "reflect"))
        found = join_slabs(window.run(image, 0.6))
    assert found.shape[2:] == tuple(-(-length // n) for length, n in zip(size, (1, 2, 2), strict=True))
    z, y, x = found.shape[2:]
    assert torch.allclose(found, expected[..., :z, :y, :x], atol=1e-5)
