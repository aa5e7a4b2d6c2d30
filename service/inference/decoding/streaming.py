"""Watersheds of a height map that arrives plane by plane: the common interface, and its implementation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.types import Objects
from service.inference.decoding.labels import look_up_labels, number_objects
from service.inference.decoding.pieces import Pieces, WatershedParameters, describe_objects, find_objects
from service.inference.decoding.watershed import encode_foreground, find_basins
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

ObjectFilter = Callable[[Objects, NDArray[np.bool_]], NDArray[np.bool_]]
"""Function that returns a mask of the objects to keep, given the objects and whether each touches a face."""

# Probabilities closer than this to 0 or 1 are treated as this close. Rounding can even exceed 0 or 1.
MIN_PROBABILITY = 1e-6


class StreamingWatershed(Protocol):
    """Watershed of a height map that arrives plane by plane, computed by the C++ kernel or by PyTorch."""

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        """Add the next planes. See `KernelWatershed.add` for shapes and dtypes."""

    def find_pieces(self) -> tuple[Pieces, NDArray[np.integer]]:
        """Return the pieces, and the link of each piece, as in `join_pieces`, after all planes have been added."""

    def look_up(self, label_of_piece: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """Return the label of each voxel [Z, Y, X], given the label of the background, 0, and of each piece."""


def label_objects(
    watershed: StreamingWatershed, parameters: WatershedParameters, choose_objects: ObjectFilter
) -> tuple[NDArray[np.unsignedinteger], Objects]:
    """Return labels [Z, Y, X] from 1, uint16 or uint32, and the objects, after all planes have been added.

    choose_objects  selects which objects get a label
    """
    pieces, object_of_piece = find_objects(*watershed.find_pieces(), parameters)
    objects = describe_objects(pieces, parameters)
    is_kept = choose_objects(objects, pieces.touches_face)
    label_of_piece = number_objects(is_kept)[np.append(0, object_of_piece + 1)]
    return watershed.look_up(label_of_piece), objects.select(is_kept)


class TorchWatershed:
    """A `StreamingWatershed` of a volume of `size` (Z, Y, X) on any device, computed by PyTorch.

    The basins are computed after all planes have been collected. On a GPU, the host waits a few times. The number of
    parts in which the planes arrive does not affect how often.

    along_y  whether planes arrive along y instead of along z
    """

    def __init__(
        self, size: Size, device: torch.device, parameters: WatershedParameters, *, along_y: bool = False
    ) -> None:
        self._parameters, self._axis, self._num_collected = parameters, int(along_y), 0
        self._heights = torch.empty(size, device=device)
        self._foreground = torch.empty(size, dtype=torch.bool, device=device)
        self._codes = torch.empty(size, dtype=torch.uint8, device=device)

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        num_planes = heights.shape[self._axis]
        parts = (
            (self._heights, heights),
            (self._foreground, compute_foreground_mask(foreground, self._parameters.threshold)),
            (self._codes, encode_foreground(foreground)),
        )
        for target, part in parts:
            target.narrow(self._axis, self._num_collected, num_planes).copy_(part)
        self._num_collected += num_planes

    def find_pieces(self) -> tuple[Pieces, NDArray[np.integer]]:
        self._basins, pieces = find_basins(
            self._heights, self._foreground, self._codes, self._parameters.compute_floors
        )
        del self._heights, self._foreground, self._codes
        return pieces, np.arange(len(pieces.key))

    def look_up(self, label_of_piece: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        return look_up_labels(self._basins, label_of_piece)


def compute_foreground_mask(scores: Tensor, threshold: float) -> Tensor:
    """Return a bool mask of the scores above the threshold."""
    if scores.device.type != "cpu":
        return scores > threshold
    # On one thread, NumPy is six times as fast as PyTorch.
    return torch.from_numpy(scores.float().numpy() > np.float32(threshold))


def select_foreground_logits(spec: ModelSpec, decoding: Instances, scores: Tensor) -> Tensor:
    """Return the foreground logits [z, y, X] in scores [K, z, y, X].

    If the network itself returns probabilities, they are converted, so that watersheds have to support only logits. The
    result is then float32, and finite even for probabilities of 0 and 1.
    """
    foreground = scores[spec.outputs.index(decoding.foreground)]
    if spec.get_activation(decoding.foreground) == "sigmoid":
        return foreground
    return torch.logit(foreground.float(), eps=MIN_PROBABILITY)
