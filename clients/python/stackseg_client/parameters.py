"""Parameters of a segmentation, and their encoding for a query string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class Parameters(TypedDict, total=False):
    """Parameters of a segmentation. `docs/api.md` of StackSeg describes their values and defaults.

    model             name of a model
    channel           zero-based index, name, or `all` for models with several channels
    scene             name or zero-based index of one of several images in the file
    time              zero-based index, `all`, or a range that excludes its end: `2:5`
    link              track objects: `overlap` or `laptrack`
    axes              one letter of TZCYXS per dimension of the stored array
    voxel_size        Z, Y and X in micrometers, such as `(0.5, 0.2, 0.2)`
    allow_incomplete  whether to read a file with missing planes
    diameter          object diameter: `15px`, `7,15,15px`, `6.5um`, `auto` or `none`
    threshold         minimum foreground probability of object voxels, 0 to 1
    minimum_size      remove smaller objects: `60` voxels or `12.5um3`
    border            `keep` or `drop` objects that touch a face of the stack
    fill_holes        whether to fill background enclosed by one object
    min_confidence    remove objects with a lower mean foreground probability
    output            `labels`, `classes`, or `probabilities`
    strict            whether to refuse results with low confidence
    quality           `best` is slower
    skip_below        skip windows without voxels brighter than this gray value; or `auto`, `none`
    overlap           overlap of neighboring windows as a fraction
    sw_batch_size     windows per forward pass
    roi_size          window size Z, Y, X
    stack             id of an uploaded stack, instead of the first argument
    input             path of a file or folder on the host of the server, instead of the first argument
    output_to         path on the host of the server where the result is saved
    overwrite         with `output_to`: whether to replace an existing file
    glob              with a folder as `input`: which stacks to segment
    format            with a folder as `input`: write labels as `tiff` or `zarr`
    """

    model: str
    channel: int | str
    scene: int | str
    time: int | str
    link: Literal["overlap", "laptrack"]
    axes: str
    voxel_size: Sequence[float] | str
    allow_incomplete: bool
    diameter: str
    threshold: float
    minimum_size: int | str
    border: Literal["keep", "drop"]
    fill_holes: bool
    min_confidence: float
    output: Literal["labels", "classes", "probabilities"]
    strict: bool
    quality: Literal["fast", "best"]
    skip_below: float | str
    overlap: float
    sw_batch_size: int
    roi_size: Sequence[int] | str
    stack: str
    input: str
    output_to: str
    overwrite: bool
    glob: str
    format: Literal["tiff", "zarr"]


def encode_parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters as strings, without those that are None. The server checks their names and values."""
    return {name: _encode(value) for name, value in parameters.items() if value is not None}


def _encode(value: Any) -> str:
    if isinstance(value, str):
        return value
    # A comparison instead of a type check, because NumPy has its own booleans.
    if value is True or value is False or type(value).__name__ == "bool":
        return "true" if value else "false"
    if hasattr(value, "__iter__"):
        return ",".join(map(_encode, value))
    return str(value)
