"""Which stored dimension is which: from the file, from the caller's override, never from a guess but one.

The one: a plain stack of grey pages without any description is taken for z, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.errors import AmbiguousAxes, BadFile, BadParameter
from service.core.volume import Selection

LETTERS = "TZCYXS"
_NAMELESS = "QI"  # how tifffile names a dimension that a file does not name


@dataclass(frozen=True)
class Layout:
    """The meaning of a stored array whose dimensions of length 1 may have been left out.

    axes, shape  one of TZCYXS per dimension, Y and X always among them
    """

    axes: str
    shape: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def length(self, axis: str) -> int:
        """Length along an axis, 1 where there is none."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    @property
    def channels(self) -> int:
        """Channels and samples of a pixel count together: channel c, sample s is number c * samples + s."""
        return self.length("C") * self.length("S")


@dataclass(frozen=True)
class Part:
    """What a selection takes of a layout: one time point (None: the caller has not chosen), and channels by number."""

    time: int | None
    channels: tuple[int, ...]


def understand(axes: str, shape: Sequence[int], override: str | None, doubt: str = "") -> Layout:
    """Settle the axes of a stored array.

    Args:
        axes: one letter per stored dimension, as the file or tifffile names them
        shape: lengths of the stored dimensions
        override: the caller's `axes=`, one of TZCYXS per stored dimension, those of length 1 with or without
        doubt: a clause that says why the file's own description cannot be used, or ""

    Raises AmbiguousAxes where the file does not say, BadParameter where the override does not fit, BadFile where a
    dimension is empty, or negative, as a tag of a signed type may have it.
    """
    if len(axes) < 2 or min(shape) < 1:
        raise BadFile(f"The file holds an image without pixels: its stored shape is {_written(shape)}.")
    if override is not None:
        return _override(override.upper(), axes, shape)
    axes, shape = squeeze(axes, shape)
    state = f"State one letter of {LETTERS} per dimension, for example axes={_example(axes)}."
    unnamed = f"The file does not say what its dimensions {_written(shape)} are ({axes}). {state}"
    if "Y" not in axes or "X" not in axes or len(set(axes)) < len(axes):
        raise AmbiguousAxes(unnamed)
    if doubt and len(axes.replace("S", "")) > 2:
        raise AmbiguousAxes(
            f"The axes of the file are unknown: {doubt}. The stored shape is {_written(shape)}. {state}"
        )
    notes = (f"The file's description is not used: {doubt}.",) if doubt else ()
    if set(axes) <= set(LETTERS):
        return Layout(axes, shape, notes)
    if len(axes) == 3 and axes[0] in _NAMELESS:
        note = (
            f"The file does not name its axes; its {shape[0]} pages are taken for z. axes=TYX or axes=CYX overrides it."
        )
        return Layout("Z" + axes[1:], shape, (*notes, note))
    raise AmbiguousAxes(unnamed)


def squeeze(axes: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Leave out dimensions of length 1, except Y and X."""
    kept = [(axis, n) for axis, n in zip(axes, shape, strict=True) if n > 1 or axis in "YX"]
    return "".join(axis for axis, _ in kept), tuple(n for _, n in kept)


def _override(override: str, axes: str, shape: Sequence[int]) -> Layout:
    if not override or set(override) - set(LETTERS) or len(set(override)) < len(override) or not {*"YX"} <= {*override}:
        raise BadParameter(f"axes={override!r}: use each letter of {LETTERS} at most once, Y and X always.")
    shown = squeeze(axes, shape)[1]
    longer = tuple(n for n in shape if n > 1)
    for lengths in (shown, tuple(shape), longer):
        if len(lengths) == len(override):
            return Layout(override, lengths)
    raise BadParameter(
        f"axes={override!r} names {len(override)} dimensions, but the stored array has {len(shown)}: {_written(shown)}."
    )


def select(layout: Layout, names: Sequence[str], selection: Selection) -> Part:
    """The time point and the channels to read; without a choice all channels, and the only time point or None.

    Raises BadParameter where there is no such time point or channel, naming what there is.
    """
    return Part(_time(layout, selection.time), _channels(names, selection.channel))


def must_choose_time(layout: Layout) -> str:
    """The sentence for a caller who has not chosen one of several time points."""
    text = f"The file has {layout.length('T')} time points; choose one with time=0 to time={layout.length('T') - 1}."
    if layout.length("Z") == 1:
        other = layout.axes.replace("Z", "").replace("T", "Z")
        text += f" If they are planes of one stack instead, say so with axes={other}."
    return text


def _time(layout: Layout, time: int | None) -> int | None:
    times = layout.length("T")
    if time is None:
        return 0 if times == 1 else None
    if not 0 <= time < times:
        there = "one time point: time=0" if times == 1 else f"{times} time points: time=0 to time={times - 1}"
        raise BadParameter(f"time={time}: the file has {there}.")
    return time


def _channels(names: Sequence[str], channel: int | str | None) -> tuple[int, ...]:
    if channel is None:
        return tuple(range(len(names)))
    wanted = str(channel).strip()
    named = _named(names, wanted)
    if len(named) > 1:
        raise BadParameter(f"channel={channel!r}: {len(named)} channels have that name; choose one by its number.")
    index = named[0] if named else _number(wanted)
    if index is None or not 0 <= index < len(names):
        raise BadParameter(f"channel={channel!r}: the file has {name_channels(names)}.")
    return (index,)


def _named(names: Sequence[str], wanted: str) -> list[int]:
    """The channels of that name; of a name in other letters, upper or lower, where none has it exactly."""
    exact = [index for index, name in enumerate(names) if name and name == wanted]
    return exact or [index for index, name in enumerate(names) if name and name.lower() == wanted.lower()]


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def name_channels(names: Sequence[str]) -> str:
    """For people: "2 channels: 0 (DAPI), 1"."""
    listed = ", ".join(f"{index} ({name})" if name else str(index) for index, name in enumerate(names[:16]))
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return f"{len(names)} channel{'s' * (len(names) > 1)}: {listed}{more}"


def _written(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


def _example(axes: str) -> str:
    """The stored axes with the unknown ones replaced, the innermost by Z."""
    letters = list(axes)
    spare = [axis for axis in "ZCTS" if axis not in axes]
    for index in reversed(range(len(letters))):
        if letters[index] not in LETTERS and spare:
            letters[index] = spare.pop(0)
    return "".join(letters)
