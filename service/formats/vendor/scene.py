"""Stacks in files of microscope vendors. A file contains one or more scenes, such as fields of view."""

from __future__ import annotations

import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from service.core.errors import BadFile, BadParameter, TooLarge
from service.core.quantities import TimeInterval, convert_to_float
from service.core.types import Array, Selection
from service.formats import axes
from service.formats.axes import Layout, make_scene_error, select_scene
from service.formats.open_stack import OpenStack
from service.formats.placement import Placement, StoreBlock, check_size
from service.formats.sampling import Calibration, parse_time_interval
from service.formats.tiff.planes import missing
from service.formats.tiff.planes.decompression import make_lossy_error
from service.formats.tiff.planes.stored_image import DECODING_ERRORS
from service.formats.tiff.unsupported_formats import FIJI_ADVICE

# Maximum number of scenes: 384 wells with 42 fields of view each.
MAX_SCENES = 2**14
# Number of scenes that are opened to describe one of them, if the first ones are not supported.
_MAX_OPENED_SCENES = 64
# Largest relative difference of the intervals between time points that are regarded as equal.
_TIME_TOLERANCE = 0.1
# Errors that the libraries raise for damaged files. Parsers of XML raise SyntaxError, and nd2 raises NameError if a
# channel has no description of its probe.
_LIBRARY_ERRORS = (*DECODING_ERRORS, EOFError, NameError, SyntaxError, zlib.error)


class Scene(ABC):
    """One image of a file.

    container      name of the file format
    axes, shape    letters and lengths of the stored dimensions; the last ones are Y and X, or Y, X and S
    channel_names  names of the channels, each "" if unknown
    colors         one color per channel, as in `Description.colours`
    stored_planes  positions [n, d] of the planes in the file along the first d axes, without duplicates, if some of the
                   planes may be missing; otherwise None
    lossy_compression  name of a compression of some planes that can change pixel values, or ""
    """

    container: str
    axes: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    calibration: Calibration
    time_interval: TimeInterval | None = None
    notes: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    stored_planes: Array | None = None
    lossy_compression: str = ""

    @abstractmethod
    def read_plane(self, position: dict[str, int]) -> Array:
        """Return the plane [Y, X] or [Y, X, S] at a position along the other axes. Called by one thread at a time."""


class SceneFile(NamedTuple):
    """An open file.

    names       names of the scenes, "" for a scene without a name
    open_scene  function that opens a scene, given by its index
    """

    names: tuple[str, ...]
    open_scene: Callable[[int], Scene]


def parse_number(value: Any) -> float:
    """Return a number, or NaN for any other value. Invalid sizes, times and colors do not make a file unreadable."""
    try:
        return convert_to_float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


@dataclass(frozen=True)
class VendorStack(OpenStack):
    """A scene with its axes and the selected part.

    names        names of all scenes of the file
    index        index of the scene
    is_selected  whether the request selects the scene
    """

    image: Scene
    names: tuple[str, ...]
    index: int
    is_selected: bool

    @property
    def colors(self) -> tuple[str, ...]:
        """One color per stored channel, or "" if unknown."""
        colors = self.image.colors if self.layout.get_length("S") == 1 else ()
        return axes.match_channels(colors, len(self.channel_names))

    @property
    def decoded_bytes(self) -> int:
        """Decoded size of the selected part."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def scenes(self) -> tuple[str, ...]:
        """Names of the scenes, if there are several."""
        return self.names if len(self.names) > 1 else ()

    @property
    def example_scene(self) -> int | None:
        """Index of the scene, if one of the scenes has to be selected and none is."""
        return self.index if self.scenes and not self.is_selected else None

    def find_missing_choice(self, *, is_series: bool) -> BadParameter | None:
        """Return the error if one of several scenes or time points has to be selected, and none is."""
        if self.example_scene is not None:
            return make_scene_error("The file has", self.names)
        return super().find_missing_choice(is_series=is_series)

    def locate(self) -> Placement | None:
        """Return None: the libraries do not report the location of the pixels."""
        return None

    def decode(self, store_block: StoreBlock) -> None:
        """Decode the selected part plane by plane."""
        # A squeezed layout lacks dimensions of length 1.
        stored_axes = [axis for axis, n in zip(self.image.axes, self.image.shape, strict=True) if n > 1 or axis in "YX"]
        renamed_axes = dict(zip(self.layout.axes, stored_axes, strict=True))
        num_samples = self.layout.get_length("S")
        for z in range(self.layout.get_length("Z")):
            planes = dict[int, Array]()
            for number, channel in enumerate(self.part.channels):
                c, s = divmod(channel, num_samples)
                if c not in planes:
                    position = {"T": self.part.time or 0, "C": c, "Z": z}
                    renamed = {renamed_axes[axis]: n for axis, n in position.items() if axis in renamed_axes}
                    planes = {c: self._read_plane(renamed)}
                store_block(number, (z, 0, 0), np.ascontiguousarray(planes[c][np.newaxis, ..., s]))

    def _read_plane(self, position: dict[str, int]) -> Array:
        """Return a plane [Y, X, S]. Raises BadFile if it does not have the size of the others."""
        with translate_errors(self.image.container):
            plane = self.image.read_plane(position)
        expected = self.layout.get_length("Y"), self.layout.get_length("X"), self.layout.get_length("S")
        if plane.size != math.prod(expected) or plane.shape[:2] != expected[:2]:
            raise BadFile(f"A plane of the file has {plane.shape} pixels instead of {expected}. Export the file again.")
        return np.ascontiguousarray(plane.reshape(expected).astype(self.dtype, copy=False))


def open_scene(file: SceneFile, selection: Selection, limit_bytes: int) -> VendorStack:
    """Open the selected scene or, to describe it, the first supported one if no scene is selected.

    Raises BadFile if there are no scenes, BadParameter if the selection is not valid, AmbiguousAxes, TooLarge.
    """
    if len(file.names) > MAX_SCENES:
        raise TooLarge(f"The file has {len(file.names)} scenes. At most {MAX_SCENES} are supported.")
    index, scene = _open_scene(file, selection.scene)
    if selection.is_labels and scene.lossy_compression:
        raise make_lossy_error(scene.lossy_compression)
    if scene.stored_planes is not None:
        _crop_to_stored_planes(scene, scene.stored_planes, allow_incomplete=selection.allow_incomplete)
    layout = axes.resolve_axes(scene.axes, scene.shape, selection.axes)
    if layout.axes.rstrip("S")[-2:] != "YX":
        raise BadParameter("For this file format, axes must end with YX or YXS.", parameter="axes")
    channel_names = _name_channels(scene, layout)
    part = axes.select_part(layout, channel_names, selection)
    stack = VendorStack(scene, layout, part, channel_names, file.names, index, selection.scene is not None)
    check_size(stack.decoded_bytes, limit_bytes)
    return stack


def _open_scene(file: SceneFile, selected: int | str | None) -> tuple[int, Scene]:
    """Open a scene, given by its index or name, or the first one that is supported. Return its index and the scene.

    Raises BadFile, BadParameter.
    """
    if selected is not None:
        index = select_scene(file.names, selected)
        return index, file.open_scene(index)
    first_error: BadFile | None = None
    for index in range(min(len(file.names), _MAX_OPENED_SCENES)):
        try:
            return index, file.open_scene(index)
        except BadFile as error:
            first_error = first_error or error
    raise first_error or BadFile("The file contains no image.")


def _crop_to_stored_planes(scene: Scene, positions: Array, *, allow_incomplete: bool) -> None:
    """Crop a scene to its complete part. Raises BadFile if planes are missing, unless `allow_incomplete` is set."""
    num_axes = positions.shape[1]
    axis_names, lengths = scene.axes[:num_axes], scene.shape[:num_axes]
    counts = math.prod(lengths), len(positions)
    if counts[0] == counts[1]:
        return
    is_usable = allow_incomplete and len(positions) > 0
    cropped = missing.crop_to_complete(axis_names, lengths, positions) if is_usable else (0,)
    if not all(cropped):
        raise missing.make_incomplete_error(scene.container, *counts)
    scene.shape = (*cropped, *scene.shape[num_axes:])
    num_channels = cropped[axis_names.index("C")] if "C" in axis_names else None
    scene.channel_names, scene.colors = scene.channel_names[:num_channels], scene.colors[:num_channels]
    note = missing.make_incomplete_note(scene.container, *counts, math.prod(cropped))
    scene.notes = (*scene.notes, note)


def find_time_interval(seconds: Sequence[Any]) -> TimeInterval | None:
    """Return the mean interval between time points, given in seconds.

    Return None if the intervals differ by more than 10 %, or if a time is not a number.
    """
    try:
        intervals = np.diff(np.array([float(time) for time in seconds]))
    except (TypeError, ValueError):
        return None
    mean = float(intervals.mean()) if intervals.size else 0.0
    is_constant = bool(np.all(np.abs(intervals - mean) <= _TIME_TOLERANCE * mean))
    return parse_time_interval(mean, "s") if is_constant else None


@contextmanager
def translate_errors(container: str) -> Iterator[None]:
    """Translate errors of the libraries to BadFile, and MemoryError to TooLarge. Ignore their warnings."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except MemoryError as error:
        raise TooLarge(
            "Reading the file exceeds the memory limit for one file. Crop or downsample the stack."
        ) from error
    except _LIBRARY_ERRORS as error:
        reason = " ".join(str(error).split())[:160]
        raise BadFile(
            f"The {container} file is damaged or not supported: reading it failed ({reason or error!r}). {FIJI_ADVICE}"
        ) from error


def _name_channels(scene: Scene, layout: Layout) -> tuple[str, ...]:
    """Return one name per channel and color sample, or "" if the file has none."""
    num_channels, num_samples = layout.get_length("C"), layout.get_length("S")
    names = axes.match_channels(scene.channel_names, num_channels)
    if num_samples == 1:
        return names
    samples = ("red", "green", "blue", "alpha")[:num_samples] if num_samples in {3, 4} else ("",) * num_samples
    return tuple(f"{name} {sample}".strip() for name in names for sample in samples)
