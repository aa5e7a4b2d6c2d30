"""`stackseg segment` segments one file in this process, without a service."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from service.cli.models import choose_model
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.timing import Stages
from service.core.whole_file import write_whole

if TYPE_CHECKING:
    from service.core.types import OutputKind, Segmentation
    from service.formats.zarr.store import Store
    from service.inference.runner.estimator import Estimator
    from service.inference.types import Result
    from service.models.spec import ModelSpec
    from service.serving.parameters import Query

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
# Ends of the names of results, in any case of letters.
_LABEL_SUFFIXES, _TABLE_SUFFIXES = (".tif", ".tiff", ".npy", ".nii.gz", ".zarr"), (".csv",)
_NAMES = "|".join(PARAMETERS)
# A parameter as messages speak of it: with its value, or before what is wrong with it.
_PARAMETER = re.compile(rf"\b({_NAMES})=([\w'\"-]?)|(?:^|(?<=\. ))({_NAMES})(?=: )")


def add_arguments(segment: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg segment`."""
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
    for name, (placeholder, text) in PARAMETERS.items():
        segment.add_argument(f"--{name.replace('_', '-')}", metavar=placeholder, help=text)
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
    segment.set_defaults(run=run, reword=name_options, extra="zarr")


def name_options(text: str) -> str:
    """Return a message with the options of the command in place of the parameters of a request."""
    return _PARAMETER.sub(
        lambda found: f"--{(found[1] or found[3]).replace('_', '-')}{' ' if found[2] else ''}{found[2] or ''}", text
    )


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Read, segment and write one file; print what was found and the seconds of each stage."""
    from service.formats.sandbox.remote_store import RemoteStore  # noqa: PLC0415
    from service.formats.zarr.store import is_zarr_folder  # noqa: PLC0415

    query = _parse_query(options)
    if (options.result is None) == (options.out is None):
        raise BadParameter("Say once where the result goes: stackseg segment IN OUT.")
    options.result = options.result or options.out
    _check_blocks(options, is_folder=isinstance(options.input, Path) and is_zarr_folder(options.input))
    if isinstance(options.input, str):
        with RemoteStore(options.input) as options.input:
            return _run(options, query, settings)
    if options.input.is_dir() and not is_zarr_folder(options.input):
        return _run_folder(options, query, settings)
    for name in ("glob", "format"):
        if getattr(options, name) is not None:
            raise BadParameter(f"--{name}: {options.input} is not a folder.")
    return _run(options, query, settings)


def _run(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    """Segment one file, or a store that is open."""
    from service.cli import segment_series  # noqa: PLC0415
    from service.cli.progress import show_progress  # noqa: PLC0415
    from service.formats import stack_reader  # noqa: PLC0415
    from service.inference.batching.batcher import open_batcher  # noqa: PLC0415
    from service.inference.measurements import measure, write_csv  # noqa: PLC0415
    from service.inference.runner.estimator import Estimator  # noqa: PLC0415
    from service.inference.runner.model_runner import ModelRunner  # noqa: PLC0415
    from service.serving.results.provenance import describe_origin, hash_file  # noqa: PLC0415

    _check_names(options)
    spec = choose_model(options.model, settings)
    if options.workers is not None:
        from service.cli import segment_blocks  # noqa: PLC0415

        return segment_blocks.run(options, query, spec, settings)
    stages, limit = Stages(), settings.limits.decoded_bytes
    with (
        tempfile.TemporaryDirectory(prefix="segment-") as scratch,
        open_batcher(settings) as device,
        show_progress() as bar,
    ):
        bar.begin("reading")
        with stages.measure("read"):
            measured = options.measurements is not None
            _check_header(options, query, Estimator(spec, settings), limit)
            volume = segment_series.read(options.input, query, limit, Path(scratch), measured=measured)
        bar.begin(f"loading {spec.identifier}")
        with stages.measure("load"):
            runner = ModelRunner(spec, settings)
            device.call(runner.warm_up)
        bar.begin("windows")
        result = segment_series.segment(volume, query.options, runner, device, Path(scratch), bar)
        stages.update(result.seconds)
        bar.begin("writing")
        with stages.measure("write"):
            digest = hash_file(options.input) if isinstance(options.input, Path) else None
            origin = describe_origin(query, result, options.input.name, digest)
            _write(result.segmentation, options.result, origin)
        if options.measurements is not None:
            with stages.measure("measure"):
                table = result.series.table if result.series else None
                if table is None:
                    every_channel = replace(query.selection, channel=None)
                    table = measure(
                        result.segmentation, stack_reader.read(options.input, every_channel, limit, Path(scratch))
                    )
                write_csv(table, options.measurements)
    sys.stdout.writelines(f"{line}\n" for line in _summarise(str(options.result), spec, result, stages))
    return _warn(result)


def _parse_input(text: str) -> Path | str:
    """Return the path of a file or a folder, or the URL of a store."""
    from service.formats.sandbox.remote_store import is_url  # noqa: PLC0415

    return text if is_url(text) else Path(text)


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
    if _is_zarr(options.result):
        # Before anything is computed: an extra may be missing.
        from service.formats.zarr import writer as zarr_writer  # noqa: F401, PLC0415


def _warn(result: Result) -> int:
    """Say on stderr what is wrong with a result; return the exit status."""
    if result.doubt is not None:
        sys.stderr.write(f"stackseg: warning: {name_options(result.doubt.detail)}\n")
    if result.series is None or result.series.fault is None:
        return 0
    sys.stderr.write(f"stackseg: {name_options(str(result.series.fault))}\n")
    return 1


def _check_header(options: argparse.Namespace, query: Query, estimator: Estimator, limit_bytes: int) -> None:
    """Raise what the options and the header of the file tell already, which need not wait for pixels and weights."""
    from service.formats import stack_reader  # noqa: PLC0415

    kind = estimator.output(query.options)
    check_output(kind, query, measured=options.measurements is not None)
    _check_form(kind, query, options.result)
    description = stack_reader.inspect(options.input, query.selection, limit_bytes)
    if not description.problem:
        estimator.plan_request(description, query.options)


def check_output(kind: OutputKind, query: Query, *, measured: bool) -> None:
    """Raise BadParameter where the objects of a result would be asked for that has none."""
    if kind != "labels" and measured:
        raise BadParameter(f"--measurements: only labels can be measured, and the result would be {kind}.")
    if kind != "labels" and query.link is not None:
        raise BadParameter(f"--link: only labels have objects to link, and the result would be {kind}.")


def _check_form(kind: OutputKind, query: Query, path: Path) -> None:
    """Raise BadParameter for a result that the form which its name asks for cannot hold."""
    from service.core.quantities import TimeRange  # noqa: PLC0415

    if _is_tiff(path) or _is_zarr(path):
        return
    if kind == "probabilities" or isinstance(query.selection.time, TimeRange):
        raise BadParameter(
            f"{path}: only TIFF and OME-Zarr hold probabilities, or several time points; call it .tif or .zarr."
        )


def _is_tiff(path: Path) -> bool:
    return path.name.lower().endswith((".tif", ".tiff"))


def _is_zarr(path: Path) -> bool:
    from service.formats.zarr.store import find_image  # noqa: PLC0415

    return path.name.lower().endswith(".zarr") or find_image(path) is not None


def _write(segmentation: Segmentation, path: Path, origin: Mapping[str, str]) -> None:
    """Write a result in the form that its name asks for."""
    from service.core.types import Volume  # noqa: PLC0415
    from service.formats import array_writer  # noqa: PLC0415
    from service.formats.tiff import writer as tiff_writer  # noqa: PLC0415

    if _is_tiff(path):
        tiff_writer.write(segmentation, path, origin)
        return
    if _is_zarr(path):
        from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415

        zarr_writer.write(segmentation, path, origin)
        return
    write = array_writer.write_npy if path.name.lower().endswith(".npy") else array_writer.write_nifti
    volume = Volume.from_array(segmentation.pixels[None], segmentation.voxel_size)
    with write_whole(path) as partial:
        write(volume, partial)


def _run_folder(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    from service.cli import segment_folder  # noqa: PLC0415

    if options.measurements is not None:
        raise BadParameter("--measurements: the table of a folder is objects.csv among its results.")
    return segment_folder.run(options, query, settings)


def _summarise(path: str, spec: ModelSpec, result: Result, stages: Stages) -> Iterator[str]:
    """Return the lines that tell what was found and the seconds of each stage."""
    count = result.segmentation.count
    objects = "" if count is None else f"{count} objects, "
    if result.series is not None:
        objects += f"{result.series.points} of {result.series.total} time points, "
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages.seconds.items())
    yield f"{path}: {objects}{spec.identifier} ({times})"
    if result.skipped is not None:
        yield f"skipped: {result.skipped}"
    if result.confidence is not None:
        yield f"confidence: {result.confidence:.2f}"
    for note in result.notes:
        yield f"note: {name_options(note)}"


def _parse_query(options: argparse.Namespace) -> Query:
    """Return the parameters that were given but the model, which may be a path here. Raises BadParameter."""
    from service.serving.parameters import Query, explain  # noqa: PLC0415

    names = {*PARAMETERS, "format"} - {"model"}
    try:
        given = {name: value for name in names if (value := getattr(options, name)) is not None}
        return Query.model_validate(given | ({"strict": True} if options.strict else {}))
    except ValidationError as error:
        raise BadParameter(explain(error.errors())) from error


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
    from service.formats.zarr.store import find_image, is_zarr_folder  # noqa: PLC0415

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
