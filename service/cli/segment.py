"""`stackseg segment` segments one file in this process, without a service."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from service.cli.models import choose_model
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.timing import Stages

if TYPE_CHECKING:
    from service.inference.result import Result
    from service.models.spec import ModelSpec
    from service.serving.parameters import Query

# Parameters that the command shares with POST /segment, under the names they have there.
PARAMETERS = (
    "model",
    "channel",
    "time",
    "axes",
    "voxel_size",
    "diameter",
    "skip_below",
    "output",
    "sw_batch_size",
    "overlap",
)


def add_arguments(segment: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg segment`."""
    segment.add_argument("input", type=Path, metavar="IN", help="TIFF stack")
    segment.add_argument("result", type=Path, metavar="OUT", help="OME-TIFF to write")
    for name in PARAMETERS:
        segment.add_argument(f"--{name.replace('_', '-')}", help="as the parameter of POST /segment")
    segment.add_argument("--measurements", type=Path, metavar="CSV", help="also write a table of the objects")
    segment.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Read, segment and write one file; print what was found and the seconds of each stage."""
    from service.formats import tiff_reader, tiff_writer  # noqa: PLC0415
    from service.inference.batcher import open_batcher  # noqa: PLC0415
    from service.inference.measurements import measure, write_csv  # noqa: PLC0415
    from service.inference.segmenter import Segmenter  # noqa: PLC0415

    query = _parse_query(options)
    check_results(options.input, [path for path in (options.result, options.measurements) if path is not None])
    spec = choose_model(query.model, settings)
    stages, limit = Stages(), settings.limits.decoded_bytes
    with tempfile.TemporaryDirectory(prefix="segment-") as scratch, open_batcher(settings) as device:
        with stages.measure("read"):
            volume = tiff_reader.read(options.input, query.selection, limit, Path(scratch))
        with stages.measure("load"):
            segmenter = Segmenter(spec, settings)
            if options.measurements is not None and (kind := segmenter.estimator.output(query.options)) != "labels":
                raise BadParameter(f"--measurements: only labels can be measured, and the result would be {kind}.")
            device.call(segmenter.warm_up)
        result = segmenter.segment(volume, query.options, run=device.run)
        stages.update(result.seconds)
        with stages.measure("write"):
            tiff_writer.write(result.segmentation, options.result)
        if options.measurements is not None:
            with stages.measure("measure"):
                every_channel = replace(query.selection, channel=None)
                volume = tiff_reader.read(options.input, every_channel, limit, Path(scratch))
                write_csv(measure(result.segmentation, volume), options.measurements)
    sys.stdout.writelines(f"{line}\n" for line in _summarise(str(options.result), spec, result, stages))
    return 0


def _summarise(path: str, spec: ModelSpec, result: Result, stages: Stages) -> Iterator[str]:
    """Return the lines that tell what was found and the seconds of each stage."""
    count = result.segmentation.count
    objects = "" if count is None else f"{count} objects, "
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages.seconds.items())
    yield f"{path}: {objects}{spec.identifier} ({times})"
    if result.skipped is not None:
        yield f"skipped: {result.skipped}"
    for note in result.notes:
        yield f"note: {note}"


def _parse_query(options: argparse.Namespace) -> Query:
    """Return the parameters that were given. Raises BadParameter."""
    from service.serving.parameters import Query, explain  # noqa: PLC0415

    try:
        return Query.model_validate(
            {name: value for name in PARAMETERS if (value := getattr(options, name)) is not None}
        )
    except ValidationError as error:
        raise BadParameter(explain(error.errors())) from error


def check_results(stack: Path, results: Sequence[Path]) -> None:
    """Raise BadParameter for a result that could not be written or would replace the stack or another result."""
    for path in results:
        if path.is_dir():
            raise BadParameter(f"{path} is a folder; name the file to write.")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise BadParameter(
                f"{path}: {path.parent} is not a folder that may be written to; make it, or name another."
            )
        if path.exists() and path.samefile(stack):
            raise BadParameter(f"{path} is the stack itself, which would be replaced; choose another name.")
    if len({path.resolve() for path in results}) < len(results):
        raise BadParameter(f"{results[0]} is named for two results; give each a name of its own.")
