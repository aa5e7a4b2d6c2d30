"""The nouns of a request: the volume, the part of a file to read, the options, and the segmentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from service.core.errors import BadParameter

Array = NDArray[Any]

Size = tuple[int, int, int]
"""Voxels along (Z, Y, X)."""
StackShape = tuple[int, int, int, int]
"""Channels, and voxels along (Z, Y, X)."""
OutputKind = Literal["labels", "classes", "probabilities"]
Quality = Literal["fast", "best"]
"""fast scores windows once; best lets them overlap more, and averages the scores of several views."""
Linking = Literal["overlap", "laptrack"]
"""The rule by which objects get one number through time: the overlap of their labels at neighbouring time points."""


# Shortest and longest length, a tenth of an atom to a metre in micrometres: beyond, TIFF tags and quotients overflow.
PLAUSIBLE_LENGTHS = (1e-5, 1e6)
# Largest volume, a metre cubed in cubic micrometres.
MOST_VOLUME = 1e18
# Planes further apart than this, compared to pixels, have a wrong voxel size, or show parts of objects only.
MOST_ANISOTROPY = 6.0
# Of a window; more voxels than any memory holds.
MOST_EDGE_DIGITS = 5


@dataclass(frozen=True)
class VoxelSize:
    """Edge lengths of one voxel in micrometres. Raises BadParameter beyond `PLAUSIBLE_LENGTHS`."""

    z: float
    y: float
    x: float

    def __post_init__(self) -> None:
        for axis, size in zip("zyx", self, strict=True):
            if not PLAUSIBLE_LENGTHS[0] <= size <= PLAUSIBLE_LENGTHS[1]:
                least, most = PLAUSIBLE_LENGTHS
                text = f"must be a number of micrometres from {least:g} to {most:g}, not {size}"
                raise BadParameter(f"The voxel size along {axis} {text}.")

    def __iter__(self) -> Iterator[float]:
        return iter((self.z, self.y, self.x))

    @property
    def pixel(self) -> float:
        """Edge length of a pixel in the plane, the geometric mean of both."""
        return math.sqrt(self.y * self.x)

    @property
    def anisotropy(self) -> float:
        """Spacing of planes over that of pixels, at most `MOST_ANISOTROPY`."""
        return min(self.z / self.pixel, MOST_ANISOTROPY)


@dataclass(frozen=True)
class TimeInterval:
    """Time from one time point to the next, in a unit of OME's UnitsTime, such as s, ms or min."""

    length: float
    unit: str


@dataclass(frozen=True)
class TimeRange:
    """Time points from `first` up to, but without, `stop`; None: to the end."""

    first: int = 0
    stop: int | None = None


def is_index(text: str) -> bool:
    """Return whether a text has plain digits alone: those of other scripts may be names."""
    return text.isascii() and text.isdecimal()


def parse_time(text: str) -> int | TimeRange:
    """Parse an index from 0, all, or a range such as 2:5, without its end as in Python. Raises BadParameter."""
    given = text.strip().lower()
    if given == "all":
        return TimeRange()
    first, colon, stop = given.partition(":")
    if {first, stop} - {""} and all(is_index(part) for part in (first, stop) if part):
        if not colon:
            return int(first)
        times = TimeRange(int(first or 0), int(stop) if stop else None)
        if times.stop is None or times.first < times.stop:
            return times
    raise BadParameter(
        f"An index from 0, all, or a range without its end is expected, as 2:5 for 2, 3 and 4, not {text!r}"
    )


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


@dataclass(frozen=True)
class Diameter:
    """Diameter of the objects in the plane, or along (z, y, x). Raises BadParameter beyond `PLAUSIBLE_LENGTHS`.

    Objects of which only the diameter in the plane is told are as deep as wide, in micrometres.
    """

    lengths: tuple[float] | tuple[float, float, float]
    unit: Literal["px", "um"]

    def __post_init__(self) -> None:
        if not all(PLAUSIBLE_LENGTHS[0] <= length <= PLAUSIBLE_LENGTHS[1] for length in self.lengths):
            least, most = PLAUSIBLE_LENGTHS
            raise BadParameter(f"A diameter must be from {least:g} to {most:g}, not {self.lengths}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as 15px, 7,15,15px or 6.5um. Raises BadParameter."""
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
        """Return text that `parse` understands."""
        return ",".join(f"{length:.3g}" for length in self.lengths) + self.unit

    def in_voxels(self, voxel_size: VoxelSize | None) -> tuple[float, float, float] | None:
        """Return the diameters along (z, y, x) in voxels, None for micrometres without a voxel size.

        Without a voxel size planes are taken to be as far apart as pixels.
        """
        if self.unit == "um" and voxel_size is None:
            return None
        if len(self.lengths) == 1:
            width = self.lengths[0] if self.unit == "px" or voxel_size is None else self.lengths[0] / voxel_size.pixel
            return width / (1.0 if voxel_size is None else voxel_size.anisotropy), width, width
        z, y, x = self.lengths
        sizes = (1.0, 1.0, 1.0) if self.unit == "px" or voxel_size is None else tuple(voxel_size)
        return z / sizes[0], y / sizes[1], x / sizes[2]


DiameterSetting = Diameter | Literal["auto", "none"]
"""Stated, estimated from the stack (auto), or none: the stack is used as it is sampled."""


def parse_diameter(text: str) -> DiameterSetting:
    """Parse auto, none, or text for `Diameter.parse`. Raises BadParameter."""
    match text.strip().lower():
        case "auto" | "none" as word:
            return word
        case given:
            return Diameter.parse(given)


def parse_roi_size(text: str) -> Size:
    """Parse the edges of a window, as in 64,64,64. Raises BadParameter."""
    edges = [int(part) for part in text.split(",") if is_index(part.strip()) and len(part) <= MOST_EDGE_DIGITS]
    match edges:
        case [z, y, x] if min(edges) > 0 and text.count(",") == 2:
            return z, y, x
    raise BadParameter(f"Three positive numbers Z,Y,X of voxels are expected, as in 64,64,64, not {text!r}")


SkipBelow = float | Literal["auto", "none"]
"""Grey value of empty voxels, whose windows are skipped: stated, found from the stack (auto), or none."""


def parse_skip_below(text: str) -> SkipBelow:
    """Parse auto, none, or a finite number. Raises BadParameter."""
    match text.strip().lower():
        case "auto" | "none" as word:
            return word
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadParameter(f"A grey value of the stack, auto or none are expected, as in 120, not {text!r}")
    return value


@dataclass(frozen=True)
class ObjectVolume:
    """Volume of an object in voxels of the stack (px) or in cubic micrometres. Raises BadParameter beyond 0 to 1e18."""

    amount: float
    unit: Literal["px", "um3"]

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= MOST_VOLUME:
            raise BadParameter(f"A volume must be from 0 to {MOST_VOLUME:g}, not {self.amount}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as 60 or 12.5um3. Raises BadParameter."""
        given = text.strip().lower()
        try:
            return cls(float(given.removesuffix("um3")), "um3" if given.endswith("um3") else "px")
        except (ValueError, BadParameter):
            pass
        raise BadParameter(f"A number of voxels, or of cubic micrometres as in 12.5um3, is expected, not {text!r}")

    def in_voxels(self, voxel_size: VoxelSize | None) -> float | None:
        """Return the number of voxels, None for micrometres without a voxel size."""
        if self.unit == "px":
            return self.amount
        return None if voxel_size is None else self.amount / math.prod(voxel_size)


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
