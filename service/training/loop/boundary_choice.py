"""Choice of the decoding of a trained network for boundaries.

Merging supervoxels in another way does not change the supervoxels. Therefore, voxels are counted only once for each
watershed, and the counts are added up for each way to merge the supervoxels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from service.core.types import Objects
from service.inference.decoding.decoders import make_decoder
from service.inference.decoding.external import boundaries
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries
from service.training.loop.decoding_choice import ChosenDecoding, ScoredPart
from service.training.loop.object_scores import MATCHING_IOU, STRICT_IOU, ObjectCounts
from service.training.stacks.overlaps import (
    Labels,
    OverlapTable,
    compute_variation_of_information,
    tabulate_overlaps,
)

# Candidates for the keys of the decoding.
WATERSHEDS = {"watershed_threshold": (0.3, 0.5)}
AGGLOMERATIONS = {"agglomeration": ("gasp", "multicut", "mutex_watershed")}
BETAS = {"beta": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)}
MINIMUM_SIZES = (50, 100, 200, 500, 1000)
# Minimum mean size in voxels of the supervoxels for a multicut, which takes minutes for more. An untrained network
# results in supervoxels of a few voxels.
MIN_MULTICUT_SIZE = 100


class _Flooded(NamedTuple):
    """The boundary probabilities, affinities and supervoxels of a part, and the voxels shared with true objects."""

    boundary: boundaries.Probabilities
    affinities: boundaries.Probabilities
    supervoxels: boundaries.Labels
    overlaps: OverlapTable


def choose_boundary_decoding(parts: Sequence[ScoredPart], spec: ModelSpec) -> ChosenDecoding:
    """Return the decoding with the best F1 score minus the variation of information.

    The counts are estimates, because small objects are left out instead of merged with their neighbors.
    """
    choices = (
        ChosenDecoding(decoding.model_copy(update={"minimum_size": size}), _count_all(tables, size))
        for decoding, tables in _cluster_all(parts, spec)
        for size in MINIMUM_SIZES
    )
    return max(choices, key=lambda choice: choice.counts.partition_rating or 0.0)


def match_boundary_objects(part: ScoredPart, spec: ModelSpec) -> tuple[ObjectCounts, Objects]:
    """Match the objects of a part, decoded as `spec` says, with its true objects. Return the counts and the objects."""
    decoder = make_decoder(spec, as_size(part.scores.shape[2:]), "labels", None)
    decoder.add(0, 0, part.scores)
    segmentation = decoder.finish()
    if segmentation.objects is None:
        raise TypeError("The decoder returned no objects.")
    return _count(_tabulate(part, segmentation.pixels)), segmentation.objects


def _require_boundaries(spec: ModelSpec) -> Boundaries:
    if not isinstance(spec.decoding, Boundaries):
        raise TypeError(f"The decoding {spec.decoding.kind} is not for boundaries.")
    return spec.decoding


def _cluster_all(parts: Sequence[ScoredPart], spec: ModelSpec) -> Iterator[tuple[Boundaries, list[OverlapTable]]]:
    """Yield decodings, with the voxels that the true objects and the merged supervoxels of each part share."""
    for watershed in _vary(_require_boundaries(spec), WATERSHEDS):
        flooded_parts = [_flood(part, spec, watershed) for part in parts]
        for merging in _vary(watershed, AGGLOMERATIONS):
            if merging.agglomeration == "multicut" and not all(map(_can_cut, flooded_parts)):
                continue
            faces = [boundaries.measure_faces(*part[:3], merging) for part in flooded_parts]
            for decoding in _vary(merging, BETAS):
                clusters = [boundaries.merge_supervoxels(part_faces, decoding) for part_faces in faces]
                yield (
                    decoding,
                    [part.overlaps.merge_found(labels) for part, labels in zip(flooded_parts, clusters, strict=True)],
                )


def _can_cut(part: _Flooded) -> bool:
    """Return whether there are few enough supervoxels for a multicut."""
    return part.supervoxels.size >= MIN_MULTICUT_SIZE * int(part.supervoxels.max(initial=0))


def _vary(decoding: Boundaries, candidates: Mapping[str, Sequence[Any]]) -> list[Boundaries]:
    """Return decodings with all combinations of candidates for some keys."""
    return [
        decoding.model_copy(update=dict(zip(candidates, values, strict=True)))
        for values in itertools.product(*candidates.values())
    ]


def _flood(part: ScoredPart, spec: ModelSpec, decoding: Boundaries) -> _Flooded:
    scores, activation = part.scores[0].float(), spec.get_activation(spec.outputs[-1])
    index = spec.outputs.index(decoding.boundary)
    boundary = boundaries.compute_boundary_probabilities(scores, index, spec.get_activation(decoding.boundary)).numpy()
    affinities = boundaries.activate(scores[1:], activation).numpy()
    supervoxels = boundaries.number_labels(boundaries.compute_supervoxels(boundary, decoding))
    return _Flooded(boundary, affinities, supervoxels, _tabulate(part, supervoxels))


def _tabulate(part: ScoredPart, labels: Labels) -> OverlapTable:
    """Count the voxels that true and segmented objects share in the annotated voxels of a part."""
    known = slice(None) if part.unknown is None else ~part.unknown
    return tabulate_overlaps(part.truth[known], labels[known])


def _count_all(tables: Sequence[OverlapTable], minimum_size: int) -> ObjectCounts:
    counts = ObjectCounts()
    for table in tables:
        counts = counts.merge(_count(table, minimum_size))
    return counts


def _count(table: OverlapTable, minimum_size: int = 0) -> ObjectCounts:
    """Count objects, without segmented objects of fewer than `minimum_size` voxels, and errors in voxels."""
    pairs = table.select((table.true > 0) & (table.found > 0))
    found_sizes = table.found_sizes[pairs.found]
    iou = pairs.voxels / (table.true_sizes[pairs.true] + found_sizes - pairs.voxels)
    iou = iou[found_sizes >= minimum_size]
    matched, strictly_matched = (int(np.count_nonzero(iou > limit)) for limit in (MATCHING_IOU, STRICT_IOU))
    found_count = int(np.count_nonzero(table.found_sizes[1:] >= max(minimum_size, 1)))
    voxels = int(table.true_sizes[1:].sum())
    bits = [voxels * entropy for entropy in compute_variation_of_information(table)]
    return ObjectCounts(table.true_count, found_count, matched, strictly_matched, voxels, *bits)
