"""The nouns of a request: the volume, the part of a file to read, the options, and the segmentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import DiameterSetting, ObjectVolume, Size, SkipBelow, TimeInterval, TimeRange, VoxelSize

Array = NDArray[Any]
StackShape = tuple[int, int, int, int]
"""Channels, and voxels along (Z, Y, X)."""
OutputKind = Literal["labels", "classes", "probabilities"]
Quality = Literal["fast", "best"]
"""fast scores windows once; best lets them overlap more, and averages the scores of several views."""
Views = tuple[tuple[int, ...], ...]
"""For each view the axes, of 2 to 4 (z, y, x), along which a window is mirrored."""
Linking = Literal["overlap", "laptrack"]
"""The rule by which objects get one number through time: the overlap of their labels at neighbouring time points."""


Cancelling = Callable[[], bool]
"""Whether nobody waits for the answer any more."""


def never() -> bool:
    """Return False: the work is not cancelled."""
    return False


@dataclass(frozen=True)
class Selection:
    """Part of a file to read, and facts that the caller states instead of the file.

    channel     index or name; None: the only channel, or as many as the model takes
    time        index; None: the only time point. A range can be described, and is read point by point
    axes        one letter of TZCYXS per dimension of the stored array, overriding the file
    voxel_size  overrides the file
    """

    channel: int | str | None = None
    time: int | TimeRange | None = None
    axes: str | None = None
    voxel_size: VoxelSize | None = None


class Extent(Protocol):
    """Shape and sampling of a stack without its pixels; `Volume` and `Description` are extents."""

    @property
    def shape(self) -> StackShape:
        """(C, Z, Y, X)."""

    @property
    def voxel_size(self) -> VoxelSize | None:
        """Micrometres, or None where the file does not say."""


@dataclass(frozen=True)
class Volume:
    """One stack [C, Z, Y, X], dtype as stored, whose planes are read in ranges.

    read        read(z0, z1) -> [C, z1 - z0, Y, X] in native byte order; the pixels may live in a file
    voxel_size  micrometres, or None where the file does not say
    channels    one name per channel, "" where the file gives none
    notes       what a user should know of how the file was understood
    """

    shape: StackShape
    dtype: np.dtype[Any]
    read: Callable[[int, int], Array]
    voxel_size: VoxelSize | None = None
    channels: tuple[str, ...] = ("",)
    notes: tuple[str, ...] = ()

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
        """Voxels of one channel."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> Array:
        """Read all pixels, [C, Z, Y, X]."""
        return self.read(0, self.shape[1])


@dataclass(frozen=True, eq=False)
class Objects:
    """Objects of a label volume in the order of their numbers, as they were decoded; arrays [N].

    voxels      int64, on the grid of the network
    confidence  float32, the mean probability over its voxels that they are foreground
    peaks       float32, the highest distance that the network gave inside the object, 0 to 1 where it is normalised
    """

    voxels: NDArray[np.int64]
    confidence: NDArray[np.float32]
    peaks: NDArray[np.float32]

    @classmethod
    def from_sums(cls, voxels: Array, foreground: Array, peaks: Array) -> Self:
        """Make objects from their voxels, the sums of the probabilities of these, and their peaks."""
        confidence = foreground / np.maximum(voxels, 1)
        return cls(voxels.astype(np.int64), confidence.astype(np.float32), peaks.astype(np.float32))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return the objects of at least one part after each other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.voxels)

    @property
    def typical_size(self) -> int:
        """Voxels of the object that the median voxel belongs to. There has to be an object."""
        sizes = np.sort(self.voxels)
        return int(sizes[np.searchsorted(sizes.cumsum(), sizes.sum() / 2)])

    @property
    def typical_confidence(self) -> float:
        """Confidence of the object that the median voxel belongs to, from the least to the most certain object.

        There has to be an object.
        """
        order = np.argsort(self.confidence, kind="stable")
        sums = self.voxels[order].cumsum()
        return float(self.confidence[order[np.searchsorted(sums, sums[-1] / 2)]])

    def select(self, kept: NDArray[np.bool_]) -> Self:
        """Return the objects for which `kept` [N] is true."""
        return type(self)(self.voxels[kept], self.confidence[kept], self.peaks[kept])


@dataclass(frozen=True)
class Segmentation:
    """Output of a model, on the grid of the volume; of a series of volumes with a first axis T.

    pixels         labels and classes: [Z, Y, X] uint8, uint16 or uint32; probabilities: [K, Z, Y, X] float32
    kind           meaning of the pixels
    voxel_size     of the volume
    count          number of objects (labels), else None
    names          the K names of the classes or probabilities, empty for labels
    objects        what decoding knows of the objects (labels), else None
    time_interval  of a series, or None where the file does not say
    """

    pixels: Array
    kind: OutputKind
    voxel_size: VoxelSize | None = None
    count: int | None = None
    names: tuple[str, ...] = ()
    objects: Objects | None = None
    time_interval: TimeInterval | None = None

    @property
    def axes(self) -> str:
        """One letter of TCZYX per dimension of the pixels."""
        volume = "CZYX" if self.kind == "probabilities" else "ZYX"
        return "T" * (self.pixels.ndim - len(volume)) + volume


def label_dtype(count: int) -> np.dtype[Any]:
    """Return the smallest of uint16 and uint32 that numbers `count` objects."""
    return np.dtype(np.uint16 if count < 2**16 else np.uint32)


@dataclass(frozen=True)
class Description:
    """Facts about a file and the selected part, found without reading pixels.

    container           "OME-TIFF", "ImageJ TIFF", "TIFF", ...
    axes, stored_shape  one letter of TZCYXS per stored dimension after an override, and the lengths
    shape               (C, Z, Y, X) of the selected part
    dtype               as stored, for example "uint16"
    voxel_size          micrometres, or None; `voxel_size_from` names its source
    channels, times     names of all stored channels; number of time points
    colours             of all stored channels as #rrggbb, "" where the file gives none
    notes               assumptions and doubts, one sentence each
    time_interval       or None where the file does not say
    time_points         [first, stop) of a selected range, else None
    problem             why no volume can be read: a time point has yet to be chosen; "" where one can
    """

    container: str
    axes: str
    stored_shape: tuple[int, ...]
    shape: StackShape
    dtype: str
    voxel_size: VoxelSize | None
    voxel_size_from: str
    channels: tuple[str, ...]
    times: int
    notes: tuple[str, ...] = ()
    time_interval: TimeInterval | None = None
    time_points: tuple[int, int] | None = None
    problem: str = ""
    colours: tuple[str, ...] = ()

    @property
    def volumes(self) -> int:
        """Number of volumes that are selected: time points of a range, else one."""
        first, stop = self.time_points or (0, 1)
        return stop - first

    @property
    def nbytes(self) -> int:
        """Bytes of one selected volume once it is decoded."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Steering(NamedTuple):
    """Changes by the caller in how scores become objects, of the same meaning as in a model file's `decoding`.

    None leaves a choice to the model file. `minimum_size` is in the stack, whatever it is resampled to.
    """

    threshold: float | None = None
    minimum_size: ObjectVolume | None = None
    border: Literal["keep", "drop"] | None = None
    fill_holes: bool | None = None
    min_confidence: float | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the choices that were made."""
        return tuple(name for name, value in self._asdict().items() if value is not None)


@dataclass(frozen=True)
class Options:
    """Choices of the caller for one request; None leaves a choice to the operator or the model.

    diameter    of the objects; the volume is resampled so that they have the size that the model works best at
    skip_below  windows whose voxels are all up to this grey value are not computed
    steering    how scores become objects
    roi_size    window (z, y, x) in voxels of the network's grid, where the model takes others than its own
    strict      whether a doubtful result is an error
    quality     None: fast
    """

    output: OutputKind | None = None
    sw_batch_size: int | None = None
    overlap: float | None = None
    diameter: DiameterSetting | None = None
    skip_below: SkipBelow | None = None
    steering: Steering = field(default_factory=Steering)
    roi_size: Size | None = None
    strict: bool = False
    quality: Quality | None = None
