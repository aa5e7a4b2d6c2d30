"""Tests of the decoding of boundaries, compared with PanSeg's own functions and with an exhaustive search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from model_files import INSTANCES
from numpy.typing import NDArray
from paths import ROOT
from scipy.ndimage import maximum_filter

from service.core.quantities import VoxelSize
from service.inference.decoding.decoders import BOUNDARY_BYTES_PER_VOXEL, estimate_decoding_memory, make_decoder
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries

bioimage_cpp = pytest.importorskip("bioimage_cpp", reason="requires the extra boundaries")
from service.inference.decoding.external import boundaries  # noqa: E402

DATA = ROOT / "tests" / "data" / "plantseg"
SETTINGS: dict[str, Any] = json.loads((DATA / "decodings.json").read_text(encoding="utf-8"))
# Names of PanSeg's arguments in our schema.
WATERSHED_KEYS = {
    "threshold": "watershed_threshold",
    "alpha": "watershed_alpha",
    "sigma_seeds": "watershed_sigma",
    "sigma_weights": "watershed_weight_sigma",
    "min_size": "watershed_minimum_size",
    "stacked": "watershed_stacked",
}
AGGLOMERATIONS = {"gasp": "gasp", "multicut": "multicut", "mutex_ws": "mutex_watershed", "": "none"}


def make_spec(outputs: tuple[str, ...] = ("boundary",), activation: str = "none", **decoding: Any) -> ModelSpec:
    content = INSTANCES | {"outputs": outputs, "activation": activation, "folder": ROOT}
    return ModelSpec.model_validate(content | {"decoding": {"kind": "boundaries", **decoding}})


def read_decoding(name: str) -> Boundaries:
    """Return our settings for one of PanSeg's."""
    watershed, merge, arguments = SETTINGS[name]
    keys = {WATERSHED_KEYS[key]: value for key, value in watershed.items()}
    if arguments:
        keys |= {"beta": arguments["beta"], "minimum_size": arguments["post_minsize"]}
    else:
        keys["minimum_size"] = 0
    return Boundaries(kind="boundaries", agglomeration=AGGLOMERATIONS[merge], **keys)


def decode(probabilities: NDArray[Any], spec: ModelSpec, step: int = 7) -> Any:
    """Decode scores [K, Z, Y, X] that arrive in slabs of `step` rows."""
    scores = torch.from_numpy(np.ascontiguousarray(probabilities, dtype=np.float32))[None]
    decoder = make_decoder(spec, scores.shape[2:], "labels", VoxelSize(1.0, 0.5, 0.5))
    for z0 in range(0, scores.shape[2], 5):
        for y0 in range(0, scores.shape[3], step):
            decoder.add(z0, y0, scores[:, :, z0 : z0 + 5, y0 : y0 + step])
    return decoder.finish()


def make_boxes() -> NDArray[np.float32]:
    """Return boundary probabilities of eight boxes of 10 voxels, with boundaries of 2 voxels."""
    boundary = np.zeros((22, 22, 22), np.float32)
    for axis in range(3):
        np.moveaxis(boundary, axis, 0)[10:12] = 0.95
    return boundary


def list_partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all partitions of nodes as labels, in which each label is at most one more than the largest before it."""
    if not count:
        yield ()
        return
    for labels in list_partitions(count - 1):
        yield from ((*labels, label) for label in range(max(labels, default=-1) + 2))


@pytest.mark.parametrize("seed", [10, 11, 12])
@pytest.mark.parametrize("name", SETTINGS)
def test_labels_agree_with_those_of_panseg(name: str, seed: int) -> None:
    with np.load(DATA / "decodings.npz") as arrays:
        boundary, expected = arrays[f"boundary_{seed}"].astype(np.float32) / 255, arrays[f"{name}_{seed}"]
    spec = make_spec().model_copy(update={"decoding": read_decoding(name)})
    found = decode(boundary[None], spec).pixels
    pairs, counts = np.unique(np.stack((expected.ravel(), found.ravel())), axis=1, return_counts=True)
    expected_sizes, found_sizes = np.bincount(expected.ravel()), np.bincount(found.ravel())
    unions = expected_sizes[pairs[0]] + found_sizes[pairs[1]] - counts
    best_overlaps = np.zeros(len(expected_sizes))
    np.maximum.at(best_overlaps, pairs[0], counts / unions)
    assert len(found_sizes) - 1 == len(np.unique(expected)) > 10
    assert best_overlaps[np.unique(expected)].min() >= 0.99


@pytest.mark.parametrize("seed", range(4))
def test_multicut_of_a_small_graph_is_optimal(seed: int) -> None:
    """All partitions of a plane of 7 supervoxels are compared. Only connected parts can be optimal."""
    generator = np.random.default_rng(seed)
    supervoxels = np.array([[[1, 1, 2, 2, 3], [1, 4, 4, 2, 3], [5, 4, 6, 6, 3], [5, 5, 7, 6, 7]]], np.uint32)
    boundary = generator.uniform(0, 1, supervoxels.shape).astype(np.float32)
    decoding = Boundaries(kind="boundaries", agglomeration="multicut", beta=0.5)
    faces = boundaries.measure_faces(boundary, np.empty((0, *boundary.shape), np.float32), supervoxels, decoding)
    labels = boundaries.merge_supervoxels(faces, decoding)[supervoxels]
    graph = bioimage_cpp.graph.region_adjacency_graph(supervoxels)
    means, sizes = bioimage_cpp.graph.features.edge_map_features(graph, supervoxels, boundary)[:, :2].T
    costs = np.log((1 - (0.998 * means + 0.001)) / (0.998 * means + 0.001)) * sizes
    first, second = graph.uv_ids().T

    def compute_cost(node_labels: NDArray[Any]) -> float:
        return float(costs[node_labels[first] != node_labels[second]].sum())

    found = np.zeros(8, np.int64)
    found[supervoxels.ravel()] = labels.ravel()
    best = min(compute_cost(np.array((7, *partition))) for partition in list_partitions(7))
    assert compute_cost(found) == pytest.approx(best)


def test_maxima_include_plateaus_and_faces() -> None:
    values = np.random.default_rng(0).integers(0, 4, (9, 10, 11)).astype(np.float32)
    expected = (values == maximum_filter(values, size=3, mode="nearest")) & (values > values.min())
    np.testing.assert_array_equal(boundaries.find_maxima(values), expected)
    assert not boundaries.find_maxima(np.ones((4, 5), np.float32)).any()


@pytest.mark.parametrize("agglomeration", ["multicut", "gasp", "mutex_watershed", "none"])
@pytest.mark.parametrize("activation", ["none", "sigmoid", "softmax"])
def test_separated_boxes_become_objects(agglomeration: str, activation: str) -> None:
    boundary = make_boxes()
    logits = np.log(np.clip(boundary, 0.01, None) / (1 - boundary))
    scores = {
        "none": boundary[None],
        "sigmoid": logits[None],
        "softmax": np.stack((np.zeros_like(logits), logits)),
    }[activation]
    outputs = ("cell", "boundary")[-len(scores) :]
    segmentation = decode(scores, make_spec(outputs, activation, agglomeration=agglomeration))
    assert segmentation.count == 8
    assert segmentation.pixels.dtype == np.uint16
    corners = segmentation.pixels[3::15, 3::15, 3::15].ravel()
    assert sorted(corners) == list(range(1, 9))
    assert segmentation.objects.voxel_counts.sum() == boundary.size
    assert segmentation.objects.confidence.min() > 0.5


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("agglomeration", ["multicut", "gasp", "mutex_watershed", "none"])
@pytest.mark.parametrize("size", [(1, 1, 1), (6, 7, 8), (1, 9, 9)])
def test_constant_probabilities_are_one_object(value: float, agglomeration: str, size: tuple[int, int, int]) -> None:
    for is_stacked in (False, True) if size[0] == 1 else (False,):
        keys = {"agglomeration": agglomeration, "watershed_stacked": is_stacked, "watershed_alpha": 0.5}
        segmentation = decode(np.full((1, *size), value), make_spec(**keys))
        assert segmentation.count == 1
        assert (segmentation.pixels == 1).all()


def test_small_objects_are_merged_with_a_neighbor() -> None:
    boundary = make_boxes()
    boundary[2:5, 2:5, 2:5] = 0.9
    boundary[3, 3, 3] = 0
    keys = {"watershed_minimum_size": 0, "watershed_sigma": 0, "watershed_weight_sigma": 0}
    counts = [decode(boundary[None], make_spec(minimum_size=size, **keys)).count for size in (0, 100, 10**6)]
    assert counts[0] > counts[1] == 8
    assert counts[2] >= 1


def test_objects_at_faces_and_the_largest_object_can_be_dropped() -> None:
    boundary = np.full((20, 20, 20), 0.02, np.float32)
    boundary[5:15, 5:15, 5:15] = 0.95
    boundary[7:13, 7:13, 7:13] = 0.02
    keys = {"watershed_weight_sigma": 0.0, "watershed_minimum_size": 10, "agglomeration": "multicut"}
    for changes in ({"border": "drop"}, {"background": "drop_largest"}):
        segmentation = decode(boundary[None], make_spec(**keys, **changes))
        assert segmentation.count == 1
        assert segmentation.pixels[10, 10, 10] == 1
        assert segmentation.pixels[0, 0, 0] == 0
    assert decode(boundary[None], make_spec(**keys)).count == 2


def test_classes_are_the_thresholded_boundary() -> None:
    scores = torch.linspace(-3, 3, 24).view(1, 1, 2, 3, 4)
    spec = make_spec(activation="sigmoid", watershed_threshold=0.7)
    decoder = make_decoder(spec, (2, 3, 4), "classes", None)
    decoder.add(0, 0, scores)
    segmentation = decoder.finish()
    np.testing.assert_array_equal(segmentation.pixels, (scores[0, 0].sigmoid() > 0.7).numpy())
    assert segmentation.names == ("background", "boundary")


def test_memory_estimate_counts_each_voxel() -> None:
    memory = estimate_decoding_memory(make_spec(), "labels", (10, 20, 30))
    assert memory.host_bytes == BOUNDARY_BYTES_PER_VOXEL * 6000
