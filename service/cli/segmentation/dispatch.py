"""Validate the arguments of `stackseg segment`, and segment a single stack, a folder, or an image block by block."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from service.cli.models import choose_model
from service.cli.segmentation import folder as segment_folder
from service.cli.segmentation import stack as segment_stack
from service.cli.segmentation.parameters import PARAMETERS, format_option
from service.core.config import Settings
from service.core.errors import BadParameter
from service.formats.sandbox.remote_store import RemoteStore
from service.formats.writers import is_zarr
from service.formats.zarr.store import Store, find_labeled_image, is_zarr_folder
from service.serving.parameters import Query, describe_validation_errors

# Suffixes of result files, compared case-insensitively.
_LABEL_SUFFIXES = (".tif", ".tiff", ".npy", ".nii.gz", ".zarr")
_TABLE_SUFFIXES = (".csv",)
# Longest name of a result in bytes. File systems allow 255, and incomplete results have longer names.
MAX_NAME_BYTES = 240


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Segment one file or folder, and print the number of objects and the duration of each stage."""
    query = _parse_query(options)
    if (options.result is None) == (options.out is None):
        raise BadParameter("Specify the result exactly once: stackseg segment IN OUT.")
    options.result = options.result or options.out
    _check_block_options(options, is_zarr_input=isinstance(options.input, Path) and is_zarr_folder(options.input))
    if isinstance(options.input, str):
        with RemoteStore(options.input) as options.input:
            return _run_single_stack(options, query, settings)
    if options.input.is_dir() and not is_zarr_folder(options.input):
        if options.measurements is not None:
            raise BadParameter(
                "--measurements is not supported for a folder. The table is always written to objects.csv in the"
                " results folder."
            )
        return segment_folder.run(options, query, settings)
    for name in ("glob", "format"):
        if getattr(options, name) is not None:
            raise BadParameter(f"--{name} requires a folder of stacks, but {options.input} is not a folder.")
    return _run_single_stack(options, query, settings)


def _run_single_stack(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    """Segment one file, or an open remote store."""
    _check_results(options)
    spec = choose_model(options.model, settings)
    if options.workers is None:
        return segment_stack.run(options, query, spec, settings)
    from service.cli.segmentation import blocks as segment_blocks  # noqa: PLC0415 - requires the `zarr` extra

    return segment_blocks.run(options, query, spec, settings)


def _check_block_options(options: argparse.Namespace, *, is_zarr_input: bool) -> None:
    """Raise BadParameter for --workers without an OME-Zarr folder, and for --ray or --scratch without --workers."""
    if options.workers is not None and not is_zarr_input:
        raise BadParameter(f"--workers requires an OME-Zarr folder, but {options.input} is not one.")
    for name in ("ray", "scratch"):
        if options.workers is None and getattr(options, name) is not None:
            raise BadParameter(f"--{name} requires block-wise segmentation. Set --workers as well.")


def _check_results(options: argparse.Namespace) -> None:
    """Raise BadParameter if a result cannot be written to its path."""
    suffixes = _LABEL_SUFFIXES if options.workers is None else (".zarr",)
    suffixes_by_path: dict[Path, tuple[str, ...]] = {options.result: suffixes}
    if options.measurements is not None:
        if options.measurements.resolve() == options.result.resolve():
            raise BadParameter(
                f"{options.result} cannot be used for labels and measurements at the same time. Choose different names."
            )
        suffixes_by_path[options.measurements] = _TABLE_SUFFIXES
    _check_result_paths(options.input, suffixes_by_path, force=options.force)
    if is_zarr(options.result):
        # Fail before any computation if the `zarr` extra is missing.
        from service.formats.zarr import writer as zarr_writer  # noqa: F401, PLC0415


def _parse_query(options: argparse.Namespace) -> Query:
    """Return the request parameters except the model, which may be a path here. Raises BadParameter."""
    parameter_names = {*PARAMETERS, "format"} - {"model"}
    try:
        parameters = {name: value for name in parameter_names if (value := getattr(options, name)) is not None}
        return Query.model_validate(parameters | ({"strict": True} if options.strict else {}))
    except ValidationError as error:
        raise describe_validation_errors(error.errors(), format_name=format_option) from error


def _check_result_paths(stack: Path | Store, suffixes_by_path: Mapping[Path, tuple[str, ...]], *, force: bool) -> None:
    """Check the paths and suffixes of the results.

    Raises BadParameter if a result cannot be written, would replace the stack, already exists without `force`, or has
    the suffix of a different format.
    """
    for path, suffixes in suffixes_by_path.items():
        is_inside_image = _check_location(path, suffixes)
        if isinstance(stack, Path) and path.exists() and _would_replace(path, stack):
            raise BadParameter(f"{path} would replace the input stack. Choose another name.")
        if not is_inside_image and not path.name.lower().endswith(suffixes):
            raise BadParameter(f"The name {path} must end with {' or '.join(suffixes)}.")
        if path.exists() and not force:
            raise BadParameter(f"{path} already exists. Choose another name, or use --force to replace the file.")


def _check_location(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether the labels are written inside an image. Raises BadParameter if the location is not writable."""
    image = find_labeled_image(path) if ".zarr" in suffixes else None
    folder = image or path.parent
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise BadParameter(
            f"The name {path.name[:20]}... has {len(os.fsencode(path.name))} bytes. Use at most {MAX_NAME_BYTES}."
        )
    if path.is_dir() and not is_zarr_folder(path):
        raise BadParameter(f"{path} is a folder. Specify the name of a file.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise BadParameter(
            f"{path} cannot be written because {folder} is not a writable folder. Create it, or choose another folder."
        )
    return image is not None


def _would_replace(path: Path, stack: Path) -> bool:
    """Return whether writing to a path would replace the stack, including through a link or a parent folder."""
    return path.samefile(stack) or path.resolve() in stack.resolve().parents
