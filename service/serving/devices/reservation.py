"""The reservation of a device for one request: the job in the device's queue, and the lease on the model."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.core.types import Extent, Options, Volume
from service.inference.series.time_points import TimePointSegmenter, segment_series
from service.inference.types import Series
from service.serving.devices.models.model import DeviceModel, ProgressCallback, make_resource_needs
from service.serving.devices.queue.job import Job, Progress, ResourceNeeds

if TYPE_CHECKING:
    from service.inference.types import PlannedRequest, Result
    from service.serving.devices.device import Scheduler
    from service.serving.devices.models.cache import Lease
    from service.serving.devices.queue.job_queue import JobQueue


class Reservation:
    """The device that processes a request, and a lease on the model, which ends with the request.

    scheduler   scheduler of the device
    model_name  name of the model
    folder      folder for the labels of a series; None for the system's temporary folder
    request     the request as planned by `estimate_needs`; None if planning failed, as segmenting then raises the error
    """

    def __init__(self, scheduler: Scheduler, model_name: str, folder: Path | None = None) -> None:
        self._scheduler, self._model_name, self._folder = scheduler, model_name, folder
        self._lease: Lease[DeviceModel] | None = None
        self.request: PlannedRequest | None = None
        self._needs: ResourceNeeds | None = None

    @property
    def queue(self) -> JobQueue:
        """The queue of the device."""
        return self._scheduler.queue

    @property
    def is_loading(self) -> bool:
        """Whether the request is waiting for its model."""
        lease = self._lease
        return lease is not None and not lease.model_future.done()

    @property
    def model(self) -> DeviceModel:
        """The loaded model. Available while the job runs."""
        if self._lease is None:
            raise RuntimeError("the model was not requested, or the job has ended")
        return self._lease.model_future.result(timeout=0)

    def request_model(self, job: Job[Any]) -> None:
        """Request the model for a queued job. The job may start after loading, and fails if loading fails."""
        lease = self._lease = self._scheduler.models.cache.lease(self._model_name)
        # If the job has been canceled in the meantime, this ends the lease immediately.
        job.add_done_callback(self._end_lease)
        # Use a weak reference, so that the job does not keep itself and its result alive.
        lease.model_future.add_done_callback(partial(self._after_loading, weakref.ref(job)))

    def estimate_needs(self, volume: Extent, options: Options) -> ResourceNeeds:
        """Return the resources that the request needs. Call this only after the model has been loaded."""
        if self._needs is None:
            try:
                self.request = self.model.estimator.plan_request(volume, options)
                self._needs = make_resource_needs(self.request.estimate)
            except Exception:  # noqa: BLE001 - segmenting raises the error again, which makes the job fail
                self._needs = ResourceNeeds()
        return self._needs

    def segment_series(self, job: Job[Any], series: Series, options: Options) -> Result:
        """Segment the time points of a series in one job, which shares the device like the job of a single volume.

        Raises the same errors as `service.inference.series.time_points.segment_series`.
        """
        model = self.model

        def segment(volume: Volume, options: Options, progress: ProgressCallback) -> Result:
            request = model.estimator.plan_request(volume, options)
            job.update_needs(make_resource_needs(request.estimate))
            return model.segment(job, volume, options, request, progress)

        def record_time_point(time_point: int) -> None:
            job.time_points = Progress(time_point, len(series.times))

        estimate_diameter = partial(model.estimate_diameter, job)
        is_diameter_estimated = model.estimator.plan(options).needs_diameter_estimate
        point_segmenter = TimePointSegmenter(segment, estimate_diameter if is_diameter_estimated else None)
        return segment_series(
            series,
            options,
            point_segmenter,
            self._folder,
            cancelled=job.cancelled,
            on_time_point=record_time_point,
            progress=job.advance,
        )

    def _after_loading(self, job_reference: weakref.ref[Job[Any]], model_future: Future[DeviceModel]) -> None:
        job = job_reference()
        if job is None or model_future.cancelled():
            return
        error = model_future.exception()
        if error is None:
            self.queue.mark_ready(job)
        else:
            job.fail_before_start(error)

    def _end_lease(self, _job: Job[Any]) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()
