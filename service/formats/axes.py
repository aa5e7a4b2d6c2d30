"""Resolve the axes of stored arrays, from the file or from the `axes` parameter, and select what is read of a file.

A file has one or more images, such as fields of view, which are called scenes. An image has channels and time points.

Axes are never guessed, with one exception: the pages of a plain grayscale stack without any metadata are read as z
planes, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from service.core.errors import AmbiguousAxes, BadFile, BadParameter, TooLarge
from service.core.quantities import TimeRange, is_index
from service.core.types import Array, Selection, StackShape

AXIS_LETTERS = "TZCYXS"
_UNNAMED_AXES = "QI"  # tifffile's letters for dimensions without a name
_MAX_SUGGESTED_CHANNELS = 6  # longest unnamed dimension that is suggested as the channel axis

# Maximum number of channels of an image.
MAX_CHANNELS = 2**16
# Maximum numbers of scenes and channels that a message lists.
_MAX_LISTED_SCENES = 20
_MAX_LISTED_CHANNELS = 16


@dataclass(frozen=True)
class Layout:
    """Axes and shape of a stored array. Dimensions of length 1 may be missing.

    axes   one letter of TZCYXS per dimension; Y and X are always included
    shape  length of each dimension
    notes  notes for the user about how the axes were determined
    """

    axes: str
    shape: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def get_length(self, axis: str) -> int:
        """Return the length along an axis, or 1 if the array does not have the axis."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1


@dataclass(frozen=True)
class StackPart:
    """Selected part of a stack.

    time      index of the time point; None if a range is selected, or if none of several time points is selected
    channels  channel numbers; with n samples per pixel, sample s of channel c has the number c * n + s
    """

    time: int | None
    channels: tuple[int, ...]


def get_part_shape(layout: Layout, part: StackPart) -> StackShape:
    """Return the shape (C, Z, Y, X) of the selected part."""
    return len(part.channels), layout.get_length("Z"), layout.get_length("Y"), layout.get_length("X")


def match_channels(texts: tuple[str, ...], channel_count: int) -> tuple[str, ...]:
    """Return the names or colors of the channels without spaces around them, or "" if their number is wrong.

    Raises TooLarge for more than `MAX_CHANNELS` channels.
    """
    if channel_count > MAX_CHANNELS:
        raise TooLarge(f"The image has {channel_count} channels, but at most {MAX_CHANNELS} are supported.")
    return tuple(text.strip() for text in texts) if len(texts) == channel_count else ("",) * channel_count


def expand_to_cszyx(pixels: Array, letters: str) -> Array:
    """Transpose pixels whose axes are a subset of CSZYX to [C, S, Z, Y, X], with length 1 for the missing axes."""
    missing_axes = "".join(axis for axis in "CSZYX" if axis not in letters)
    pixels = pixels[(np.newaxis,) * len(missing_axes)]
    return pixels.transpose([(missing_axes + letters).index(axis) for axis in "CSZYX"])


def find_channels(
    layout: Layout, part: StackPart, block_start: tuple[int, int], block: Array
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the position in the selection and the index (c, s) of each selected channel in a block [C, S, ...].

    `block_start` contains the numbers of the first channel and of the first sample in the block.
    """
    for position, channel_number in enumerate(part.channels):
        c, s = divmod(channel_number, layout.get_length("S"))
        c, s = c - block_start[0], s - block_start[1]
        if 0 <= c < block.shape[0] and 0 <= s < block.shape[1]:
            yield position, (c, s)


def resolve_axes(axes: str, shape: Sequence[int], override: str | None, metadata_problem: str = "") -> Layout:
    """Resolve the axes of a stored array.

    Args:
        axes: one letter per stored dimension, as named by the file or by tifffile
        shape: lengths of the stored dimensions
        override: the `axes` parameter of the request: one letter of TZCYXS per stored dimension; dimensions of length 1
            may be left out
        metadata_problem: clause that explains why the file's metadata cannot be used, or ""

    Raises AmbiguousAxes if the file does not name its axes, BadParameter if the override does not match the stored
    array, and BadFile if a dimension is empty or negative. Damaged signed tags can contain negative lengths.
    """
    if len(axes) < 2 or min(shape) < 1:
        raise BadFile(f"The image in the file has no pixels: its stored shape is {_format_shape(shape)}.")
    if override is not None:
        return _apply_override(override.upper(), axes, shape)
    axes, shape = squeeze(axes, shape)
    if not _has_valid_plane(axes) or _has_ambiguous_axes(metadata_problem, axes):
        raise _make_ambiguous_axes_error(axes, shape, metadata_problem)
    notes = (f"The file's metadata is ignored: {metadata_problem}.",) if metadata_problem else ()
    if set(axes) <= set(AXIS_LETTERS):
        return Layout(axes, shape, notes)
    if len(axes) == 3 and axes[0] in _UNNAMED_AXES:
        note = (
            f"The file does not name its axes, so its {shape[0]} pages are read as z planes. If they are time points or"
            " channels, set axes=TYX or axes=CYX."
        )
        return Layout("Z" + axes[1:], shape, (*notes, note))
    raise _make_ambiguous_axes_error(axes, shape)


def _has_ambiguous_axes(metadata_problem: str, axes: str) -> bool:
    """Return whether unusable metadata makes the axes ambiguous. A single plane is never ambiguous."""
    return bool(metadata_problem) and len(axes.replace("S", "")) > 2


def _has_valid_plane(axes: str) -> bool:
    """Return whether Y and X are among the axes and no axis occurs twice."""
    return {*"YX"} <= {*axes} and len(set(axes)) == len(axes)


def _make_ambiguous_axes_error(axes: str, shape: Sequence[int], metadata_problem: str = "") -> AmbiguousAxes:
    lengths = _format_shape(shape)
    if metadata_problem and _has_valid_plane(axes):
        problem = f"The axes of the file are unknown: {metadata_problem}. The stored shape is {lengths}."
    else:
        problem = f"The axes of the file are ambiguous: its dimensions are {lengths} ({axes})."
    suggested_axes = _suggest_axes(axes, shape)
    if suggested_axes is None:
        return AmbiguousAxes(f"{problem} Export an image that has no dimensions other than {AXIS_LETTERS}.")
    return AmbiguousAxes(
        f"{problem} Set axes to one letter of {AXIS_LETTERS} per dimension, for example axes={suggested_axes}.",
        parameter="axes",
        suggested={"axes": suggested_axes},
    )


def squeeze(axes: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the axes and shape without dimensions of length 1, except Y and X."""
    dimensions = [(axis, n) for axis, n in zip(axes, shape, strict=True) if n > 1 or axis in "YX"]
    return "".join(axis for axis, _ in dimensions), tuple(n for _, n in dimensions)


def _apply_override(override: str, axes: str, shape: Sequence[int]) -> Layout:
    if not set(override) <= set(AXIS_LETTERS) or not _has_valid_plane(override):
        raise BadParameter(
            f"axes={override!r} is not valid. Use each letter of {AXIS_LETTERS} at most once, and include Y and X.",
            parameter="axes",
        )
    squeezed_axes, squeezed_shape = squeeze(axes, shape)
    for lengths in (squeezed_shape, tuple(shape), tuple(n for n in shape if n > 1)):
        if len(lengths) == len(override):
            return Layout(override, lengths, _make_override_notes(override, axes, squeezed_axes))
    raise BadParameter(
        f"axes={override!r} names {len(override)} dimensions, but the stored array has {len(squeezed_shape)}:"
        f" {_format_shape(squeezed_shape)}.",
        parameter="axes",
    )


def _make_override_notes(override: str, axes: str, squeezed_axes: str) -> tuple[str, ...]:
    """Return a note if an override assigns other axes than Y and X to the planes of a file."""
    stored_tails = {len(letters) - letters.find("YX") for letters in (axes, squeezed_axes)}
    is_transposed = "YX" in axes and ("YX" not in override or len(override) - override.find("YX") not in stored_tails)
    note = f"axes={override} reads the planes of the file along other axes than Y and X. The last axis is the fastest."
    return (note,) * is_transposed


def select_scene(names: Sequence[str], scene: int | str) -> int:
    """Return the index of a scene, given by index or name.

    `names` has one name per scene, "" for a scene without a name. Raises BadParameter if there is no such scene, or if
    several scenes have the name.
    """
    if isinstance(scene, int) and 0 <= scene < len(names):
        return scene
    indices = [index for index, name in enumerate(names) if name and name == str(scene)]
    if len(indices) == 1:
        return indices[0]
    if indices:
        raise make_scene_error(f"{len(indices)} scenes of the file have the name {scene!r}. The file has", names)
    raise make_scene_error(f"The file has no scene {scene!r}. It has", names)


def make_scene_error(problem: str, names: Sequence[str]) -> BadParameter:
    """Return the error for a missing or wrong choice. `problem` is followed by the number and the list of scenes."""
    count = "one scene" if len(names) == 1 else f"{len(names)} scenes"
    example = 0 if len(names) == 1 else f"0 to scene={len(names) - 1}, or by name"
    return BadParameter(
        f"{problem} {count}: {_list_names(names, _MAX_LISTED_SCENES)}. Choose one with scene={example}.",
        parameter="scene",
        suggested={"scene": "0"},
    )


def select_part(layout: Layout, channel_names: Sequence[str], selection: Selection) -> StackPart:
    """Select a time point and channels. By default, select all channels, and the time point if the stack has only one.

    Raises BadParameter if the file does not have the time point or channel. The error message lists the available ones.
    """
    return StackPart(_select_time(layout, selection.time), _select_channels(channel_names, selection.channel))


def select_times(layout: Layout, times: TimeRange) -> range:
    """Return the time points of a range. Raises BadParameter if the file does not have all of them."""
    time_count = layout.get_length("T")
    stop = time_count if times.stop is None else times.stop
    if not times.first < stop <= time_count:
        requested_range = f"{times.first}:{'' if times.stop is None else times.stop}"
        raise BadParameter(
            f"time={requested_range} is out of range: the file has {_format_times(time_count)}.",
            parameter="time",
            suggested={"time": "all"},
        )
    return range(times.first, stop)


def explain_time_choice(layout: Layout) -> str:
    """Return the message for a file with several time points if the request selects none."""
    time_count = layout.get_length("T")
    message = (
        f"The file has {time_count} time points. Choose one with time=0 to time={time_count - 1}, or all with time=all."
    )
    if layout.get_length("Z") == 1:
        other_axes = layout.axes.replace("Z", "").replace("T", "Z")
        message += f" If they are the planes of one stack, set axes={other_axes}."
    return message


def _select_time(layout: Layout, time: int | TimeRange | None) -> int | None:
    time_count = layout.get_length("T")
    if isinstance(time, TimeRange):
        select_times(layout, time)
        return None
    if time is None:
        return 0 if time_count == 1 else None
    if not 0 <= time < time_count:
        raise BadParameter(
            f"time={time} is out of range: the file has {_format_times(time_count)}.",
            parameter="time",
            suggested={"time": "0"},
        )
    return time


def _format_times(time_count: int) -> str:
    return "one time point: time=0" if time_count == 1 else f"{time_count} time points: time=0 to time={time_count - 1}"


def _select_channels(channel_names: Sequence[str], channel: int | str | None) -> tuple[int, ...]:
    if channel is None:
        return tuple(range(len(channel_names)))
    if isinstance(channel, int) and 0 <= channel < len(channel_names):
        return (channel,)
    requested_name = str(channel).strip()
    matches = _find_channels_by_name(channel_names, requested_name)
    if len(matches) > 1:
        raise BadParameter(
            f"channel={channel!r} is ambiguous: {len(matches)} channels have this name. Choose one by its number.",
            parameter="channel",
            suggested={"channel": str(matches[0])},
        )
    index = matches[0] if matches else int(requested_name) if is_index(requested_name) else None
    if index is None or not 0 <= index < len(channel_names):
        raise BadParameter(
            f"channel={channel!r} does not exist: the file has {format_channels(channel_names)}.", parameter="channel"
        )
    return (index,)


def _find_channels_by_name(channel_names: Sequence[str], name: str) -> list[int]:
    """Return the indices of the channels with this name or, if none has it, with a name that differs only in case."""
    exact_matches = [index for index, channel in enumerate(channel_names) if channel and channel == name]
    return exact_matches or [
        index for index, channel in enumerate(channel_names) if channel and channel.lower() == name.lower()
    ]


def format_channels(channel_names: Sequence[str]) -> str:
    """Return a string such as "2 channels: 0 (DAPI), 1"."""
    channel_list = _list_names(channel_names, _MAX_LISTED_CHANNELS)
    return f"{len(channel_names)} channel{'s' * (len(channel_names) > 1)}: {channel_list}"


def _list_names(names: Sequence[str], max_count: int) -> str:
    """Return a string such as "0 (DAPI), 1 and 3 more", with the indices and the names of up to `max_count` items."""
    listed = ", ".join(f"{index} ({name})" if name else str(index) for index, name in enumerate(names[:max_count]))
    return f"{listed} and {len(names) - max_count} more" if len(names) > max_count else listed


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


def _assign_plane_axes(letters: list[str]) -> None:
    """Assign X and Y to the innermost unnamed dimensions. The dimension S is used only if no other is left."""
    for plane_axis in "XY":
        if plane_axis not in letters:
            candidates = [index for index, letter in enumerate(letters) if letter not in ("X", "Y")]
            letters[max(candidates, key=lambda index: (letters[index] != "S", index))] = plane_axis


def _suggest_axes(axes: str, shape: Sequence[int]) -> str | None:
    """Suggest axes for an override. Return None if there are more dimensions than letters.

    Letters from the file are retained if possible. The shortest of several unnamed dimensions becomes the channel
    axis if it is short enough. The innermost of the remaining dimensions becomes z, and the next one becomes time.
    """
    if len(axes) > len(AXIS_LETTERS):
        return None
    letters = [axis if axis in AXIS_LETTERS and axis not in axes[:index] else "" for index, axis in enumerate(axes)]
    _assign_plane_axes(letters)
    _assign_remaining_axes(letters, shape)
    return "".join(letters)


def _assign_remaining_axes(letters: list[str], shape: Sequence[int]) -> None:
    """Assign C to the shortest of several remaining dimensions, then Z, T, C and S to the others, innermost first."""
    unnamed_indices = [index for index, letter in enumerate(letters) if not letter]
    shortest_index = min(unnamed_indices, key=lambda index: shape[index], default=0)
    if len(unnamed_indices) > 1 and "C" not in letters and shape[shortest_index] <= _MAX_SUGGESTED_CHANNELS:
        letters[shortest_index] = "C"
        unnamed_indices.remove(shortest_index)
    unused_letters = [letter for letter in "ZTCS" if letter not in letters]
    for index, letter in zip(reversed(unnamed_indices), unused_letters, strict=False):
        letters[index] = letter
