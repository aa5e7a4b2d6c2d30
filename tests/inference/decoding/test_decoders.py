from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from landscapes import decode, make_hills
from numpy.typing import NDArray
from scipy.ndimage import correlate1d, distance_transform_edt, label
from torch import Tensor

from service.core.buffers import allocate_on_disk
from service.core.quantities import Size, VoxelSize
from service.core.types import Objects, OutputKind, Segmentation
from service.inference.decoding.decoders import (
    CACHE_VOXELS,
    estimate_decoding_memory,
    estimate_watershed_bytes,
    make_decoder,
    split_planes,
)
from service.inference.decoding.filters.fill_holes import fill_holes
from service.inference.decoding.filters.smoothing import Smoother
from service.inference.decoding.instances import InstanceDecoder, compute_min_object_confidence
from service.inference.decoding.pieces import WatershedParameters, compute_keys
from service.inference.decoding.streaming import TorchWatershed
from service.inference.decoding.watershed_kernel import SIGNATURES, WatershedKernel
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances, Regions
from service.training.evaluate import score

Array = NDArray[Any]


def line(*heights: float) -> Array:
    return np.array(heights, np.float32).reshape(1, 1, -1)


def balls(*spheres: tuple[int, int, int, int], size: tuple[int, int, int] = (24, 40, 40)) -> NDArray[np.bool_]:
    """Return the union of spheres (z, y, x, radius)."""
    z, y, x = np.ogrid[tuple(slice(edge) for edge in size)]
    mask = np.zeros(size, bool)
    for cz, cy, cx, radius in spheres:
        mask |= (z - cz) ** 2 + (y - cy) ** 2 + (x - cx) ** 2 <= radius**2
    return mask


def with_decoding(spec: ModelSpec, **changes: Any) -> ModelSpec:
    assert isinstance(spec.decoding, Instances)
    return spec.model_copy(update={"decoding": spec.decoding.model_copy(update=changes)})


def decode_slabs(
    spec: ModelSpec, scores: Tensor, cuts: tuple[int, ...] = (), output: OutputKind = "labels"
) -> Segmentation:
    """Decode scores [1, K, Z, Y, X] in slabs of planes that begin at `cuts`, each in two halves of rows."""
    depth, height, width = scores.shape[2:]
    decoder = make_decoder(spec, (depth, height, width), output, VoxelSize(2, 1, 1))
    edges = [0, *cuts, depth]
    for low, high in itertools.pairwise(edges):
        for top, bottom in ((0, height // 2), (height // 2, height)):
            decoder.add(low, top, scores[:, :, low:high, top:bottom])
    return decoder.finish()


def smooth_scores(seed: int, size: tuple[int, int, int] = (13, 16, 17)) -> Tensor:
    """Return scores [1, 2, Z, Y, X] with blobs, so that objects cross every possible seam."""
    noise = torch.randn((1, 2, *size), generator=torch.Generator().manual_seed(seed))
    return 8 * torch.nn.functional.avg_pool3d(noise, 3, stride=1, padding=1)


@pytest.mark.parametrize("seed", range(3))
def test_separate_objects_are_connected_components(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((9, 14, 15)) < 0.12
    expected, count = label(mask, np.ones((3, 3, 3)))
    labels, found = decode(np.where(mask, rng.random(mask.shape), -np.inf), persistence=10.0)
    assert found == count
    assert score(expected, labels).iou == 1.0


@pytest.mark.parametrize(("persistence", "objects"), [(0.0, 2), (0.04, 2), (0.06, 1), (0.5, 1)])
def test_a_second_peak_is_an_object_if_it_exceeds_the_pass_by_the_persistence(persistence: float, objects: int) -> None:
    assert decode(line(0.2, 1.0, 0.75, 0.8, 0.1), persistence)[1] == objects


def test_a_shallow_peak_joins_the_object_across_the_higher_pass() -> None:
    labels, count = decode(line(1.0, 0.5, 0.6, 0.2, 1.0), persistence=0.2)
    assert count == 2
    assert labels[0, 0, 2] == labels[0, 0, 0] != labels[0, 0, 4]


def test_shallow_peaks_join_in_a_chain() -> None:
    labels, count = decode(line(0.9, 0.85, 0.95, 0.88, 1.0, 0.3, 0.9), persistence=0.2)
    assert count == 2
    assert np.unique(labels[0, 0, :5]).size == 1


@pytest.mark.parametrize("persistence", [0.0, 0.1])
def test_a_plateau_is_one_object(persistence: float) -> None:
    labels, count = decode(np.where(balls((12, 20, 20, 8)), 0.5, -np.inf), persistence)
    assert count == 1
    assert np.array_equal(labels > 0, balls((12, 20, 20, 8)))


def test_equal_heights_give_equal_distances_at_every_position() -> None:
    for height in np.linspace(-8, 8, 401):
        keys = compute_keys(torch.full((67,), height)).numpy()
        distances = WatershedParameters(0.0, 0.0, heights_are_logits=True).get_distances(keys)
        assert np.unique(distances).tolist() == pytest.approx([1 / (1 + np.exp(-height))], rel=1e-4)


def test_a_single_voxel_in_a_corner_is_an_object() -> None:
    heights = np.full((4, 5, 6), -np.inf)
    heights[0, 0, 0] = heights[3, 4, 5] = 0.1
    labels, count = decode(heights, minimum_size=1)
    assert count == 2
    assert np.count_nonzero(labels) == 2
    assert decode(heights, minimum_size=2)[1] == 0


def test_without_foreground_there_are_no_objects(random_nuclei: ModelSpec) -> None:
    result = decode_slabs(random_nuclei, torch.full((1, 2, 4, 5, 6), -3.0))
    assert result.count == 0
    assert result.pixels.dtype == np.uint16
    assert not result.pixels.any()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    cuts=st.sets(st.integers(1, 12)),
    minimum_size=st.sampled_from([0, 40, 300]),
    border=st.sampled_from(["keep", "drop"]),
    holes=st.sampled_from(["keep", "fill"]),
    confidence=st.sampled_from([0.0, 0.8, 0.9]),
)
def test_filtering_does_not_depend_on_the_division_into_slabs(
    seed: int,
    cuts: set[int],
    minimum_size: int,
    border: str,
    holes: str,
    confidence: float,
    random_nuclei: ModelSpec,
) -> None:
    """Small objects, border objects and low-confidence objects are removed. The rest keep their order and voxels."""
    scores = smooth_scores(seed)
    criteria = {"minimum_size": minimum_size, "border": border, "min_confidence": confidence}
    unfiltered = decode_slabs(with_decoding(random_nuclei, minimum_size=0), scores).pixels
    expected, probability = np.zeros_like(unfiltered), torch.sigmoid(scores[0, 0]).numpy()
    for number in range(1, unfiltered.max() + 1):
        mask = unfiltered == number
        touches_face = any(np.take(mask, end, axis).any() for axis in range(3) for end in (0, -1))
        mean = probability[mask].mean()
        assume(abs(mean - confidence) > 0.01)
        if mask.sum() >= minimum_size and not (touches_face and border == "drop") and mean >= confidence:
            expected[mask] = expected.max() + 1
    found = decode_slabs(with_decoding(random_nuclei, holes="keep", **criteria), scores, tuple(sorted(cuts)))
    assert np.array_equal(found.pixels, expected)
    assert found.count == expected.max()
    if holes == "fill":
        fill_holes(expected)
        filled = decode_slabs(with_decoding(random_nuclei, holes=holes, **criteria), scores, tuple(sorted(cuts)))
        assert np.array_equal(filled.pixels, expected)


def make_objects(*confidences: float, voxels: tuple[int, ...] = (100, 80, 60, 4)) -> Objects:
    count = len(confidences)
    sums = np.array(voxels[:count]) * np.array(confidences)
    return Objects.from_sums(np.array(voxels[:count]), sums, np.ones(count))


def test_the_minimum_confidence_depends_on_the_odds_of_the_typical_object(random_nuclei: ModelSpec) -> None:
    spec = with_decoding(random_nuclei, min_confidence=0.6, min_relative_odds=0.25)
    assert isinstance(spec.decoding, Instances)
    # Odds of 9:1. A quarter of them is 9:4.
    assert compute_min_object_confidence(spec.decoding, make_objects(0.9, 0.95, 0.9, 0.2)) == pytest.approx(9 / 13)
    assert compute_min_object_confidence(spec.decoding, make_objects(0.8, 0.8)) == 0.6
    assert (
        compute_min_object_confidence(spec.decoding, make_objects(1.0, 1.0))
        == compute_min_object_confidence(spec.decoding, make_objects(0.99))
        == 0.9
    )
    assert compute_min_object_confidence(spec.decoding, make_objects()) == 0.6
    without_relative_odds = with_decoding(random_nuclei, min_confidence=0.6, min_relative_odds=0.0).decoding
    assert isinstance(without_relative_odds, Instances)
    assert compute_min_object_confidence(without_relative_odds, make_objects(1.0, 1.0)) == 0.6


def test_an_object_with_much_lower_confidence_than_the_others_is_removed(random_nuclei: ModelSpec) -> None:
    mask = np.zeros((24, 40, 60), bool)
    logits = np.full(mask.shape, -5.0)
    for x, logit in ((10, 3.0), (30, 1.0), (50, 3.0)):
        part = balls((12, 20, x, 7), size=mask.shape)
        mask |= part
        logits[part] = logit
    scores = torch.from_numpy(np.stack([logits, distance_transform_edt(mask)]))[None].float()
    assert decode_slabs(with_decoding(random_nuclei, min_relative_odds=0.1), scores).count == 3
    result = decode_slabs(with_decoding(random_nuclei, min_relative_odds=0.2), scores)
    assert result.count == 2
    assert np.array_equal(result.pixels > 0, logits > 2)


@pytest.mark.parametrize(("threshold", "voxels"), [(0.5, 2), (0.8, 1), (0.05, 3)])
def test_the_threshold_is_a_probability(random_nuclei: ModelSpec, threshold: float, voxels: int) -> None:
    scores = torch.zeros(1, 2, 1, 1, 5)
    scores[0, 0, 0, 0] = torch.tensor([-9.0, -1.5, 0.5, 3.0, -9.0])
    spec = with_decoding(random_nuclei, threshold=threshold, minimum_size=0)
    assert np.count_nonzero(decode_slabs(spec, scores).pixels) == voxels
    assert np.count_nonzero(decode_slabs(spec, scores, output="classes").pixels) == voxels


def test_persistence_applies_to_distances_after_the_activation(random_nuclei: ModelSpec) -> None:
    """At high values of the sigmoid, a deep valley in the logits is a shallow valley in the distances."""
    scores = torch.full((1, 2, 1, 1, 3), 5.0)
    scores[0, 1, 0, 0] = torch.tensor([9.0, 5.0, 9.0])
    spec = with_decoding(random_nuclei, persistence=0.1, minimum_size=0)
    assert decode_slabs(spec, scores).count == 2
    assert decode_slabs(spec.model_copy(update={"activation": "sigmoid"}), scores).count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output", ["labels", "classes"])
@pytest.mark.parametrize("smoothing", [0, 1])
def test_probabilities_and_their_logits_give_the_same_result(
    random_nuclei: ModelSpec, dtype: torch.dtype, output: OutputKind, smoothing: int
) -> None:
    """The network may apply the sigmoid itself."""
    scores = smooth_scores(3).to(dtype)
    activated_scores = torch.cat([torch.sigmoid(scores[:, :1]), scores[:, 1:]], dim=1)
    for threshold in (0.3, 0.5, 0.7):
        spec = with_decoding(random_nuclei, threshold=threshold, minimum_size=0, smoothing=smoothing)
        with_activation = decode_slabs(spec, scores, (3, 7), output)
        without_activation = decode_slabs(
            spec.model_copy(update={"activation": "none"}), activated_scores, (3, 7), output
        )
        is_ambiguous = ((activated_scores[0, 0].float() - threshold).abs() < 0.01).numpy()
        assert np.array_equal(with_activation.pixels[~is_ambiguous] > 0, without_activation.pixels[~is_ambiguous] > 0)
        if dtype == torch.float32:
            assert np.array_equal(with_activation.pixels, without_activation.pixels)
        if with_activation.objects is not None and without_activation.objects is not None:
            assert without_activation.objects.median_confidence == pytest.approx(
                with_activation.objects.median_confidence, abs=0.05
            )


def test_without_an_activation_the_scores_of_classes_are_returned_unchanged(bands: ModelSpec) -> None:
    spec = bands.model_copy(update={"activation": "none"})
    scores = torch.cat([smooth_scores(1), smooth_scores(2)[:, :1]], dim=1)
    assert np.array_equal(decode_slabs(spec, scores, output="classes").pixels, scores[0].argmax(0).numpy())
    assert np.array_equal(decode_slabs(spec, scores, output="probabilities").pixels, scores[0].numpy())


def test_probabilities_are_the_activated_outputs(random_nuclei: ModelSpec, bands: ModelSpec) -> None:
    scores = smooth_scores(1)
    by_output = decode_slabs(random_nuclei, scores, (3, 7), "probabilities")
    np.testing.assert_allclose(by_output.pixels[0], torch.sigmoid(scores[0, 0]).numpy(), rtol=1e-6)
    assert np.array_equal(by_output.pixels[1], scores[0, 1].numpy())
    assert by_output.names == ("foreground", "distance")
    three_channels = torch.cat([scores, scores[:, :1] - 1], dim=1)
    probabilities = decode_slabs(bands, three_channels, (5,), "probabilities")
    np.testing.assert_allclose(probabilities.pixels.sum(axis=0), 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_disk", [False, True])
def test_slabs_decoded_in_parts_give_the_complete_output(bands: ModelSpec, dtype, on_disk, tmp_path) -> None:
    """Each slab is split into a part of three planes and a part of one plane; the rows arrive in two slabs."""
    allocate = functools.partial(allocate_on_disk, folder=tmp_path) if on_disk else np.zeros
    depth, rows, width = 4, 20, CACHE_VOXELS // 60
    scores = torch.randn((1, 3, 2 * depth, 2 * rows, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert [first for first, _ in split_planes(5, scores[:, :, :depth, :rows])] == [5, 8]
    results = {}
    for output in ("probabilities", "classes"):
        decoder = make_decoder(bands, (2 * depth, 2 * rows, width), output, None, allocate)
        for z0, y0 in itertools.product((0, depth), (0, rows)):
            decoder.add(z0, y0, scores[:, :, z0 : z0 + depth, y0 : y0 + rows])
        result = decoder.finish()
        assert result.names == ("background", "dim", "bright")
        results[output] = result.pixels
    np.testing.assert_array_equal(results["probabilities"], torch.softmax(scores.float(), 1)[0].numpy())
    np.testing.assert_array_equal(results["classes"], scores[0].argmax(0).numpy())
    assert results["classes"].dtype == np.uint8


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 4), (5,), tuple(range(1, 9))])
@pytest.mark.parametrize("num_passes", [0, 1, 3])
def test_smoothing_does_not_depend_on_the_division_of_planes(num_passes: int, cuts: tuple[int, ...]) -> None:
    heights = torch.from_numpy(np.nan_to_num(make_hills(0, (9, 12, 11)), neginf=-1.0))
    smoother, kernel = Smoother(num_passes), np.array([0.25, 0.5, 0.25])
    parts = []
    for low, high in itertools.pairwise([0, *cuts, 9]):
        parts += list(smoother.add(heights[low:high], heights[low:high] > 0))
    parts += list(smoother.finish()) if num_passes else []
    expected = np.pad(heights.numpy(), num_passes, mode="edge")[
        :, num_passes : -num_passes or None, num_passes : -num_passes or None
    ]
    for _ in range(num_passes):
        for axis in (1, 2):
            expected = correlate1d(expected, kernel, axis, mode="nearest")
        expected = correlate1d(expected, kernel, 0)
    expected = expected[num_passes : len(expected) - num_passes]
    np.testing.assert_allclose(torch.cat([part for part, _ in parts]), expected, atol=1e-6)
    assert torch.equal(torch.cat([mask for _, mask in parts]), heights > 0)


def test_smoothing_joins_objects_that_noise_splits(random_nuclei: ModelSpec) -> None:
    mask = balls((12, 12, 12, 8))
    noise = np.random.default_rng(0).normal(0, 1.5, mask.shape)
    scores = np.stack([np.where(mask, 5.0, -5.0), distance_transform_edt(mask) + noise])
    tensor = torch.from_numpy(scores)[None].float()
    counts = [
        decode_slabs(
            with_decoding(random_nuclei, persistence=1.0, minimum_size=0, smoothing=num_passes), tensor, (5,)
        ).count
        for num_passes in (0, 3)
    ]
    assert counts[0] > 3
    assert counts[1] == 1


@pytest.mark.parametrize(
    ("diameter", "radii", "num_objects"),
    [
        # A 32nd of a ball of 16 voxels is 67 voxels, and a ball of radius 2 has 33 voxels.
        (16.0, (8, 8, 2), 2),
        (16.0, (8, 8, 3), 3),
        # Small objects among small objects are not fragments, and neither are large objects next to a giant object.
        (16.0, (3, 3, 2), 3),
        (8.0, (9, 3, 2), 3),
        (None, (9, 3, 2), 2),
    ],
)
def test_fragments_are_removed(
    random_nuclei: ModelSpec, diameter: float | None, radii: tuple[int, ...], num_objects: int
) -> None:
    mask = balls(*((12, 10, 10 + 20 * number, radius) for number, radius in enumerate(radii)), size=(24, 24, 64))
    scores = torch.from_numpy(np.stack([np.where(mask, 5.0, -5.0), distance_transform_edt(mask)]))[None].float()
    spec = with_decoding(random_nuclei, minimum_fraction=1 / 32)
    spec = spec.model_copy(update={"input": spec.input.model_copy(update={"diameter": diameter})})
    result = decode_slabs(spec, scores)
    assert (result.count, len(result.objects or ())) == (num_objects, num_objects)
    assert decode_slabs(with_decoding(random_nuclei), scores).count == 3


@pytest.mark.parametrize("z", [0, 23])
def test_objects_at_the_border_can_be_removed(random_nuclei: ModelSpec, z: int) -> None:
    mask = balls((z, 12, 12, 5), (12, 26, 26, 5), (12, 0, 30, 4))
    scores = torch.from_numpy(np.stack([np.where(mask, 5.0, -5.0), distance_transform_edt(mask)]))[None].float()
    assert decode_slabs(random_nuclei, scores).count == 3
    result = decode_slabs(with_decoding(random_nuclei, border="drop"), scores)
    assert result.count == 1
    assert np.array_equal(result.pixels == 1, balls((12, 26, 26, 5)))


def test_holes_of_objects_can_be_filled(random_nuclei: ModelSpec) -> None:
    ball, core = balls((12, 20, 20, 8)), balls((12, 20, 20, 2))
    distance = np.where(ball, distance_transform_edt(ball), 0)
    scores = torch.from_numpy(np.stack([np.where(ball & ~core, 5.0, -5.0), distance]))[None].float()
    unfilled = decode_slabs(with_decoding(random_nuclei, persistence=20), scores).pixels
    filled = decode_slabs(with_decoding(random_nuclei, persistence=20, holes="fill"), scores).pixels
    assert np.array_equal(unfilled == 1, ball & ~core)
    assert np.array_equal(filled == 1, ball)


def test_an_axis_of_one_voxel_has_no_border(random_nuclei: ModelSpec) -> None:
    mask = balls((0, 12, 12, 5), size=(1, 40, 40))
    scores = torch.from_numpy(np.stack([np.where(mask, 5.0, -5.0), distance_transform_edt(mask)]))[None].float()
    assert decode_slabs(with_decoding(random_nuclei, border="drop"), scores).count == 1


@pytest.mark.parametrize("output", ["labels", "classes", "probabilities"])
@pytest.mark.parametrize("smoothing", [0, 1])
def test_bfloat16_scores_are_decoded_like_equal_float32_scores(
    random_nuclei: ModelSpec, output: OutputKind, smoothing: int
) -> None:
    spec, scores = with_decoding(random_nuclei, smoothing=smoothing), smooth_scores(5).bfloat16()
    expected, actual = decode_slabs(spec, scores.float(), output=output), decode_slabs(spec, scores, output=output)
    assert expected.pixels.any()
    # The rounding of a sigmoid may depend on the position of a value in memory.
    np.testing.assert_allclose(actual.pixels, expected.pixels, rtol=1e-6 if output == "probabilities" else 0)
    assert actual.pixels.dtype == expected.pixels.dtype


def test_the_memory_estimate_distinguishes_host_memory_and_disk(bands: ModelSpec, random_nuclei: ModelSpec) -> None:
    size, voxels = (64, 512, 512), 64 * 512 * 512
    labels = estimate_decoding_memory(random_nuclei, "labels", size)
    assert labels.disk_bytes == 0
    assert estimate_watershed_bytes(size) > labels.host_bytes > 8 * voxels
    assert 36 * 66 * 514 * 514 < estimate_watershed_bytes(size) < 64 * voxels, "including padding"
    assert estimate_decoding_memory(bands, "classes", size) == (voxels, 0)
    large = 4 * len(bands.outputs) * 2 * voxels
    assert estimate_decoding_memory(bands, "probabilities", (128, 512, 512)) == (0, large)


def test_the_watershed_is_freed_after_decoding(random_nuclei: ModelSpec) -> None:
    class RecordingKernel(WatershedKernel):
        def supports(self, *_args: Any) -> bool:
            return True

        def start(self, size: Size, parameters: WatershedParameters, *_options: Any) -> Any:
            watershed = TorchWatershed(size, torch.device("cpu"), parameters)
            references.append(weakref.ref(watershed))
            return watershed

    references: list[weakref.ref[TorchWatershed]] = []
    spec = with_decoding(random_nuclei, minimum_fraction=0.9)
    assert isinstance(spec.decoding, Instances)
    decoder = InstanceDecoder(spec, spec.decoding, (13, 16, 17), None, RecordingKernel(SIGNATURES))
    decoder.add(0, 0, smooth_scores(5))
    decoder.finish()
    assert [watershed() for watershed in references] == [None]


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_each_voxel_gets_the_class_of_the_last_region_that_contains_it(bands: ModelSpec, activation: str) -> None:
    regions = Regions(kind="regions", classes=(1, 4, 2), threshold=0.75)
    spec = bands.model_copy(update={"activation": activation, "decoding": regions})
    probabilities = torch.tensor([[0.7, 0.7, 0.7], [0.8, 0, 0], [0.8, 0.8, 0], [0.8, 0.8, 0.8], [0, 0.9, 0.1]]).T
    scores = probabilities if activation == "none" else torch.logit(probabilities)
    decoder = make_decoder(spec, (1, 1, 5), "classes", None)
    decoder.add(0, 0, scores[None, :, None, None])
    result = decoder.finish()
    assert result.pixels.ravel().tolist() == [0, 1, 4, 2, 4]
    assert result.names == ("background", bands.outputs[0], bands.outputs[2], "class 3", bands.outputs[1])
