"""One device with its threads, its queue and the models that are loaded there."""

from __future__ import annotations

import contextvars
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from service.core import hardware, host
from service.core.config import Settings
from service.core.errors import BrokenModel, OutOfMemory, UnknownModel
from service.core.hardware import Driver, is_out_of_memory
from service.core.progress import Progress as LoadingProgress
from service.core.types import Extent, Options, Volume
from service.engine.compile import torch_compile
from service.inference.batching.batcher import WindowBatcher, make_batcher
from service.inference.batching.window_request import Share
from service.inference.runner.callbacks import RunWindows
from service.inference.runner.estimator import Estimator, default_batch_size, default_streams
from service.inference.series.time_points import PointSegmenter, Series, segment_series
from service.inference.types import Estimate, PlannedRequest, Result, Sizing
from service.models.repository import check_weights
from service.models.spec import ModelSpec
from service.serving.devices.job import FreeMemory, Job, Needs, Progress
from service.serving.devices.model_cache import Lease, LoadedModel, ModelCache, too_large_message
from service.serving.devices.queue import JobQueue, JobThreads
from service.serving.devices.segmenter import Segmenter
from service.serving.devices.watchdog import Watchdog
from service.serving.metrics import Metrics

# A model on a CPU may have its weights as in the file, prepared, and packed by an engine.
WEIGHT_COPIES = 3
# For a model that was never loaded.
ASSUMED_LOAD_SECONDS = 10.0
# Requests that run on a GPU at the same time: one is prepared, the windows of another are computed, and the labels of
# two more are decoded and written.
JOBS_BESIDE_A_GPU = 4
# How old the answer may be that tells free memory.
FREE_MEMORY_SECONDS = 0.02

log = logging.getLogger(__name__)

LoadSegmenter = Callable[[ModelSpec, Settings, Driver], Segmenter]


class DeviceWorker:
    """The owner of one device's threads. Models become ready one after the other after `start` returned.

    name          None for the only device
    settings      with `device.name` for this device
    load          makes a segmenter of a model
    loading_lock  held while a model is loaded; all devices share one
    driver        tells about the device
    device        computes windows; None: threads of this process
    engines       how each model runs here that was loaded at some time, by its name
    loading       progress of each model that is being loaded here, by its name
    Raises ConfigError for a device that does not exist.
    """

    # Whether it is on another host, and the service does without it as long as it has another one.
    is_remote = False

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        name: str | None,
        settings: Settings,
        load: LoadSegmenter,
        metrics: Metrics,
        loading_lock: torch_compile.LoadingLock,
        driver: Driver = hardware,
        device: WindowBatcher | None = None,
    ) -> None:
        torch_device = hardware.choose_device(settings.device.name)
        limits = settings.limits
        at_once = min(limits.at_once, limits.waiting + 1)
        self.settings = settings
        self.name = name or str(torch_device)
        self._driver, self._on_host = driver, driver.is_on_host(torch_device)
        # Held while a thread asks the device whether it works.
        self._probing = threading.Lock()
        self._torch_device = torch_device
        self._load_segmenter = load
        self._metrics = metrics
        self._specs: dict[str, ModelSpec] = {}
        # Models that take the place of those in `_specs` once they are loaded.
        self._renewed: dict[str, ModelSpec] = {}
        self._load_seconds: dict[str, float] = {}
        self.engines: dict[str, str] = {}
        self.loading: dict[str, LoadingProgress] = {}
        self._estimators: dict[str, Estimator] = {}
        self.queue = JobQueue(
            limits.waiting,
            at_once,
            self._free_memory,
            FREE_MEMORY_SECONDS,
            shared=len(settings.access.keys) > 1,
            always=1 if self._on_host else JOBS_BESIDE_A_GPU,
        )
        self.model_cache: ModelCache[Segmenter] = ModelCache(
            settings.models.memory_bytes,
            self._load,
            guess=self._guess_bytes,
            unloaded=self._unloaded,
            lock=loading_lock,
        )
        self._device = device or make_batcher(settings, torch_device, on_host=self._on_host)
        # One thread of torch each: those of many requests would spin while they wait, on cores that the network needs.
        self._job_threads = JobThreads("request", self.queue.take, at_once, partial(hardware.use_threads, 1))
        self.watchdog = Watchdog(
            lambda: self._device.pulse,
            lambda: self._device.alive,
            batch_seconds=settings.watchdog.batch_seconds,
            grace_seconds=settings.watchdog.grace_seconds,
            device="the device" if name is None else f"the device {name}",
        )

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""
        self._specs.update(specs)
        self._device.start()
        self.model_cache.start(first)
        self._job_threads.start()
        self.watchdog.start()

    def renew(self, spec: ModelSpec, *, load: bool, keep: bool) -> None:
        """Serve a model in place of the earlier one of its name, if there is one; wait until it is loaded if `load`.

        Where the earlier one is kept and the new one cannot be loaded, all is as it was. Raises the error of loading.
        """
        if not load:
            # Never without one of them: a request in between would find that the model is gone.
            self._specs[spec.name] = spec
            self._drop(spec.name)
            return
        self._renewed[spec.name] = spec
        self.model_cache.reload(spec.name, keep=keep).result()

    def serve(self, name: str, spec: ModelSpec) -> None:
        """Serve one more model by this name; one that is served by it stays loaded as it is."""
        self._specs[name] = spec

    def forget(self, name: str) -> None:
        """Serve a model no longer. Requests that use it keep it."""
        self._specs.pop(name, None)
        self._drop(name)

    def _drop(self, name: str) -> None:
        self.model_cache.forget(name)
        self._estimators.pop(name, None)
        self.engines.pop(name, None)

    def cancel_requests(self) -> None:
        """Accept no more requests, and cancel those that wait or run."""
        self.queue.close()
        self.queue.cancel_all()

    def stop(self, seconds: float) -> bool:
        """End the threads after `cancel_requests`; return False if one still runs after up to four times `seconds`."""
        self.model_cache.close()
        self._job_threads.join(seconds)
        self._device.close()
        return self._device.join(seconds) and self._job_threads.join(seconds) and self.model_cache.join(seconds)

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""
        return not self._job_threads.alive and self._device.join(0) and self.model_cache.join(0)

    @property
    def given_back(self) -> bool:
        """Whether there is no such device until there is work for it; one of this host is always there."""
        return False

    @property
    def starting(self) -> bool:
        """Whether the device was asked for and has not answered yet; one of this host is always there."""
        return False

    @property
    def serves(self) -> bool:
        """Whether requests of this queue are computed."""
        return self.problem is None

    @property
    def loaded_models(self) -> Mapping[str, LoadedModel]:
        """The loaded models by name."""
        return self.model_cache.loaded_models

    @property
    def host(self) -> str | None:
        """The other host that the device was seen on last; None for one of this host."""
        return None

    @property
    def problem(self) -> str | None:
        """The reason why the device cannot be used, one sentence; None while it can."""
        if self.watchdog.problem is None and not self._device.alive:
            return "A thread that owns the device is not running."
        return self.watchdog.problem

    def routing_cost(self, model: str, caller: str | None = None) -> tuple[bool, bool, float]:
        """Return a sort key, which is smaller for a device that answers a caller's request for this model sooner.

        It has whether the device or the model has failed, whether the queue is full or models still load at start, and
        the seconds that earlier requests and loading the model should take.
        """
        failed = not self.serves or model in self.model_cache.problems
        present = self.model_cache.get(model) is not None or self.model_cache.is_awaited(model)
        loading = 0.0 if present else self._load_seconds.get(model, ASSUMED_LOAD_SECONDS)
        return failed, self.queue.full(caller) or bool(self.model_cache.starting), self.queue.expected_seconds + loading

    def estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model as it runs here or last did, or else as most do."""
        if spec.name in self._estimators:
            return self._estimators[spec.name]
        device = self.settings, self._torch_device
        batch_size, streams = default_batch_size(*device), default_streams(*device)
        return Estimator(
            spec,
            self.settings,
            batch_size,
            on_host=self._on_host,
            streams=streams,
            device_memory=None if self._on_host else self._driver.total_bytes(self._torch_device),
        )

    @property
    def loaded_bytes(self) -> int:
        """Bytes of memory that the loaded models take."""
        return sum(loaded_model.nbytes for loaded_model in self.loaded_models.values())

    def _run_windows(self, job: Job[Any], model: str) -> RunWindows:
        """Return what computes windows for a job, and counts them."""

        def count(share: Share) -> None:
            self._metrics.count_batch(model, self.name, *share)
            job.device_seconds += share.seconds
            job.device_slots += share.slots

        return partial(self._device.run, due=job.due, share=count)

    def estimate_diameter(self, job: Job[Any], segmenter: Segmenter, volume: Volume, options: Options) -> Sizing | None:
        """Estimate the width of objects for a job, in a thread of the queue, where `segment` would."""
        run = self._run_windows(job, segmenter.spec.name)
        with self._report_loss():
            return segmenter.estimate_diameter(volume, options, cancelled=job.cancelled, run=run)

    def segment(  # noqa: PLR0913, PLR0917
        self,
        job: Job[Any],
        segmenter: Segmenter,
        volume: Volume,
        options: Options,
        request: PlannedRequest | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Result:
        """Segment for a job, in a thread of the queue. Raises what `Segmenter.segment` raises."""
        name = segmenter.spec.name

        def revise(needed: Estimate) -> None:
            self.queue.revise(job, _needs(needed))

        run = self._run_windows(job, name)
        with self._report_loss():
            result = segmenter.segment(
                volume,
                options,
                request=request,
                cancelled=job.cancelled,
                progress=progress or job.advance,
                run=run,
                revised=revise,
            )
        self._metrics.fallbacks(name).inc(result.fallbacks)
        self._metrics.recomputed(name).inc(int(result.recomputed))
        if result.skipped is not None:
            self._metrics.skipped(name).inc(result.skipped.windows)
            log.info("%s skipped %s", name, result.skipped)
        return result

    def _free_memory(self) -> FreeMemory:
        try:
            device = None if self._on_host else self._driver.free_bytes(self._torch_device)
        except RuntimeError as error:
            # The queue gives its jobs away, which fail by themselves. It holds its lock, and must not wait here for a
            # device that may not answer at all.
            if not self._probing.locked():
                with suppress(RuntimeError):  # of a thread for which there is no room
                    threading.Thread(target=self._find_loss, args=(error,), name="probe", daemon=True).start()
            device = None
        return FreeMemory(host.available_memory(), device)

    def _guess_bytes(self, name: str) -> int:
        size = self._weights_size(name)
        return size * WEIGHT_COPIES if self._on_host else size

    def _weights_size(self, name: str) -> int:
        """Return the bytes of the file; 0 if it or the model is gone, which loading it then reports."""
        try:
            return self._specs[name].weights_path.stat().st_size
        except (OSError, KeyError):
            return 0

    def _load(self, name: str) -> Segmenter:
        """Load a model and make it ready to run."""
        spec = self._renewed.pop(name, None) or self._specs.get(name)
        if spec is None:
            raise UnknownModel(f"The model {name} is served no longer.")
        # The files may have changed since the service has read the model file.
        check_weights(spec)
        weights, limit = spec.weights_path.stat().st_size, self.settings.models.memory_bytes
        if weights > limit:
            raise BrokenModel(too_large_message(name, weights, limit))
        began = time.monotonic()
        progress = self.loading[name] = LoadingProgress(f"loading {spec.identifier}")
        try:
            with progress.follow(), self._report_loss():
                segmenter = self._make_ready(spec)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            needed = self._guess_bytes(name)
            raise OutOfMemory(f"There is not enough memory to load {name}; try again later.", needed) from error
        finally:
            del self.loading[name]
        self._specs[name] = spec
        self._load_seconds[name] = time.monotonic() - began
        self._estimators[name] = segmenter.estimator
        report = segmenter.report()
        layout = f"{report.precision} {report.memory_format} x{report.sw_batch_size}"
        self.engines[name] = f"{report.engine} ({report.compile_mode}) {layout} on {report.device_name}"
        how = f"{report.engine}, {report.precision}, {self.name}, warm-up {report.warm_up_seconds:.1f} s"
        log.info("%s is ready: %s, %.0f MiB", spec.identifier, how, segmenter.nbytes / 2**20)
        self._metrics.loads(name).inc()
        return segmenter

    def _make_ready(self, spec: ModelSpec) -> Segmenter:
        segmenter = self._load_segmenter(spec, self.settings, self._driver)
        # A race needs the device alone, as it is until the models of the start are loaded.
        warm_up = partial(segmenter.warm_up, tune=spec.name in self.model_cache.starting)
        if self._on_host:
            warm_up()
        else:
            # Recorded graphs belong to the thread that recorded them.
            self._device.call(partial(contextvars.copy_context().run, warm_up))
        return segmenter

    def _unloaded(self, name: str) -> None:
        """Free cycles of objects, and memory that torch keeps for later."""
        self._metrics.unloads(name).inc()
        torch_compile.drop_generated_code()
        gc.collect()
        with self._report_loss():
            self._driver.release_memory(self._torch_device)

    def _find_loss(self, error: Exception) -> None:
        with suppress(Exception), self._probing, self._report_loss():
            raise error

    @contextmanager
    def _report_loss(self) -> Iterator[None]:
        """Let the process end after an error that the device does not survive, which becomes DeviceLost."""
        try:
            yield
        except Exception as error:
            lost = hardware.find_loss(self._torch_device, error, self._driver)
            if lost is None:
                raise
            self.watchdog.report_lost(str(lost))
            raise lost from error


class Reservation:
    """The device of a request, and its use of the model from when that is loaded until the request is over."""

    def __init__(self, worker: DeviceWorker, model: str) -> None:
        self.device_worker, self.model = worker, model
        self._lease: Lease[Segmenter] | None = None
        # Set once the model is there; None where planning fails, and the work raises the error again.
        self._request: PlannedRequest | None = None
        self._needs: Needs | None = None

    @property
    def loading(self) -> bool:
        """Whether the request waits for its model."""
        lease = self._lease
        return lease is not None and not lease.model.done()

    def take(self, job: Job[Any]) -> None:
        """Ask for the model. The job is in the device's queue; it may begin once the model is loaded, or fails."""
        lease = self._lease = self.device_worker.model_cache.lease(self.model)
        # At once where the job was cancelled meanwhile.
        job.add_done_callback(self._end_lease)
        # A weak reference: the job would otherwise hold itself, and its result with it.
        lease.model.add_done_callback(partial(self._after_loading, weakref.ref(job)))

    def needs(self, volume: Extent, options: Options) -> Needs:
        """Return the resources of the request. Called when the model is loaded, and whenever the job might begin."""
        if self._needs is None:
            try:
                self._request = self.segmenter.estimator.plan_request(volume, options)
                self._needs = _needs(self._request.estimate)
            except Exception:  # noqa: BLE001 - the work raises the error again, where the job gets it
                self._needs = Needs()
        return self._needs

    def segment(self, job: Job[Any], volume: Volume | Series, options: Options) -> Result:
        """Segment on the device. Raises what `Segmenter.segment` raises, and of a series `segment_series`."""
        if isinstance(volume, Series):
            return self._segment_series(job, volume, options)
        return self.device_worker.segment(job, self.segmenter, volume, options, self._request)

    def estimate_diameter(self, job: Job[Any], volume: Volume, options: Options) -> Sizing | None:
        """Estimate the width of objects on the device; None where `segment` would not. Raises what `segment` raises."""
        return self.device_worker.estimate_diameter(job, self.segmenter, volume, options)

    def _segment_series(self, job: Job[Any], series: Series, options: Options) -> Result:
        """Segment time points while the job keeps its place on the device, which it shares as for one volume."""
        worker, segmenter = self.device_worker, self.segmenter

        def segment(volume: Volume, options: Options, progress: Callable[[int, int], None]) -> Result:
            request = segmenter.estimator.plan_request(volume, options)
            worker.queue.revise(job, _needs(request.estimate))
            return worker.segment(job, segmenter, volume, options, request, progress)

        def begin(point: int) -> None:
            job.points = Progress(point, len(series.times))

        estimate = partial(worker.estimate_diameter, job, segmenter)
        is_estimated = segmenter.estimator.plan(options).estimated
        calls = PointSegmenter(segment, estimate if is_estimated else None)
        folder = worker.settings.server.scratch_folder
        return segment_series(
            series, options, calls, folder, cancelled=job.cancelled, began=begin, progress=job.advance
        )

    @property
    def segmenter(self) -> Segmenter:
        """The loaded model of a job that has begun."""
        assert self._lease is not None  # noqa: S101 - the job has begun
        return self._lease.model.result(timeout=0)

    def _after_loading(self, reference: weakref.ref[Job[Any]], model: Future[Segmenter]) -> None:
        job = reference()
        if job is None or model.cancelled():
            return
        error = model.exception()
        if error is None:
            self.device_worker.queue.release(job)
        else:
            job.refuse(error)

    def _end_lease(self, _job: Job[Any]) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()


def device_worker_settings(settings: Settings) -> list[tuple[str | None, Settings]]:
    """Return the name and the settings of each device; no name if there is only one. Raises ConfigError.

    With a cluster there are only those that are named.
    """
    wanted = hardware.gpu_names() if settings.device.serve == "all" else settings.device.serve
    if not wanted:
        return [] if settings.cluster.address else [(None, settings)]
    shares = max(wanted.count("cpu"), 1)
    threads = settings.device.threads or max(host.usable_cores() // shares, 1)
    workers: list[tuple[str | None, Settings]] = []
    for index, name in enumerate(wanted):
        before = wanted[:index].count(name)
        device = settings.device.model_copy(update={"name": name, "threads": threads})
        workers.append((f"{name}-{before + 1}" if before else name, settings.model_copy(update={"device": device})))
    return workers


def _needs(needed: Estimate) -> Needs:
    return Needs(needed.host_bytes, needed.device_bytes, needed.sw_batch_size)
