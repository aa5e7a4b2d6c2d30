"""`stackseg segment`: segment files in this process, without a running service."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.cli.options import integer
from service.cli.segmentation.parameters import PARAMETERS, use_option_names
from service.core.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg segment`."""
    _add_file_arguments(parser)
    for name, (placeholder, help_text) in PARAMETERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=placeholder, help=help_text)
    _add_result_options(parser)
    _add_block_options(parser)
    parser.set_defaults(run=run, reword=use_option_names, extra="zarr")


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for input and output files."""
    parser.add_argument(
        "input",
        type=_parse_input,
        metavar="IN",
        help="File in a supported format, OME-Zarr image (a folder, or an s3, gs, az, http or https URL), or folder of"
        " stacks",
    )
    parser.add_argument(
        "result",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="Result: OME-TIFF (.tif), OME-Zarr (.zarr, or IMAGE.zarr/labels/NAME for labels inside an image),"
        " labels as .npy or .nii.gz, or a folder if IN is a folder of stacks",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="OUT",
        help="Path of the result, instead of the positional argument OUT (default: none)",
    )
    parser.add_argument(
        "--glob",
        metavar="PATTERN",
        help="Glob pattern for the stacks in the folder IN, for example '**/*.tif', which does not follow"
        " links to folders (default: all files and OME-Zarr images with a supported format in the folder, but not in"
        " its subfolders)",
    )
    parser.add_argument(
        "--format",
        choices=("tiff", "zarr"),
        help="Format of the labels if IN is a folder of stacks: OME-TIFF or OME-Zarr (default: tiff)",
    )


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for warnings, measurements and existing results."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="Fail if confidence in the labels is low (default: write the labels and print a warning)",
    )
    parser.add_argument(
        "--measurements",
        type=Path,
        metavar="CSV",
        help="Also write a table of object measurements to this CSV file (default: no table)",
    )
    parser.add_argument(
        "--force", action="store_true", help="Overwrite existing results (default: fail if a result exists)"
    )


def _add_block_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of block-wise segmentation."""
    parser.add_argument(
        "--workers",
        type=integer,
        metavar="N",
        help="Segment an OME-Zarr image of any size block by block with this number of processes (default: segment the"
        " image in one piece)",
    )
    parser.add_argument(
        "--ray",
        metavar="HOST:PORT",
        help="Run the processes of --workers on the Ray cluster at this address; the stack, the result and the"
        " scratch folder must be on storage that all hosts of the cluster mount (default: run on this host)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="Folder for the intermediate results of block-wise segmentation; to resume an interrupted run, repeat"
        " the command (default: OUT.blocks)",
    )


def _parse_input(text: str) -> Path | str:
    """Return a URL as a string, and anything else as a path. Raises ArgumentTypeError for pipes."""
    if text == "-":
        raise argparse.ArgumentTypeError(
            "the standard input is not supported. Write the stack to a file, or send it to a running service:"
            " curl --data-binary @- -H 'Content-Type: image/tiff' http://localhost:8000/segment -o labels.ome.tif"
        )
    if Path(text).is_fifo():
        raise argparse.ArgumentTypeError(f"{text} is a pipe. Write the stack to a file first.")
    from service.formats.sandbox.remote_store import is_url  # noqa: PLC0415

    return text if is_url(text) else Path(text)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Segment a file, a store or a folder, and print the number of objects and the seconds of each stage."""
    from service.cli.segmentation import dispatch  # noqa: PLC0415 - its imports take several seconds

    return dispatch.run(options, settings)
