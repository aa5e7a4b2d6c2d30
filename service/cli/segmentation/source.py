"""Choose how `stackseg segment` runs: one stack, the stacks of a folder, or an image block by block."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from service.cli.models import choose_model
from service.cli.segmentation import folder as segment_folder
from service.cli.segmentation import stack as segment_stack
from service.cli.segmentation.parameters import PARAMETERS, spell_option
from service.core.config import Settings
from service.core.errors import BadParameter
from service.formats.sandbox.remote_store import RemoteStore
from service.formats.writers import is_zarr
from service.formats.zarr.store import Store, find_image, is_zarr_folder
from service.serving.parameters import Query, describe_faults

# Ends of the names of results, in any case of letters.
_LABEL_SUFFIXES, _TABLE_SUFFIXES = (".tif", ".tiff", ".npy", ".nii.gz", ".zarr"), (".csv",)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Read, segment and write one file; print what was found and the seconds of each stage."""
    query = _parse_query(options)
    if (options.result is None) == (options.out is None):
        raise BadParameter("Say once where the result goes: stackseg segment IN OUT.")
    options.result = options.result or options.out
    _check_blocks(options, is_folder=isinstance(options.input, Path) and is_zarr_folder(options.input))
    if isinstance(options.input, str):
        with RemoteStore(options.input) as options.input:
            return _run(options, query, settings)
    if options.input.is_dir() and not is_zarr_folder(options.input):
        if options.measurements is not None:
            raise BadParameter("--measurements: the table of a folder is objects.csv among its results.")
        return segment_folder.run(options, query, settings)
    for name in ("glob", "format"):
        if getattr(options, name) is not None:
            raise BadParameter(f"--{name}: {options.input} is not a folder.")
    return _run(options, query, settings)


def _run(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    """Segment one file, or a store that is open."""
    _check_names(options)
    spec = choose_model(options.model, settings)
    if options.workers is None:
        return segment_stack.run(options, query, spec, settings)
    from service.cli.segmentation import blocks as segment_blocks  # noqa: PLC0415 - it needs the extra `zarr`

    return segment_blocks.run(options, query, spec, settings)


def _check_blocks(options: argparse.Namespace, *, is_folder: bool) -> None:
    """Raise BadParameter for --workers with anything but a folder of OME-Zarr, and for what goes with it alone."""
    if options.workers is not None and not is_folder:
        raise BadParameter(f"--workers: {options.input} is no folder of OME-Zarr, which alone is read block by block.")
    for name in ("ray", "scratch"):
        if options.workers is None and getattr(options, name) is not None:
            raise BadParameter(f"--{name}: it is for a run block by block; say --workers, too.")


def _check_names(options: argparse.Namespace) -> None:
    """Raise BadParameter where a result cannot be written under its name."""
    suffixes = _LABEL_SUFFIXES if options.workers is None else (".zarr",)
    results: dict[Path, tuple[str, ...]] = {options.result: suffixes}
    if options.measurements is not None:
        if options.measurements.resolve() == options.result.resolve():
            raise BadParameter(f"{options.result} is named for two results; give each a name of its own.")
        results[options.measurements] = _TABLE_SUFFIXES
    check_results(options.input, results, force=options.force)
    if is_zarr(options.result):
        # Before anything is computed: an extra may be missing.
        from service.formats.zarr import writer as zarr_writer  # noqa: F401, PLC0415


def _parse_query(options: argparse.Namespace) -> Query:
    """Return the parameters that were given but the model, which may be a path here. Raises BadParameter."""
    names = {*PARAMETERS, "format"} - {"model"}
    try:
        given = {name: value for name in names if (value := getattr(options, name)) is not None}
        return Query.model_validate(given | ({"strict": True} if options.strict else {}))
    except ValidationError as error:
        raise describe_faults(error.errors(), spell=spell_option) from error


def check_results(stack: Path | Store, results: Mapping[Path, tuple[str, ...]], *, force: bool) -> None:
    """Check results and the ends that their names may have.

    Raises BadParameter for one that could not be written, would replace the stack, is there already unless `force`, or
    would be called what it is not.
    """
    for path, suffixes in results.items():
        is_inside_image = _check_place(path, suffixes)
        if isinstance(stack, Path) and path.exists() and _would_replace(path, stack):
            raise BadParameter(f"{path} is the stack itself, which would be replaced; choose another name.")
        if not is_inside_image and not path.name.lower().endswith(suffixes):
            raise BadParameter(f"{path}: the name must end with {' or '.join(suffixes)}, after what is written.")
        if path.exists() and not force:
            raise BadParameter(f"{path} is there already; choose another name, or replace it with --force.")


def _check_place(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether labels get their place inside an image. Raises BadParameter where nothing can be written."""
    image = find_image(path) if ".zarr" in suffixes else None
    folder = image or path.parent
    if path.is_dir() and not is_zarr_folder(path):
        raise BadParameter(f"{path} is a folder; name the file to write.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise BadParameter(f"{path}: {folder} is not a folder that may be written to; make it, or name another.")
    return image is not None


def _would_replace(path: Path, stack: Path) -> bool:
    """Return whether a path is that of the stack, by whichever name, or of a folder that the stack lies in."""
    return path.samefile(stack) or path.resolve() in stack.resolve().parents
