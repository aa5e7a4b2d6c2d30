"""Plan of a block-wise run: what is checked before anything is computed."""

from __future__ import annotations

from pathlib import Path

from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.quantities import TimeRange
from service.core.types import Options, Selection
from service.formats import stack_reader
from service.inference.blockwise.layout import Layout, choose_windows
from service.inference.blockwise.run_folder import RunPlan, lift_limit
from service.inference.decoding.block_kernel import block_kernel
from service.inference.decoding.steering import steer
from service.inference.preprocessing.resample import working_size
from service.inference.runner.estimator import Estimator
from service.models.spec import Instances, ModelSpec


def make_plan(  # noqa: PLR0913
    source: Path,
    selection: Selection,
    spec: ModelSpec,
    options: Options,
    settings: Settings,
    *,
    workers: int,
    measured: bool = False,
) -> RunPlan:
    """Plan a run for so many workers, in which objects may be `measured`.

    Raises BadParameter for what is not done block by block, and what the header of the image tells already.
    """
    source = source.resolve()
    if isinstance(selection.time, TimeRange):
        raise BadParameter("time: one time point is segmented block by block; say which, as time=0.")
    if settings.windows.inferer != "own":
        raise BadParameter("windows.inferer: MONAI's has the scores of the whole volume in memory; leave it out.")
    if options.roi_size is not None:
        raise BadParameter("roi_size: the model's own window is taken block by block; leave it out.")
    with stack_reader.open_blocks(source, selection) as stack:
        description = stack.describe(selection)
    if description.problem:
        raise BadParameter(description.problem)
    plan = Estimator(spec, lift_limit(settings)).plan_request(description, options).plan
    size = working_size(description, spec, plan.diameter)
    decoding = steer(spec, plan.steering, description, size).decoding
    _check_decoding(decoding, plan.output)
    overlap, roi, (_, z, y, x) = plan.overlap, spec.input.roi_size, description.shape
    margin = 1 + decoding.smoothing if isinstance(decoding, Instances) and plan.output == "labels" else 0
    layout = Layout(size, roi, overlap, choose_windows(size, roi, overlap, workers, (z, y, x)), margin)
    return RunPlan(
        source,
        _stamp(source),
        selection,
        spec.folder.resolve(),
        spec.weights.sha256,
        settings.engine.model_dump_json() + settings.windows.model_dump_json(),
        options,
        plan.output,
        layout,
        description.shape,
        description.voxel_size,
        plan.diameter,
        workers,
        measured,
    )


def _check_decoding(decoding: object, output: str) -> None:
    if output == "probabilities":
        raise BadParameter("output: labels and classes are written block by block, probabilities are not.")
    if output != "labels" or not isinstance(decoding, Instances):
        return
    if decoding.holes == "fill":
        raise BadParameter("fill_holes: holes of objects are not filled block by block; say fill_holes=false.")
    if not block_kernel.ready:
        raise BadParameter(f"Labels are not decoded block by block: {block_kernel.problem}.")


def _stamp(source: Path) -> str:
    """Return what changes when the image is written again: the times of its metadata."""
    files = sorted(path for path in source.glob("*") if path.is_file())
    return " ".join(f"{path.name}:{path.stat().st_mtime_ns}" for path in files)
