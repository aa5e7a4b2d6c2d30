"""The parameters of a request as options of `stackseg segment`."""

from __future__ import annotations

import re

from service.core.errors import StackSegError

# Parameters that the command shares with POST /segment, under the names they have there: placeholder and help.
PARAMETERS = {
    "model": (
        "MODEL",
        "name of a model, or a model's folder (default: nuclei, or models.default of the configuration)",
    ),
    "channel": (
        "CHANNEL",
        "index from 0, name, or all where the model takes as many (default: the only one, or all where the model takes"
        " as many)",
    ),
    "time": (
        "INDEX",
        "time point, from 0; all, or a range without its end as 2:5, for one result with an axis T (default: the only"
        " time point)",
    ),
    "link": (
        "HOW",
        "of several time points: overlap gives each object one number through time (default: numbers of their own at"
        " each)",
    ),
    "axes": ("AXES", "one letter of TZCYXS per stored dimension, as in ZCYX (default: what the file says)"),
    "voxel_size": ("Z,Y,X", "voxel size in micrometres, as in 0.5,0.2,0.2 (default: what the file says)"),
    "diameter": (
        "WIDTH",
        "how wide objects are: 15px, 7,15,15px (along z, y, x), 6.5um; auto estimates it, none uses the stack as it is"
        " sampled (default: auto where the model's file says so, as those of nuclei and membranes do, else none)",
    ),
    "skip_below": (
        "GREY",
        "do not compute windows in which nothing is brighter; auto: than the background, none: compute all (default:"
        " none, or windows.skip_below of the configuration)",
    ),
    "threshold": (
        "PROBABILITY",
        "of foreground above which a voxel belongs to an object; higher: smaller and fewer objects (default: what the"
        " model's file says, 0.6 for nuclei)",
    ),
    "minimum_size": (
        "SIZE",
        "drop objects of fewer voxels of the stack, or less volume: 60, 12.5um3 (default: what the model's file says,"
        " for nuclei a 64th of a whole object)",
    ),
    "border": (
        "keep|drop",
        "whether objects stay that touch a face of the stack, where they may be cut (default: what the model's file"
        " says, keep for nuclei)",
    ),
    "fill_holes": (
        "true|false",
        "whether background inside of one object becomes part of it (default: what the model's file says, false for"
        " nuclei)",
    ),
    "min_confidence": (
        "PROBABILITY",
        "drop objects whose voxels have a lower mean probability of foreground (default: what the model's file says,"
        " 0.8 for nuclei)",
    ),
    "output": (
        "KIND",
        "labels, classes or probabilities (default: labels where the model tells objects apart, else classes)",
    ),
    "sw_batch_size": (
        "N",
        "windows per call of the network (default: what suits the device, or windows.sw_batch_size)",
    ),
    "roi_size": (
        "Z,Y,X",
        "window in voxels, for models that take others than their own, as 96,96,96 (default: what the model's file"
        " says, 64,64,64 for nuclei)",
    ),
    "quality": (
        "fast|best",
        "best scores every window in three views that overlap by half, for some ten times the time (default: fast)",
    ),
    "overlap": (
        "SHARE",
        "share of a window that it has in common with the next (default: 0.25, or windows.overlap of the"
        " configuration)",
    ),
}
# A parameter with its value, as sentences mention it.
_ASSIGNMENT = re.compile(rf"\b({'|'.join(PARAMETERS)})=([\w'\"-]?)")


def name_options(message: str | StackSegError) -> str:
    """Return a message with the options of the command in place of the parameters of a request."""
    text, parameter = str(message), message.parameter if isinstance(message, StackSegError) else None
    if parameter is not None and text.startswith(f"{parameter}: "):
        text = spell_option(parameter) + text.removeprefix(parameter)
    return _ASSIGNMENT.sub(lambda found: f"{spell_option(found[1])}{' ' if found[2] else ''}{found[2]}", text)


def spell_option(parameter: str) -> str:
    """Return the option that has a parameter; parameters that the command lacks keep their names."""
    return f"--{parameter.replace('_', '-')}" if parameter in PARAMETERS else parameter
