"""Messages of the server and of the client for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stackseg_client import ProblemError, Result

# Patterns for parameters in messages of the server, and the words for them in the widgets, applied in this order.
_WORDS = {
    r"\bset diameter=none\b": "choose Object diameter: original resolution",
    r"\bset diameter= to the diameter of\b": "enter the diameter of",
    r"\bset diameter=(?!\w)": "choose another object diameter",
    r"\bdiameter=none\b": "Object diameter: original resolution",
    r"\bdiameter=auto\b": "Object diameter: estimate",
    r"\bdiameter=(?=\d)": "the object diameter ",
    r"\bmodel=(?=\w)": "the model ",
    r"\bvoxel_size\b": "voxel size",
    r"\bthreshold(?=[=:])": "foreground threshold",
    r"\bminimum_size\b": "minimum object size",
    r"\b(threshold|minimum object size|channel|axes|voxel size|quality|link|time)=(?=\w)": r"\1 ",
    r"\b(diameter|model|threshold|minimum object size|channel|axes|voxel size|quality|link|time)=": r"\1",
    r"(?<=\d) ?um\b": " µm",
    r"(?<=\d) ?px\b": " px",
    r"\bSend your key as [^.]*\.": "Enter it in Segment, and press Connect.",
    r"\(docs/training\.md\)": "(Correct and train)",
}


def describe_error(error: BaseException) -> str:
    """Return the reason and the remedy of an error, as shown to users."""
    if not isinstance(error, ProblemError):
        return str(error) or type(error).__name__
    suggested = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in error.suggested.items())
    return rephrase(error.detail) + (f" Suggested: {suggested}." if suggested else "")


def describe_result(result: Result, classes: Sequence[str]) -> str:
    """Return the number of objects or the classes, the object diameter, and the notes and warnings of a result.

    classes  names of the outputs of the model, for a result without objects
    """
    found = "1 object" if result.objects == 1 else f"{result.objects} objects"
    if result.objects is None:
        found = "Classes: " + ", ".join(f"{index} {name}" for index, name in enumerate(classes))
    diameter = f" Object diameter: {result.diameter.replace(';', ',')}." if result.diameter else ""
    warning = None if result.low_confidence is None else result.low_confidence.detail
    notes = [("⚠ " if note == warning else "") + rephrase(note) for note in result.warnings]
    return "\n\n".join([rephrase(f"{found}.{diameter}"), *notes])


def rephrase(message: str) -> str:
    """Replace the names of parameters of the API in a message by those in the widget."""
    for pattern, words in _WORDS.items():
        message = re.sub(pattern, words, message)
    return message


def describe_seconds(seconds: float | None) -> str:
    """Return an estimated time: `about 40 s`, `about 3 min`, or an empty string if it is unknown."""
    if seconds is None:
        return ""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
