"""Objects found in C++ are those that torch and NumPy find, voxel by voxel."""

from typing import Any

import numpy as np
import pytest
import torch
from fakes import with_library
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import CPU, Array, decode_objects, hills
from scipy import ndimage
from torch import Tensor

from service.inference.decoding.instances import InstanceDecoder
from service.inference.decoding.watershed_kernel import (
    BLOCK_PLANES,
    BLOCK_VOXELS,
    KernelWatershed,
    WatershedKernel,
    WatershedParameters,
    choose_block,
    watershed_kernel,
)
from service.models.spec import Instances, ModelSpec

PARAMETERS = WatershedParameters(0.0, 0.1, logits=False)

Size = tuple[int, int, int]


@pytest.fixture(scope="module")
def kernel() -> WatershedKernel:
    assert watershed_kernel.supports(CPU)
    return watershed_kernel


def compare(kernel: WatershedKernel, heights: Array, persistence: float, **options: Any) -> Array:
    """Assert that all ways give the same labels, of the same type, and know the same of the objects; the labels.

    `options` are those of `decode_objects`. The ways are torch, plane by plane and with all planes at once, and C++.
    """
    (expected, many), (whole, others), (labels, objects) = (
        decode_objects(heights, persistence, **options, **way) for way in ({}, {"whole": True}, {"kernel": kernel})
    )
    assert len(objects) == len(many) == labels.max(initial=0)
    assert np.array_equal(objects.voxels, many.voxels)
    assert np.array_equal(objects.confidence, many.confidence)
    assert np.allclose(objects.peaks, many.peaks, rtol=1e-6)
    assert labels.dtype == whole.dtype == expected.dtype
    assert np.array_equal(labels, expected)
    assert np.array_equal(whole, expected)
    for name in ("voxels", "confidence", "peaks"):
        assert np.allclose(getattr(others, name), getattr(objects, name), rtol=1e-6, atol=0)
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
    planes=st.integers(1, 10),
    along_y=st.booleans(),
    minimum_size=st.sampled_from([0, 1, 2, 30]),
    drop_border=st.booleans(),
)
def test_labels_are_those_of_torch(
    kernel, seed, size, sigma, levels, persistence, logits, cuts, planes, along_y, minimum_size, drop_border
) -> None:
    """With ties and plateaus, in slabs and blocks of any number of planes, anisotropic or not."""
    heights = hills(seed, size, sigma) if max(size) > 1 else np.ones(size, np.float32)
    if levels:
        heights = np.round(heights * levels) / levels
    inner = tuple(sorted(cut for cut in cuts if cut < size[along_y]))
    block = planes * (size[not along_y] + 2) * (size[2] + 2)
    options = {"along_y": along_y, "logits": logits, "drop_border": drop_border}
    compare(kernel, heights, persistence, minimum_size=minimum_size, cuts=inner, block=block, **options)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 1, 9), (7, 1, 1), (2, 3, 1), (5, 8, 13)])
@pytest.mark.parametrize("height", [1.0, 0.0, -0.0, -3.0, 90.0, 1e-40, -1e30, -np.inf])
@pytest.mark.parametrize("logits", [False, True])
def test_plateaus_of_every_height_and_shape(kernel: WatershedKernel, size: Size, height: float, logits: bool) -> None:
    labels = compare(kernel, np.full(size, height), 0.1, logits=logits)
    assert np.count_nonzero(labels) == (height > -np.inf) * np.prod(size)
    if np.isfinite(height):
        assert labels.max() == 1


def test_single_voxels_anywhere(kernel: WatershedKernel) -> None:
    for place in np.ndindex(3, 4, 5):
        heights = np.full((3, 4, 5), -np.inf)
        heights[place] = 0.5
        assert np.argwhere(compare(kernel, heights, 0.1, logits=True)).tolist() == [list(place)]
        at_a_face = place[0] != 1 or place[1] in {0, 3} or place[2] in {0, 4}
        assert compare(kernel, heights, 0.1, drop_border=True).any() != at_a_face


def test_thin_stretched_and_flattened_objects_and_crowds_of_passes(kernel: WatershedKernel) -> None:
    for stride in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (3, 3, 1)):
        heights = hills(7, (40, 40, 40), sigma=4)[tuple(slice(None, None, step) for step in stride)]
        compare(kernel, heights, 0.2, cuts=(3,))
    crowd = np.random.default_rng(2).random((24, 25, 26))
    for persistence in (0.05, 0.3, np.inf):
        assert compare(kernel, crowd, persistence, cuts=(7,), block=3 * 27 * 28).any()


@pytest.mark.parametrize("levels", [None, 200])
@pytest.mark.parametrize("along_y", [False, True])
def test_needless_passes_are_forgotten_without_a_trace(kernel, levels, *, along_y) -> None:
    """Low hills in blocks of one plane have millions of passes, many as high as others where there are few levels."""
    heights = 0.3 * hills(8, (300, 14, 300) if along_y else (14, 300, 300), sigma=2)
    if levels is not None:
        heights = np.round(heights * levels) / levels
    expected, labels = (
        decode_objects(heights, 0.15, 2, block=block, kernel=kernel, along_y=along_y)[0] for block in (BLOCK_VOXELS, 1)
    )
    assert 50 < labels.max() < 2000
    assert np.array_equal(labels, expected)


def test_a_block_has_planes_of_any_size_but_places_of_32_bits(kernel: WatershedKernel) -> None:
    """Others, and tensors elsewhere, are left to torch."""
    assert not kernel.supports(torch.device("cuda"))
    assert not with_library(watershed_kernel).supports(CPU)
    assert kernel.supports(CPU, (2000, 2000, 2000))
    assert not kernel.supports(CPU, (2**15, 10, 2**15))
    assert not kernel.supports(CPU, (10, 10, 10), block=2**31)
    assert choose_block((64, 100, 100)) == BLOCK_VOXELS
    assert choose_block((64, 3000, 2000)) == BLOCK_PLANES * 3002 * 2002
    assert choose_block((64, 3000, 2000), along_y=True) == BLOCK_VOXELS
    for edge in (10_000, 16_000, 20_000):
        assert kernel.supports(CPU, (64, edge, edge), choose_block((64, edge, edge)))


@pytest.mark.parametrize("along_y", [False, True])
def test_objects_know_their_size_their_confidence_and_their_peak(kernel: WatershedKernel, *, along_y: bool) -> None:
    heights = hills(5, (12, 13, 14))
    labels, objects = decode_objects(heights, 0.1, 3, (5, 6), 4 * 16 * 16, kernel, along_y=along_y, logits=True)
    probability = 1 / (1 + np.exp(-heights))
    numbers = np.arange(1, labels.max() + 1)
    assert len(objects) == len(numbers) > 3
    assert np.array_equal(objects.voxels, np.bincount(labels.ravel())[1:])
    assert objects.confidence == pytest.approx(ndimage.mean(probability, labels, numbers), abs=0.005)
    assert objects.peaks == pytest.approx(ndimage.maximum(probability, labels, numbers), abs=1e-4)


def decoded(
    spec: ModelSpec, decoding: Instances, kernel: WatershedKernel, scores: Tensor, depth: int, rows: int
) -> Array:
    """Labels of scores [1, K, Z, Y, X], of which so many planes come at once and then the others, by rows."""
    z, y, x = scores.shape[2:]
    decoder = InstanceDecoder(spec, decoding, (z, y, x), None, kernel)
    for begin, end in ((0, depth), (depth, z)):
        if begin < end:
            decoder.add(begin, 0, scores[:, :, begin:end, :rows])
            if rows < y:
                decoder.add(begin, rows, scores[:, :, begin:end, rows:])
    return decoder.finish().pixels


LAYOUTS = (
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
    layout=st.integers(0, len(LAYOUTS) - 1),
    parts=st.tuples(st.integers(0, 8), st.integers(1, 13)),
    smoothing=st.sampled_from([0, 0, 2]),
    spoilt=st.sampled_from([0.0, 0.1, 0.5]),
    threshold=st.sampled_from([0.3, 0.5, 0.8]),
    border=st.sampled_from(["keep", "drop"]),
    holes=st.sampled_from(["keep", "fill"]),
    activation=st.sampled_from(["none", "sigmoid"]),
)
def test_scores_of_any_kind_and_layout_are_decoded_as_by_torch(
    kernel, random_nuclei, seed, size, dtype, layout, parts, smoothing, spoilt, threshold, border, holes, activation
) -> None:
    """Also where some are no numbers; averages of such may differ in sign, by which they would be ordered."""
    random = np.random.default_rng(seed)
    heights = np.stack([np.nan_to_num(hills(seed + i, size), neginf=-1.0) for i in range(2)])
    if not smoothing:
        heights[random.random(heights.shape) < spoilt] = np.nan
    scores = torch.from_numpy(heights).to(dtype)[None]
    stated = {"smoothing": smoothing, "threshold": threshold, "border": border, "holes": holes}
    decoding = Instances.model_validate({"kind": "instances", "minimum_size": 2, "persistence": 0.05} | stated)
    spec = random_nuclei.model_copy(update={"activation": activation})
    depth, rows = min(parts[0], size[0]), min(parts[1], size[1])
    expected = decoded(spec, decoding, with_library(watershed_kernel), scores, depth, rows)
    found = decoded(spec, decoding, kernel, LAYOUTS[layout](scores), depth, rows)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


def test_nothing_is_read_or_written_that_is_not_there(kernel: WatershedKernel) -> None:
    heights, inside = torch.ones(3, 4, 5), torch.ones(3, 4, 5, dtype=torch.bool)

    def made() -> KernelWatershed:
        return kernel.start((3, 4, 5), PARAMETERS)

    for wrong in (heights.double(), heights[:, :3], heights[:, :, :4], heights.to("meta"), inside):
        with pytest.raises(ValueError, match="must be"):
            made().add(wrong, inside)
    for wrong in (inside[:2], inside.to(torch.uint8)):
        with pytest.raises(ValueError, match="must be"):
            made().add(heights, wrong)
    full = made()
    full.add(heights, inside)
    with pytest.raises(ValueError, match="left"):
        full.add(heights, inside)
    early = made()
    early.add(heights[:2], inside[:2])
    with pytest.raises(ValueError, match="missing"):
        early.labels(0, drop_border=False)
    for size in ((0, 4, 5), (2**16, 2**16, 2**16)):
        with pytest.raises(ValueError, match="not for the kernel"):
            kernel.start(size, PARAMETERS)


def test_what_memory_does_not_hold_is_a_memory_error(kernel: WatershedKernel) -> None:
    with pytest.raises(MemoryError):
        kernel.start((17 * 10**7, 17 * 10**7, 1), PARAMETERS)
