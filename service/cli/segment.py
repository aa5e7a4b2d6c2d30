"""`stackseg segment` segments one file in this process, without a service."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.cli.segmentation.parameters import PARAMETERS, name_options
from service.core.config import Settings


def add_arguments(segment: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg segment`."""
    _add_files(segment)
    for name, (placeholder, text) in PARAMETERS.items():
        segment.add_argument(f"--{name.replace('_', '-')}", metavar=placeholder, help=text)
    _add_results(segment)
    _add_blocks(segment)
    segment.set_defaults(run=run, reword=name_options, extra="zarr")


def _add_files(segment: argparse.ArgumentParser) -> None:
    """Add what is read and where the labels go."""
    segment.add_argument(
        "input",
        type=_parse_input,
        metavar="IN",
        help="TIFF stack, OME-Zarr image (also at a URL: s3, gs, az, http, https), or a folder of TIFFs",
    )
    segment.add_argument(
        "result",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="what to write: OME-TIFF (a name that ends with .tif), OME-Zarr (.zarr, or IMAGE.zarr/labels/NAME), labels"
        " as .npy or .nii.gz, or a folder",
    )
    segment.add_argument("-o", "--out", type=Path, metavar="OUT", help="another way to say OUT (default: none)")
    segment.add_argument(
        "--glob",
        metavar="PATTERN",
        help="which files of the folder IN are stacks, as '**/*.tif' (default: all TIFFs in it, not in its subfolders)",
    )
    segment.add_argument(
        "--format",
        choices=("tiff", "zarr"),
        help="how labels of a folder's stacks are written: OME-TIFF or OME-Zarr (default: tiff)",
    )


def _add_results(segment: argparse.ArgumentParser) -> None:
    """Add what is refused, and what is written besides the labels."""
    segment.add_argument(
        "--strict",
        action="store_true",
        help="fail where the model is not sure of its labels (default: write them, and warn)",
    )
    segment.add_argument(
        "--measurements", type=Path, metavar="CSV", help="also write a table of the objects (default: labels alone)"
    )
    segment.add_argument(
        "--force", action="store_true", help="replace results that are there already (default: refuse to)"
    )


def _add_blocks(segment: argparse.ArgumentParser) -> None:
    """Add the options of block-wise segmentation."""
    segment.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="segment an OME-Zarr of any size block by block, with so many processes (default: as a whole)",
    )
    segment.add_argument(
        "--ray",
        metavar="HOST:PORT",
        help="with --workers: a Ray cluster that has these processes; stack, result and scratch lie on storage that its"
        " hosts mount (default: this host)",
    )
    segment.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="with --workers: what blocks hand on; the same command goes on with it after an interruption (default:"
        " OUT.blocks)",
    )


def _parse_input(text: str) -> Path | str:
    """Return the path of a file or a folder, or the URL of a store."""
    from service.formats.sandbox.remote_store import is_url  # noqa: PLC0415

    return text if is_url(text) else Path(text)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Segment a file, a store or a folder; print what was found and the seconds of each stage."""
    from service.cli.segmentation import source as segment_source  # noqa: PLC0415 - what it imports takes seconds

    return segment_source.run(options, settings)
