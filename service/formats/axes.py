"""Meaning of the stored dimensions, from the file or the caller's override, and selection of channels and time.

Only one guess is made: the pages of a plain grey stack without any description are taken for z, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from service.core.errors import AmbiguousAxes, BadFile, BadParameter
from service.core.quantities import TimeRange
from service.core.types import Array, Selection, StackShape

LETTERS = "TZCYXS"
_NAMELESS = "QI"  # tifffile's letters for dimensions that a file does not name
_MOST_CHANNELS = 6  # a dimension without a name is suggested as channels up to this length


@dataclass(frozen=True)
class Layout:
    """The meaning of a stored array whose dimensions of length 1 may have been left out.

    axes, shape  one of TZCYXS per dimension, Y and X always among them
    """

    axes: str
    shape: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def length(self, axis: str) -> int:
        """Return the length along an axis, 1 where there is none."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1


@dataclass(frozen=True)
class Part:
    """Selected part of a layout.

    time      index, None where the caller has not chosen one of several, or a range
    channels  by number; sample s of channel c has number c * samples + s
    """

    time: int | None
    channels: tuple[int, ...]


def part_shape(layout: Layout, part: Part) -> StackShape:
    """Return (C, Z, Y, X) of the selected part."""
    return len(part.channels), layout.length("Z"), layout.length("Y"), layout.length("X")


def expand(pixels: Array, letters: str) -> Array:
    """Return pixels with these axes, of CSZYX, as [C, S, Z, Y, X]."""
    missing = "".join(axis for axis in "CSZYX" if axis not in letters)
    pixels = pixels[(np.newaxis,) * len(missing)]
    return pixels.transpose([(missing + letters).index(axis) for axis in "CSZYX"])


def find_channels(
    layout: Layout, part: Part, first: tuple[int, int], block: Array
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the selected channels in a block [C, S, ...]: number among the selected, and place in it.

    `first` has the numbers of the channel and of the sample that the block begins with.
    """
    for position, number in enumerate(part.channels):
        c, s = divmod(number, layout.length("S"))
        c, s = c - first[0], s - first[1]
        if 0 <= c < block.shape[0] and 0 <= s < block.shape[1]:
            yield position, (c, s)


def resolve_axes(axes: str, shape: Sequence[int], override: str | None, doubt: str = "") -> Layout:
    """Resolve the axes of a stored array.

    Args:
        axes: one letter per stored dimension, as the file or tifffile names them
        shape: lengths of the stored dimensions
        override: the caller's `axes=`, one of TZCYXS per stored dimension, those of length 1 with or without
        doubt: clause why the file's own description cannot be used, or ""

    Raises AmbiguousAxes where the file does not name its axes, BadParameter where the override does not fit, BadFile
    where a dimension is empty, or negative, as a signed tag may have it.
    """
    if len(axes) < 2 or min(shape) < 1:
        raise BadFile(f"The file holds an image without pixels: its stored shape is {_format_shape(shape)}.")
    if override is not None:
        return _apply_override(override.upper(), axes, shape)
    axes, shape = squeeze(axes, shape)
    if not _has_plane(axes) or _matters(doubt, axes):
        raise _ambiguous(axes, shape, doubt)
    notes = (f"The file's description is not used: {doubt}.",) if doubt else ()
    if set(axes) <= set(LETTERS):
        return Layout(axes, shape, notes)
    if len(axes) == 3 and axes[0] in _NAMELESS:
        note = (
            f"The file does not name its axes; its {shape[0]} pages are taken for z. axes=TYX or axes=CYX overrides it."
        )
        return Layout("Z" + axes[1:], shape, (*notes, note))
    raise _ambiguous(axes, shape)


def _matters(doubt: str, axes: str) -> bool:
    """Return whether a doubt about the description leaves axes open: one plane is the same whatever it says."""
    return bool(doubt) and len(axes.replace("S", "")) > 2


def _has_plane(axes: str) -> bool:
    """Whether Y and X are among the axes, and no axis occurs twice."""
    return {*"YX"} <= {*axes} and len(set(axes)) == len(axes)


def _ambiguous(axes: str, shape: Sequence[int], doubt: str = "") -> AmbiguousAxes:
    lengths = _format_shape(shape)
    if doubt and _has_plane(axes):
        problem = f"The axes of the file are unknown: {doubt}. The stored shape is {lengths}."
    else:
        problem = f"The file does not say what its dimensions {lengths} are ({axes})."
    suggested = _suggest(axes, shape)
    if suggested is None:
        return AmbiguousAxes(f"{problem} Export one position with at most the dimensions {LETTERS}.")
    return AmbiguousAxes(
        f"{problem} State one letter of {LETTERS} per dimension, for example axes={suggested}.",
        parameter="axes",
        suggested={"axes": suggested},
    )


def squeeze(axes: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Leave out dimensions of length 1, except Y and X."""
    kept = [(axis, n) for axis, n in zip(axes, shape, strict=True) if n > 1 or axis in "YX"]
    return "".join(axis for axis, _ in kept), tuple(n for _, n in kept)


def _apply_override(override: str, axes: str, shape: Sequence[int]) -> Layout:
    if not set(override) <= set(LETTERS) or not _has_plane(override):
        raise BadParameter(
            f"axes={override!r}: use each letter of {LETTERS} at most once, Y and X always.", parameter="axes"
        )
    squeezed = squeeze(axes, shape)[1]
    for lengths in (squeezed, tuple(shape), tuple(n for n in shape if n > 1)):
        if len(lengths) == len(override):
            return Layout(override, lengths)
    raise BadParameter(
        f"axes={override!r} names {len(override)} dimensions, but the stored array has {len(squeezed)}:"
        f" {_format_shape(squeezed)}.",
        parameter="axes",
    )


def select(layout: Layout, names: Sequence[str], selection: Selection) -> Part:
    """Select time point and channels; without a choice all channels, and the only time point or None.

    Raises BadParameter for a time point or channel that the file does not have, and lists those that it has.
    """
    return Part(_select_time(layout, selection.time), _select_channels(names, selection.channel))


def select_times(layout: Layout, times: TimeRange) -> range:
    """Return the time points of a range. Raises BadParameter for those that the file does not have."""
    count = layout.length("T")
    stop = count if times.stop is None else times.stop
    if not times.first < stop <= count:
        stated = f"{times.first}:{'' if times.stop is None else times.stop}"
        raise BadParameter(
            f"time={stated}: the file has {_list_times(count)}.", parameter="time", suggested={"time": "all"}
        )
    return range(times.first, stop)


def explain_time_choice(layout: Layout) -> str:
    """Return the sentence for a caller who has not chosen one of several time points."""
    times = layout.length("T")
    text = f"The file has {times} time points; choose one with time=0 to time={times - 1}. time=all takes them all."
    if layout.length("Z") == 1:
        other = layout.axes.replace("Z", "").replace("T", "Z")
        text += f" If they are planes of one stack instead, say so with axes={other}."
    return text


def _select_time(layout: Layout, time: int | TimeRange | None) -> int | None:
    times = layout.length("T")
    if isinstance(time, TimeRange):
        select_times(layout, time)
        return None
    if time is None:
        return 0 if times == 1 else None
    if not 0 <= time < times:
        raise BadParameter(
            f"time={time}: the file has {_list_times(times)}.", parameter="time", suggested={"time": "0"}
        )
    return time


def _list_times(times: int) -> str:
    return "one time point: time=0" if times == 1 else f"{times} time points: time=0 to time={times - 1}"


def _select_channels(names: Sequence[str], channel: int | str | None) -> tuple[int, ...]:
    if channel is None:
        return tuple(range(len(names)))
    wanted = str(channel).strip()
    named = _find_by_name(names, wanted)
    if len(named) > 1:
        raise BadParameter(
            f"channel={channel!r}: {len(named)} channels have that name; choose one by its number.",
            parameter="channel",
            suggested={"channel": str(named[0])},
        )
    index = named[0] if named else _parse_index(wanted)
    if index is None or not 0 <= index < len(names):
        raise BadParameter(f"channel={channel!r}: the file has {_list_channels(names)}.", parameter="channel")
    return (index,)


def _find_by_name(names: Sequence[str], wanted: str) -> list[int]:
    """Return the channels of exactly this name, or else those of this name in any case of letters."""
    exact = [index for index, name in enumerate(names) if name and name == wanted]
    return exact or [index for index, name in enumerate(names) if name and name.lower() == wanted.lower()]


def _parse_index(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _list_channels(names: Sequence[str]) -> str:
    """Return text such as "2 channels: 0 (DAPI), 1"."""
    listed = ", ".join(f"{index} ({name})" if name else str(index) for index, name in enumerate(names[:16]))
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return f"{len(names)} channel{'s' * (len(names) > 1)}: {listed}{more}"


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


def _name_plane(letters: list[str]) -> None:
    """Call the innermost dimensions X and Y where the file does not, samples of a colour last of all."""
    for plane_axis in "XY":
        if plane_axis not in letters:
            free = [index for index, letter in enumerate(letters) if letter not in ("X", "Y")]
            letters[max(free, key=lambda index: (letters[index] != "S", index))] = plane_axis


def _suggest(axes: str, shape: Sequence[int]) -> str | None:
    """Return axes that an override may state: what the file names stays, where it can.

    Of several unnamed dimensions the shortest is taken for the channels, if it has few; then the innermost for z, and
    the next for time. None where there are more dimensions than letters.
    """
    if len(axes) > len(LETTERS):
        return None
    letters = [axis if axis in LETTERS and axis not in axes[:index] else "" for index, axis in enumerate(axes)]
    _name_plane(letters)
    _name_rest(letters, shape)
    return "".join(letters)


def _name_rest(letters: list[str], shape: Sequence[int]) -> None:
    """Name the dimensions without a letter: the shortest of several as channels, the innermost others first."""
    unnamed = [index for index, letter in enumerate(letters) if not letter]
    shortest = min(unnamed, key=lambda index: shape[index], default=0)
    if len(unnamed) > 1 and "C" not in letters and shape[shortest] <= _MOST_CHANNELS:
        letters[shortest] = "C"
        unnamed.remove(shortest)
    spare = [letter for letter in "ZTCS" if letter not in letters]
    for index, letter in zip(reversed(unnamed), spare, strict=False):
        letters[index] = letter
