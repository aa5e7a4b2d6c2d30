"""Request parameters as options of `stackseg segment`."""

from __future__ import annotations

import re

from service.core.errors import StackSegError

# Parameters that the command shares with POST /segment, by their names in the API: placeholder and help text.
PARAMETERS = {
    "model": (
        "MODEL",
        "Name or folder of the model (default: the models.default setting, or 'nuclei' if it is not set)",
    ),
    "channel": (
        "CHANNEL",
        "Name or zero-based index of the channel, or 'all' if the model has several input channels (default: the only"
        " channel, or 'all' if the model has as many input channels as the file has channels)",
    ),
    "scene": (
        "SCENE",
        "Name or zero-based index of the image in a file with several images, such as fields of view (default: the only"
        " image; the largest image of an OME-TIFF)",
    ),
    "time": (
        "INDEX",
        "Zero-based index of one time point; 'all', or a range such as 2:5 (end excluded), selects a time series"
        " (default: the only time point)",
    ),
    "link": (
        "METHOD",
        "Link objects across time points, so that each object keeps its label: 'overlap' links the objects that share"
        " the most voxels, and 'laptrack' minimizes the total movement (default: objects are not linked)",
    ),
    "axes": (
        "AXES",
        "Axes of the stored array, one letter of TZCYXS per dimension, for example ZCYX (default: the axes in the"
        " metadata of the file)",
    ),
    "voxel_size": (
        "Z,Y,X",
        "Voxel size in micrometers, for example 0.5,0.2,0.2 (default: the voxel size in the metadata of the file)",
    ),
    "allow_incomplete": (
        "true|false",
        "Read files that have fewer planes than their metadata declares (default: 'false')",
    ),
    "diameter": (
        "DIAMETER",
        "Object diameter, for example 15px, 6.5um, or 7,15,15px along z, y, x; 'auto' estimates the diameter, and"
        " 'none' processes the stack at its original resolution (default: the model's setting; 'auto' for the models"
        " nuclei, embryos and membranes)",
    ),
    "skip_below": (
        "INTENSITY",
        "Skip windows that have no voxel brighter than this value; 'auto' uses the background level, and 'none'"
        " processes all windows (default: the windows.skip_below setting, or 'none' if it is not set)",
    ),
    "threshold": (
        "PROBABILITY",
        "Minimum foreground probability of object voxels; higher values give smaller and fewer objects (default: the"
        " model's setting; 0.55 for the model nuclei)",
    ),
    "minimum_size": (
        "SIZE",
        "Minimum object size, in voxels or as a volume, for example 60 or 12.5um3; smaller objects are removed"
        " (default: the model's setting; 1/64 of the volume of a typical object for the model nuclei)",
    ),
    "border": (
        "keep|drop",
        "Keep or drop objects that touch a face of the stack and may therefore be incomplete (default: the model's"
        " setting; 'keep' for the model nuclei)",
    ),
    "fill_holes": (
        "true|false",
        "Fill holes inside objects (default: the model's setting; 'false' for the model nuclei)",
    ),
    "min_confidence": (
        "PROBABILITY",
        "Remove objects whose mean foreground probability is lower than this (default: the model's setting; 0.8 for"
        " the model nuclei)",
    ),
    "output": (
        "TYPE",
        "Type of the result: 'labels', 'classes' or 'probabilities' (default: 'labels' if the model separates objects,"
        " otherwise 'classes')",
    ),
    "sw_batch_size": (
        "N",
        "Number of windows per batch (default: the windows.sw_batch_size setting, or a number chosen for the device)",
    ),
    "roi_size": (
        "Z,Y,X",
        "Window size in voxels, for example 96,96,96, if the model allows sizes other than its own (default: the"
        " model's setting; 64,64,64 for the model nuclei)",
    ),
    "quality": (
        "fast|best",
        "Trade-off between speed and quality: 'best' uses windows that overlap by half, averages the scores of each"
        " window and two mirror images of it, and takes about ten times as long as 'fast' (default: 'fast')",
    ),
    "overlap": (
        "FRACTION",
        "Overlap of neighboring windows as a fraction of the window (default: the windows.overlap setting, or 0.25"
        " if it is not set)",
    ),
}
# Assignment of a parameter in a message, such as time=0.
_ASSIGNMENT = re.compile(rf"\b({'|'.join(PARAMETERS)})=([\w'\"-]?)")


def use_option_names(message: str | StackSegError) -> str:
    """Replace request parameters in a message with the options of the command, for example `time=0` with `--time 0`."""
    text, parameter = str(message), message.parameter if isinstance(message, StackSegError) else None
    if parameter is not None and text.startswith(f"{parameter}: "):
        text = format_option(parameter) + text.removeprefix(parameter)
    return _ASSIGNMENT.sub(lambda match: f"{format_option(match[1])}{' ' if match[2] else ''}{match[2]}", text)


def format_option(parameter: str) -> str:
    """Return the option for a parameter. Parameters without an option keep their names."""
    return f"--{parameter.replace('_', '-')}" if parameter in PARAMETERS else parameter
