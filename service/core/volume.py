"""The nouns: a volume that was posted, what to read of it, and the segmentation that goes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from service.core.errors import BadParameter

Array = NDArray[Any]

Size = tuple[int, int, int]
"""Voxels along (Z, Y, X)."""
OutputKind = Literal["labels", "classes", "probabilities"]


# Lengths in micrometres: from a tenth of an atom to a metre. Beyond, TIFF tags and quotients overflow.
PLAUSIBLE = (1e-5, 1e6)


@dataclass(frozen=True)
class VoxelSize:
    """Edge lengths of one voxel in micrometres; within `PLAUSIBLE`, or `BadParameter`."""

    z: float
    y: float
    x: float

    def __post_init__(self) -> None:
        for axis, size in zip("zyx", self, strict=True):
            if not PLAUSIBLE[0] <= size <= PLAUSIBLE[1]:
                least, most = PLAUSIBLE
                text = f"must be a number of micrometres from {least:g} to {most:g}, not {size}"
                raise BadParameter(f"The voxel size along {axis} {text}.")

    def __iter__(self) -> Iterator[float]:
        return iter((self.z, self.y, self.x))


@dataclass(frozen=True)
class Selection:
    """Which part of a file to read, and what the caller states instead of the file.

    channel     index or name; None: the only channel, or as many as the model takes
    time        index; None: the only time point
    axes        one letter of TZCYXS per dimension of the stored array, overriding the file
    voxel_size  overrides the file
    """

    channel: int | str | None = None
    time: int | None = None
    axes: str | None = None
    voxel_size: VoxelSize | None = None


class Extent(Protocol):
    """What is known of a stack before its pixels are read; volumes and descriptions of files are extents."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(C, Z, Y, X)."""

    @property
    def voxel_size(self) -> VoxelSize | None:
        """Micrometres, or None where the file does not say."""


@dataclass(frozen=True)
class Volume:
    """One stack: [C, Z, Y, X], dtype as stored, read plane range by plane range.

    shape       (C, Z, Y, X)
    read        read(z0, z1) -> [C, z1 - z0, Y, X] in native byte order; the pixels may live in a file
    voxel_size  micrometres, or None where the file does not say
    channels    one name per channel, "" where the file gives none
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    read: Callable[[int, int], Array]
    voxel_size: VoxelSize | None = None
    channels: tuple[str, ...] = ("",)

    @classmethod
    def from_array(
        cls, pixels: Array, voxel_size: VoxelSize | None = None, channels: tuple[str, ...] | None = None
    ) -> Volume:
        """Wrap an array [C, Z, Y, X] (memory-mapped arrays stay on disk until a slab is read)."""
        c, z, y, x = pixels.shape
        names = channels if channels is not None else ("",) * c
        return cls((c, z, y, x), pixels.dtype, lambda z0, z1: pixels[:, z0:z1], voxel_size, names)

    @property
    def voxels(self) -> int:
        """Number of voxels of one channel."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> Array:
        """All pixels, [C, Z, Y, X]."""
        return self.read(0, self.shape[1])


@dataclass(frozen=True)
class Segmentation:
    """What a model made of a volume, on the grid of that volume.

    pixels      labels and classes: [Z, Y, X] uint8, uint16 or uint32; probabilities: [K, Z, Y, X] float32
    kind        what the pixels mean
    voxel_size  as the volume's
    count       number of objects (labels), else None
    names       the K names of the classes or probabilities, empty for labels
    """

    pixels: Array
    kind: OutputKind
    voxel_size: VoxelSize | None = None
    count: int | None = None
    names: tuple[str, ...] = ()


_NARROW, _WIDE = np.dtype(np.uint16), np.dtype(np.uint32)


def label_dtype(count: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that numbers `count` objects."""
    return _NARROW if count < 2**16 else _WIDE


@dataclass(frozen=True)
class Description:
    """What was understood of a file before its pixels were read.

    container          "OME-TIFF", "ImageJ TIFF", "TIFF", ...
    axes, stored_shape one letter of TZCYXS per stored dimension, as used (after an override), and its lengths
    shape              (C, Z, Y, X) of the part that the selection reads
    dtype              as stored, for example "uint16"
    voxel_size         micrometres, or None; `voxel_size_from` says where it was found
    channels, times    names of all stored channels; number of time points
    notes              what a careful user would want to know, one sentence each
    """

    container: str
    axes: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, int, int, int]
    dtype: str
    voxel_size: VoxelSize | None
    voxel_size_from: str
    channels: tuple[str, ...]
    times: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diameter:
    """How wide the objects are: in the plane, or along (z, y, x); positive. Raises BadParameter."""

    lengths: tuple[float] | tuple[float, float, float]
    unit: Literal["px", "um"]

    def __post_init__(self) -> None:
        if not all(PLAUSIBLE[0] <= length <= PLAUSIBLE[1] for length in self.lengths):
            least, most = PLAUSIBLE
            raise BadParameter(f"A diameter must be from {least:g} to {most:g}, not {self.lengths}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From text such as 15px, 7,15,15px or 6.5um. Raises BadParameter."""
        given = text.strip().lower()
        try:
            match [float(length) for length in given[:-2].split(",")], given[-2:]:
                case [width], ("px" | "um") as unit:
                    return cls((width,), unit)
                case [z, y, x], ("px" | "um") as unit:
                    return cls((z, y, x), unit)
        except (ValueError, BadParameter):
            pass
        raise BadParameter(
            "A positive length or three (Z,Y,X) and a unit, auto or none are expected, as in 15px, 7,15,15px or 6.5um, "
            f"not {text!r}"
        )

    def __str__(self) -> str:
        """As `parse` takes it."""
        return ",".join(f"{length:.3g}" for length in self.lengths) + self.unit

    def voxels(self, voxel_size: VoxelSize | None) -> tuple[float, float, float] | None:
        """Along (z, y, x), in voxels; a diameter in the plane counts for z too, planes being as they are.

        None where micrometres are given and the voxel size is not known.
        """
        if self.unit == "px":
            sizes: tuple[float, float, float] = (1.0, 1.0, 1.0)
        elif voxel_size is None:
            return None
        elif len(self.lengths) == 1:
            in_plane = math.sqrt(voxel_size.y * voxel_size.x)
            sizes = (in_plane, in_plane, in_plane)
        else:
            sizes = (voxel_size.z, voxel_size.y, voxel_size.x)
        z, y, x = self.lengths if len(self.lengths) == 3 else self.lengths * 3
        return z / sizes[0], y / sizes[1], x / sizes[2]


# Of objects: stated, to be estimated from the stack, or of no interest: the stack is used as it is sampled.
ObjectSize = Diameter | Literal["auto", "none"]


def parse_size(text: str) -> ObjectSize:
    """From auto, none, or what `Diameter.parse` takes. Raises BadParameter."""
    given = text.strip().lower()
    return _auto_or_none(given) or Diameter.parse(given)


# Grey value up to which voxels hold nothing, so that windows of such voxels are not computed: stated, told from the
# stack, or none: every window is computed.
SkipBelow = float | Literal["auto", "none"]


def parse_grey(text: str) -> SkipBelow:
    """From auto, none, or a finite number. Raises BadParameter."""
    given = text.strip().lower()
    if (word := _auto_or_none(given)) is not None:
        return word
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadParameter(f"A grey value of the stack, auto or none are expected, as in 120, not {text!r}")
    return value


def _auto_or_none(text: str) -> Literal["auto", "none"] | None:
    match text:
        case "auto" | "none":
            return text
        case _:
            return None


@dataclass(frozen=True)
class Options:
    """What the caller may choose for one request; None leaves the operator's choice, or the model's.

    diameter    of the objects; the volume is resampled to that at which the model works best
    skip_below  windows of voxels up to this grey value are not computed
    """

    output: OutputKind | None = None
    sw_batch_size: int | None = None
    overlap: float | None = None
    diameter: ObjectSize | None = None
    skip_below: SkipBelow | None = None
