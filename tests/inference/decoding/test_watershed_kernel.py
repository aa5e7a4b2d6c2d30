"""The C++ kernel gives the same labels as the PyTorch implementations, voxel by voxel."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakes import bind_to_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import CPU, Array, decode_objects, make_hills
from scipy import ndimage
from torch import Tensor

from service.inference.decoding.instances import InstanceDecoder
from service.inference.decoding.pieces import WatershedParameters
from service.inference.decoding.watershed_kernel import (
    MIN_BLOCK_PLANES,
    KernelWatershed,
    WatershedKernel,
    choose_block_planes,
    watershed_kernel,
)
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

PARAMETERS = WatershedParameters(0.0, 0.1, heights_are_logits=False)

Size = tuple[int, int, int]


@pytest.fixture(scope="module")
def kernel() -> Iterator[WatershedKernel]:
    """Return the kernel, which also uses several threads for small volumes."""
    assert watershed_kernel.supports(CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.inference.decoding.watershed_kernel.MIN_PARALLEL_VOXELS", 0)
        yield watershed_kernel


def assert_implementations_agree(
    kernel: WatershedKernel, heights: Array, persistence: float, threads: int = 1, **options: Any
) -> Array:
    """Assert that PyTorch and C++ give the same labels, dtypes and objects; return the labels.

    `options` are those of `decode_objects`.
    """
    (expected, torch_objects), (labels, objects) = (
        decode_objects(heights, persistence, **options, **implementation)
        for implementation in ({}, {"kernel": kernel, "threads": threads})
    )
    assert len(objects) == len(torch_objects) == labels.max(initial=0)
    for name in ("voxel_counts", "confidence", "peaks"):
        assert np.array_equal(getattr(objects, name), getattr(torch_objects, name))
    assert labels.dtype == expected.dtype
    assert np.array_equal(labels, expected)
    return labels


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(1, 9), st.integers(1, 23), st.integers(1, 21)),
    sigma=st.sampled_from([0.5, 1.0, 2.5]),
    levels=st.sampled_from([0, 1, 3, 40]),
    persistence=st.sampled_from([0.0, 0.02, 0.1, 2.0, np.inf]),
    logits=st.booleans(),
    cuts=st.sets(st.integers(1, 22)),
    block_planes=st.integers(1, 10),
    threads=st.integers(1, 4),
    along_y=st.booleans(),
    minimum_size=st.sampled_from([0, 1, 2, 30]),
    drop_border=st.booleans(),
)
def test_labels_equal_those_of_pytorch(
    kernel,
    seed,
    size,
    sigma,
    levels,
    persistence,
    logits,
    cuts,
    block_planes,
    threads,
    along_y,
    minimum_size,
    drop_border,
) -> None:
    """The cases include ties and plateaus, slabs and blocks of any number of planes, and anisotropic heights."""
    heights = make_hills(seed, size, sigma) if max(size) > 1 else np.ones(size, np.float32)
    if levels:
        heights = np.round(heights * levels) / levels
    inner_cuts = tuple(sorted(cut for cut in cuts if cut < size[along_y]))
    options = {"along_y": along_y, "logits": logits, "drop_border": drop_border, "threads": threads}
    assert_implementations_agree(
        kernel, heights, persistence, minimum_size=minimum_size, cuts=inner_cuts, block_planes=block_planes, **options
    )


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 1, 9), (7, 1, 1), (2, 3, 1), (5, 8, 13)])
@pytest.mark.parametrize("height", [1.0, 0.0, -0.0, -3.0, 90.0, 1e-40, -1e30, -np.inf])
@pytest.mark.parametrize("logits", [False, True])
def test_a_plateau_of_any_height_and_shape_is_one_object(
    kernel: WatershedKernel, size: Size, height: float, logits: bool
) -> None:
    labels = assert_implementations_agree(kernel, np.full(size, height), 0.1, logits=logits)
    assert np.count_nonzero(labels) == (height > -np.inf) * np.prod(size)
    if np.isfinite(height):
        assert labels.max() == 1


def test_a_single_voxel_is_found_at_any_position(kernel: WatershedKernel) -> None:
    for position in np.ndindex(3, 4, 5):
        heights = np.full((3, 4, 5), -np.inf)
        heights[position] = 0.5
        assert np.argwhere(assert_implementations_agree(kernel, heights, 0.1, logits=True)).tolist() == [list(position)]
        at_a_face = position[0] != 1 or position[1] in {0, 3} or position[2] in {0, 4}
        assert assert_implementations_agree(kernel, heights, 0.1, drop_border=True).any() != at_a_face


def test_flattened_objects_and_many_passes_are_decoded_as_in_pytorch(kernel: WatershedKernel) -> None:
    for stride in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (3, 3, 1)):
        heights = make_hills(7, (40, 40, 40), sigma=4)[tuple(slice(None, None, step) for step in stride)]
        assert_implementations_agree(kernel, heights, 0.2, cuts=(3,))
    crowd = np.random.default_rng(2).random((24, 25, 26))
    for persistence in (0.05, 0.3, np.inf):
        assert assert_implementations_agree(kernel, crowd, persistence, cuts=(7,), block_planes=3).any()


@pytest.mark.parametrize("levels", [None, 200])
@pytest.mark.parametrize("along_y", [False, True])
def test_removing_redundant_passes_does_not_change_labels(kernel, levels, *, along_y) -> None:
    """Low hills in blocks of one plane have millions of passes, many of equal height if there are few levels."""
    heights = 0.3 * make_hills(8, (300, 14, 300) if along_y else (14, 300, 300), sigma=2)
    if levels is not None:
        heights = np.round(heights * levels) / levels
    expected, labels = (
        decode_objects(heights, 0.15, 2, block_planes=planes, kernel=kernel, threads=3, along_y=along_y)[0]
        for planes in (1000, 1)
    )
    assert 50 < labels.max() < 2000
    assert np.array_equal(labels, expected)


def test_volumes_with_32_bit_positions_per_block_are_supported(kernel: WatershedKernel) -> None:
    """Larger volumes, and tensors on other devices, are processed by PyTorch."""
    assert not kernel.supports(torch.device("cuda"))
    assert not bind_to_variants(watershed_kernel).supports(CPU)
    assert kernel.supports(CPU, (2000, 2000, 2000))
    assert not kernel.supports(CPU, (2**15, 10, 2**15))
    assert choose_block_planes((64, 3000, 2000)) == MIN_BLOCK_PLANES
    assert choose_block_planes((64, 3000, 2000), along_y=True) > MIN_BLOCK_PLANES
    for edge in (10_000, 16_000, 20_000):
        assert kernel.supports(CPU, (64, edge, edge))
        assert (choose_block_planes((64, edge, edge)) + 2) * (edge + 2) ** 2 < 2**31


@pytest.mark.parametrize("along_y", [False, True])
def test_objects_have_their_size_confidence_and_peak(kernel: WatershedKernel, *, along_y: bool) -> None:
    heights = make_hills(5, (12, 13, 14))
    labels, objects = decode_objects(heights, 0.1, 3, (5, 6), 4, kernel, along_y=along_y, logits=True)
    probability = 1 / (1 + np.exp(-heights))
    numbers = np.arange(1, labels.max() + 1)
    assert len(objects) == len(numbers) > 3
    assert np.array_equal(objects.voxel_counts, np.bincount(labels.ravel())[1:])
    assert objects.confidence == pytest.approx(ndimage.mean(probability, labels, numbers), abs=0.005)
    assert objects.peaks == pytest.approx(ndimage.maximum(probability, labels, numbers), abs=1e-4)


def decode_scores(
    spec: ModelSpec, decoding: Instances, kernel: WatershedKernel, scores: Tensor, depth: int, rows: int
) -> Array:
    """Return the labels of scores [1, K, Z, Y, X], added in two groups of planes, each in two groups of rows."""
    z, y, x = scores.shape[2:]
    decoder = InstanceDecoder(spec, decoding, (z, y, x), None, kernel)
    for begin, end in ((0, depth), (depth, z)):
        if begin < end:
            decoder.add(begin, 0, scores[:, :, begin:end, :rows])
            if rows < y:
                decoder.add(begin, rows, scores[:, :, begin:end, rows:])
    return decoder.finish().pixels


MEMORY_LAYOUTS = (
    lambda scores: scores,
    lambda scores: scores.contiguous(memory_format=torch.channels_last_3d),
    lambda scores: scores.mT.contiguous().mT,
    lambda scores: scores.flip(4).contiguous().flip(4),
)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(1, 9), st.integers(2, 13), st.integers(1, 15)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.integers(0, len(MEMORY_LAYOUTS) - 1),
    parts=st.tuples(st.integers(0, 8), st.integers(1, 13)),
    smoothing=st.sampled_from([0, 0, 2]),
    nan_fraction=st.sampled_from([0.0, 0.1, 0.5]),
    threshold=st.sampled_from([0.3, 0.5, 0.8]),
    border=st.sampled_from(["keep", "drop"]),
    holes=st.sampled_from(["keep", "fill"]),
    activation=st.sampled_from(["none", "sigmoid", {"foreground": "sigmoid", "distance": "none"}]),
)
def test_scores_of_any_dtype_and_layout_are_decoded_as_in_pytorch(
    kernel,
    random_nuclei,
    seed,
    size,
    dtype,
    layout,
    parts,
    smoothing,
    nan_fraction,
    threshold,
    border,
    holes,
    activation,
) -> None:
    """NaN is included only without smoothing: averages of NaN may differ in sign, which would change the order."""
    random = np.random.default_rng(seed)
    heights = np.stack([np.nan_to_num(make_hills(seed + i, size), neginf=-1.0) for i in range(2)])
    if not smoothing:
        heights[random.random(heights.shape) < nan_fraction] = np.nan
    scores = torch.from_numpy(heights).to(dtype)[None]
    options = {"smoothing": smoothing, "threshold": threshold, "border": border, "holes": holes}
    decoding = Instances.model_validate({"kind": "instances", "minimum_size": 2, "persistence": 0.05} | options)
    spec = random_nuclei.model_copy(update={"activation": activation})
    depth, rows = min(parts[0], size[0]), min(parts[1], size[1])
    expected = decode_scores(spec, decoding, bind_to_variants(watershed_kernel), scores, depth, rows)
    found = decode_scores(spec, decoding, kernel, MEMORY_LAYOUTS[layout](scores), depth, rows)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


def test_invalid_planes_and_calls_are_rejected(kernel: WatershedKernel) -> None:
    heights = torch.ones(3, 4, 5)

    def start() -> KernelWatershed:
        return kernel.start((3, 4, 5), PARAMETERS)

    for invalid in (heights.double(), heights[:, :3], heights[:, :, :4], heights.to("meta"), heights > 0):
        for parts in ((invalid, heights), (heights, invalid)):
            with pytest.raises(ValueError, match="expected a CPU tensor"):
                start().add(*parts)
    complete = start()
    complete.add(heights, heights)
    with pytest.raises(ValueError, match=r"expected a CPU tensor of shape \[0, 4, 5\]"):
        complete.add(heights, heights)
    box = kernel.start((3, 4, 5), PARAMETERS, box=[(1, 3), (0, 4), (0, 5)])
    with pytest.raises(ValueError, match="must include a plane of the box"):
        box.add(heights[:1], heights[:1])
    incomplete = start()
    incomplete.add(heights[:2], heights[:2])
    with pytest.raises(ValueError, match="missing"):
        incomplete.find_pieces()
    for size in ((0, 4, 5), (2**16, 2**16, 2**16)):
        with pytest.raises(ValueError, match="does not support a volume"):
            kernel.start(size, PARAMETERS)


def test_a_volume_that_does_not_fit_in_memory_raises_memory_error(kernel: WatershedKernel) -> None:
    with pytest.raises(MemoryError):
        kernel.start((17 * 10**7, 17 * 10**7, 1), PARAMETERS)
