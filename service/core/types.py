"""Shared types of a request: the volume, the selected part of a file, the options and the segmentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import DiameterSetting, ObjectVolume, Size, SkipBelow, TimeInterval, TimeRange, VoxelSize

Array = NDArray[Any]
StackShape = tuple[int, int, int, int]
"""Number of channels, and of voxels along (Z, Y, X)."""
OutputKind = Literal["labels", "classes", "probabilities"]
Quality = Literal["fast", "best"]
"""fast: run the network once on each window; best: use more overlap, and average the scores of several views."""
Views = tuple[tuple[int, ...], ...]
"""For each view, the axes of [N, C, Z, Y, X] along which a window is mirrored, from 2 (z) to 4 (x)."""
Linking = Literal["overlap", "laptrack"]
"""Method that links the objects of consecutive time points: overlap of their labels, or LapTrack."""


CancellationCheck = Callable[[], bool]
"""Function that returns whether the request was canceled."""


def slice_range(indices: range) -> slice:
    """Return the slice that selects the same indices as a nonempty range with a positive step."""
    return slice(indices.start, indices.stop, indices.step)


def never_cancelled() -> bool:
    """Return False. This is the `CancellationCheck` for work that cannot be canceled."""
    return False


@dataclass(frozen=True)
class Selection:
    """Part of a file to read, and overrides for its metadata.

    channel           index or name; None: the only channel, or all channels that the model requires
    time              index or range; None: the only time point. The time points of a range are read one at a time
    axes              one letter from TZCYXS per dimension of the stored array; overrides the metadata of the file
    voxel_size        overrides the metadata of the file
    allow_incomplete  whether to read files that have fewer planes than their metadata declares
    scene             index or name of one of several images in the file; None: the only or the largest image
    is_labels         whether the pixels are labels, so that files with lossy compression are refused
    """

    channel: int | str | None = None
    time: int | TimeRange | None = None
    axes: str | None = None
    voxel_size: VoxelSize | None = None
    allow_incomplete: bool = False
    scene: int | str | None = None
    is_labels: bool = False


class Extent(Protocol):
    """Shape and voxel size of a stack, without its pixels. `Volume` and `Description` implement this protocol."""

    @property
    def shape(self) -> StackShape:
        """Number of channels and of voxels along (Z, Y, X)."""

    @property
    def voxel_size(self) -> VoxelSize | None:
        """Voxel size in micrometers; None if unknown."""


@dataclass(frozen=True)
class Volume:
    """A stack [C, Z, Y, X] with the dtype of the file, from which ranges of planes are read.

    read        read(z0, z1) returns planes [C, z1 - z0, Y, X] in native byte order; the pixels may be in a file
    read_part   read_part(z, rows, columns) returns pixels [rows, columns] of plane `z` of the first channel, and needs
                little memory even if the plane is large; None: `read` needs no memory for the rest of the plane
    voxel_size  in micrometers; None if unknown
    channels    one name per channel; "" for a channel without a name
    notes       assumptions about the metadata that users should know about, one sentence each
    """

    shape: StackShape
    dtype: np.dtype[Any]
    read: Callable[[int, int], Array]
    voxel_size: VoxelSize | None = None
    channels: tuple[str, ...] = ("",)
    notes: tuple[str, ...] = ()
    read_part: Callable[[int, range, range], Array] | None = None

    @classmethod
    def from_array(
        cls, pixels: Array, voxel_size: VoxelSize | None = None, channels: tuple[str, ...] | None = None
    ) -> Volume:
        """Wrap an array [C, Z, Y, X]. A memory-mapped array stays on disk until a slab is read."""
        c, z, y, x = pixels.shape
        names = channels if channels is not None else ("",) * c
        return cls((c, z, y, x), pixels.dtype, lambda z0, z1: pixels[:, z0:z1], voxel_size, names)

    @property
    def voxel_count(self) -> int:
        """Number of voxels in one channel."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Size of all pixels in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_pixels(self, z: int, rows: range, columns: range) -> Array:
        """Read pixels [rows, columns] of a plane of the first channel."""
        if self.read_part is not None:
            return self.read_part(z, rows, columns)
        return self.read(z, z + 1)[0, 0, slice_range(rows), slice_range(columns)]

    def read_all(self) -> Array:
        """Read all pixels as an array [C, Z, Y, X]."""
        return self.read(0, self.shape[1])


@dataclass(frozen=True, eq=False)
class Objects:
    """Statistics of the N decoded objects in a label volume, as arrays [N] in the order of the labels.

    voxel_counts       int64, number of voxels of each object on the grid of the network
    confidence         float32, mean foreground probability of the voxels of the object
    peaks              float32, highest distance that the network predicted inside the object; 0 to 1 if it is
                       normalized
    match_probability  float32, calibrated confidence: probability that the object matches a true object with an
                       intersection over union (IoU) above 0.5; None if the model is not calibrated
    """

    voxel_counts: NDArray[np.int64]
    confidence: NDArray[np.float32]
    peaks: NDArray[np.float32]
    match_probability: NDArray[np.float32] | None = None

    @classmethod
    def from_sums(cls, voxel_counts: Array, foreground_sums: Array, peaks: Array) -> Self:
        """Compute the statistics from the number of voxels, summed foreground probability and peak of each object."""
        confidence = foreground_sums / np.maximum(voxel_counts, 1)
        return cls(voxel_counts.astype(np.int64), confidence.astype(np.float32), peaks.astype(np.float32))

    @classmethod
    def concatenate(cls, object_groups: Sequence[Self]) -> Self:
        """Concatenate the statistics of one or more groups of objects, without their calibrated confidence."""
        names = ("voxel_counts", "confidence", "peaks")
        return cls(*(np.concatenate([getattr(group, name) for group in object_groups]) for name in names))

    def __len__(self) -> int:
        return len(self.voxel_counts)

    @property
    def median_size(self) -> int:
        """Volume-weighted median of the object sizes in voxels. Requires at least one object."""
        sizes = np.sort(self.voxel_counts)
        return int(sizes[np.searchsorted(sizes.cumsum(), sizes.sum() / 2)])

    @property
    def median_confidence(self) -> float:
        """Volume-weighted median of the confidence of the objects. Requires at least one object."""
        order = np.argsort(self.confidence, kind="stable")
        sums = self.voxel_counts[order].cumsum()
        return float(self.confidence[order[np.searchsorted(sums, sums[-1] / 2)]])

    def select(self, mask: NDArray[np.bool_]) -> Self:
        """Return the statistics of the objects for which `mask` [N] is True."""
        match_probability = None if self.match_probability is None else self.match_probability[mask]
        return type(self)(self.voxel_counts[mask], self.confidence[mask], self.peaks[mask], match_probability)


@dataclass(frozen=True)
class Segmentation:
    """Result of a segmentation, on the grid of the volume. For a time series, `pixels` has a leading axis T.

    pixels         labels and classes: [Z, Y, X] uint8, uint16 or uint32; probabilities: [K, Z, Y, X] float32
    kind           meaning of the pixels
    voxel_size     voxel size of the volume; None if unknown
    count          number of objects if the pixels are labels, else None
    names          names of the classes or of the K probabilities; empty for labels
    objects        statistics of the objects if the pixels are labels, else None
    time_interval  time between the time points of a series; None if unknown
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
        """Axes of the pixels, one letter from TCZYX per dimension."""
        volume_axes = "CZYX" if self.kind == "probabilities" else "ZYX"
        return "T" * (self.pixels.ndim - len(volume_axes)) + volume_axes


def choose_label_dtype(count: int) -> np.dtype[Any]:
    """Return uint16 if it can represent `count` labels, otherwise uint32."""
    return np.dtype(np.uint16 if count < 2**16 else np.uint32)


@dataclass(frozen=True)
class Description:
    """Metadata of a file and of the selected part, determined without reading pixels.

    container        format of the file, such as "OME-TIFF", "ImageJ TIFF" or "TIFF"
    axes             one letter from TZCYXS per stored dimension, including overrides
    stored_shape     length of each stored dimension
    shape            (C, Z, Y, X) of the selected part
    dtype            stored dtype, such as "uint16"
    voxel_size       in micrometers; None if unknown
    voxel_size_from  source of the voxel size
    channels         names of all stored channels
    times            number of stored time points
    colours          colors of all stored channels as #rrggbb; "" for a channel without a color
    notes            assumptions and ambiguities of the metadata, one sentence each
    time_interval    time between time points; None if unknown
    time_points      (first, stop) of the selected range, which excludes `stop`; None without a range
    problem          why the selected part cannot be read, for example because no time point is selected; "" if it
                     can be read
    scenes           names of the images in the file, "" for an image without a name; empty if the file has only one
    example_scene    index of the described scene, if one of the scenes has to be selected and none is; otherwise None
    partial_voxel_size
                     known parts of an incomplete voxel size along (z, y, x), None along the other axes; None if the
                     voxel size is complete or completely unknown
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
    scenes: tuple[str, ...] = ()
    example_scene: int | None = None
    partial_voxel_size: tuple[float | None, float | None, float | None] | None = None

    @property
    def volume_count(self) -> int:
        """Number of selected volumes: the number of time points in a range, otherwise 1."""
        first, stop = self.time_points or (0, 1)
        return stop - first

    @property
    def nbytes(self) -> int:
        """Size of one selected volume after decoding, in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class PostprocessingOptions(NamedTuple):
    """Options of a request that override keys under `decoding` in `model.yaml`.

    None selects the value of the model. `minimum_size` refers to the voxels of the stack, before resampling.
    """

    threshold: float | None = None
    minimum_size: ObjectVolume | None = None
    border: Literal["keep", "drop"] | None = None
    fill_holes: bool | None = None
    min_confidence: float | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """Names of the options that override the model."""
        return tuple(name for name, value in self._asdict().items() if value is not None)


@dataclass(frozen=True)
class Options:
    """Segmentation options of a request. None selects the setting of the operator or the value of the model.

    diameter        diameter of the objects; the volume is resampled to the object diameter that suits the model
    skip_below      skip windows that have no voxel above this gray value
    postprocessing  post-processing options, which control how scores become objects
    roi_size        window size (z, y, x) in voxels of the network's grid, if the model supports sizes other than its
                    own
    strict          whether low confidence in the labels is an error
    quality         fast or best; None: fast
    may_correct_diameter
                    whether a diameter with one length, such as 15px, may be replaced if the confidence is low; false
                    for stacks that must be segmented with the same diameter
    """

    output: OutputKind | None = None
    sw_batch_size: int | None = None
    overlap: float | None = None
    diameter: DiameterSetting | None = None
    skip_below: SkipBelow | None = None
    postprocessing: PostprocessingOptions = field(default_factory=PostprocessingOptions)
    roi_size: Size | None = None
    strict: bool = False
    quality: Quality | None = None
    may_correct_diameter: bool = True
