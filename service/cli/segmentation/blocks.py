"""`stackseg segment IN.zarr OUT.zarr --workers N`: segment an OME-Zarr image of any size block by block."""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from service.cli.progress import ProgressBar, show_progress
from service.cli.segmentation.stack import check_output, print_result
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter, LowConfidenceResult, StackSegError
from service.core.hardware import host
from service.core.types import Objects, PostprocessingOptions, Segmentation
from service.formats.zarr import writer as zarr_writer  # noqa: F401 (Fails before any computation if the `zarr` extra is missing.)
from service.inference.blockwise import output
from service.inference.blockwise.driver import Driver, Progress, make_plan
from service.inference.blockwise.run_folder import OpenRun, RunFolder, open_run
from service.inference.blockwise.survey import read_high_contrast_windows
from service.inference.blockwise.workers import LocalWorkers, Workers
from service.inference.diameter.advice import Evidence
from service.inference.diameter.confidence import ConfidenceAssessment, assess_objects, calibrate_objects
from service.inference.measurements import write_csv
from service.inference.preprocessing.resample import compute_applied_diameter
from service.inference.types import DiameterEstimate, Result
from service.serving.results.provenance import describe_provenance

if TYPE_CHECKING:
    from service.models.spec import ModelSpec
    from service.serving.parameters import Query

log = logging.getLogger(__name__)

# Names of the steps in the progress bar.
_STEP_NAMES = {
    "count": "reading the image",
    "survey": "surveying",
    "tile": "blocks",
    "region": "linking",
    "join": "joining",
    "holes": "filling holes",
    "objects": "numbering",
    "labels": "writing",
}


def run(options: argparse.Namespace, query: Query, spec: ModelSpec, settings: Settings) -> int:
    """Segment one OME-Zarr image block by block, or resume an interrupted run."""
    _check_options(options)
    start, out = time.monotonic(), options.result.absolute()
    settings = share_threads(settings, options.workers, is_remote=options.ray is not None)
    is_measured = options.measurements is not None
    plan = make_plan(
        options.input,
        query.selection,
        spec,
        query.options,
        settings,
        workers=options.workers,
        measure_objects=is_measured,
    )
    check_output(plan.output, query, is_measured=is_measured)
    folder = RunFolder((options.scratch or out.with_name(f"{out.name}.blocks")).absolute())
    with folder.lock():
        folder.create_or_resume(plan, settings)

        @cache
        def read_result() -> Result:
            return read_result_metadata(folder, spec)

        def describe() -> dict[str, str]:
            result = read_result()
            if result.quality_warning is not None and options.strict:
                raise LowConfidenceResult(
                    f"{result.quality_warning.detail} To write the labels anyway, repeat the command without --strict."
                )
            return describe_provenance(query, result, options.input.name, None)

        with show_progress() as bar, closing(_make_workers(options, settings)) as workers:
            Driver(folder, workers, _make_progress_callback(bar)).run(out, describe)
        if is_measured:
            finished_run = open_run(str(folder.path), has_survey=True)
            objects = calibrate_objects(read_objects(folder), finished_run.spec)
            write_csv(output.collect_table(finished_run, objects), options.measurements)
        result = read_result()
        object_count = f"{folder.read_record('objects')['objects']} objects, " if plan.output == "labels" else ""
        shutil.rmtree(folder.path)
    return print_result(f"{options.result}: {object_count}{spec.identifier} ({time.monotonic() - start:.2f} s)", result)


def share_threads(settings: Settings, worker_count: int, *, is_remote: bool = False) -> Settings:
    """Return settings that divide the cores among the workers, unless the number of threads is configured.

    Remote workers use the number of cores that the cluster assigns to each of them.
    """
    if settings.device.threads:
        return settings
    cores = settings.cluster.cpus if is_remote else host.count_usable_cores() // worker_count
    return override_settings(settings, "device", {"threads": max(int(cores), 1)})


def _make_workers(options: argparse.Namespace, settings: Settings) -> Workers:
    if options.ray is None:
        return LocalWorkers(options.workers)
    from service.serving.devices.cluster.block_workers import ActorWorkers, BlockActor  # noqa: PLC0415
    from service.serving.devices.cluster.ray_cluster import make_actors  # noqa: PLC0415

    return ActorWorkers(make_actors(options.ray, settings.cluster, options.workers, BlockActor))


def _check_options(options: argparse.Namespace) -> None:
    """Raise BadParameter for an invalid number of workers, and ConfigError if Ray cannot be used."""
    if options.workers < 1:
        raise BadParameter("--workers must be at least 1.")
    if options.ray is not None:
        from service.serving.devices.cluster.ray_cluster import check_ray  # noqa: PLC0415

        check_ray()


def _make_progress_callback(bar: ProgressBar) -> Progress:
    def report(step: str, done: int, total: int) -> None:
        if total > 1:
            bar.show_step(_STEP_NAMES[step], done, total)
        elif not done:
            bar.begin_step(_STEP_NAMES[step])

    return report


def assess_confidence(run: OpenRun, estimate: DiameterEstimate | None) -> ConfidenceAssessment:
    """Return the confidence in the labels of a run, and the reason if it is low.

    The apparent object diameter is considered only if it was estimated.
    """
    plan, spec = run.plan, run.spec

    def find_evidence() -> Evidence:
        return Evidence(
            _read_high_contrast_windows(run),
            likely_diameter=None if estimate is None else estimate.likely_diameter,
            used_diameter=compute_applied_diameter(
                plan, spec, plan.diameter if estimate is None else estimate.diameter
            ),
            is_diameter_given=plan.diameter is not None and plan.options.diameter is not None,
            has_postprocessing=plan.options.postprocessing != PostprocessingOptions(),
        )

    return assess_objects(calibrate_objects(read_objects(run.folder), spec), spec, find_evidence)


def _read_high_contrast_windows(run: OpenRun) -> list[Tensor]:
    """Return the windows with the highest contrast.

    If reading fails, return no windows, because the labels are more important than the advice.
    """
    try:
        return read_high_contrast_windows(run)
    except (RuntimeError, MemoryError, OSError, StackSegError) as error:
        log.warning("%s: the reason for the low confidence could not be determined: %s", run.spec.identifier, error)
        return []


def read_objects(folder: RunFolder) -> Objects:
    """Return the statistics of the joined objects, which were collected during decoding."""
    voxel_counts, certainties, peaks = folder.read_array("objects.npy")
    return Objects(voxel_counts.astype(np.int64), certainties.astype(np.float32), peaks.astype(np.float32))


def read_result_metadata(folder: RunFolder, spec: ModelSpec) -> Result:
    """Return the metadata of the result without its pixels."""
    survey = folder.survey
    confidence, quality_warning = None, None
    if folder.find_finished_blocks("objects"):
        confidence, quality_warning = assess_confidence(open_run(str(folder.path)), survey.diameter_estimate)
    no_pixels = np.zeros((0, 0, 0), np.uint8)
    return Result(
        Segmentation(no_pixels, folder.plan.output),
        {},
        survey.notes,
        skipped=survey.skipped,
        spec=spec,
        engine=survey.engine,
        confidence=confidence,
        quality_warning=quality_warning,
        diameter=folder.plan.diameter if survey.diameter_estimate is None else survey.diameter_estimate.diameter,
        is_diameter_estimated=survey.diameter_estimate is not None and survey.diameter_estimate.is_estimated,
    )
