"""One device and all that is its own: its threads, its queue and who works on it, the models that are loaded there."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from service.core import hardware
from service.core.config import Settings
from service.core.errors import BrokenModel, DeviceLost, OutOfMemory, StackSegError
from service.core.volume import Options, Volume
from service.engine import torch_compile
from service.inference import engine_selector
from service.inference.batcher import Share, make_device
from service.inference.estimate import Estimate, Estimator
from service.inference.result import Result
from service.inference.segmenter import Segmenter, exhausted
from service.models.spec import ModelSpec
from service.serving.job import Free, Job, Needs
from service.serving.job_queue import JobQueue
from service.serving.metrics import Metrics
from service.serving.model_cache import Lease, ModelCache, too_large
from service.serving.watchdog import Watchdog
from service.serving.worker import Worker

# Of weights on a CPU, until a model was loaded once: as in the file, prepared, and packed by an engine.
COPIES = 3
# Until it was loaded once.
ASSUMED_LOAD_SECONDS = 10.0
# What is free may be this old.
FRESH_SECONDS = 0.02

log = logging.getLogger(__name__)

LoadSegmenter = Callable[[ModelSpec, Settings], Segmenter]


class DeviceWorker:
    """Owns the threads of one device. `start` returns at once, models become ready one after the other.

    name      of the station; None: the only one
    settings  with `device.name` for this device
    load      makes a segmenter of a model
    metrics   where it counts
    turn      held while a model is loaded; several stations share one
    Raises ConfigError for a device that is not there.
    """

    def __init__(
        self,
        name: str | None,
        settings: Settings,
        load: LoadSegmenter,
        metrics: Metrics,
        turn: torch_compile.LoadingLock,
    ) -> None:
        torch_device = hardware.choose_device(settings.device.name)
        limits = settings.limits
        at_once = min(limits.at_once, limits.waiting + 1)
        self.settings = settings
        self.name = name or str(torch_device)
        self._on_host = torch_device.type == "cpu"
        self._torch_device = torch_device
        self._make = load
        self._metrics = metrics
        self._specs: Mapping[str, ModelSpec] = {}
        self._load_seconds: dict[str, float] = {}
        # How models run here, those that were loaded at some time.
        self.engines: dict[str, str] = {}
        self._estimators: dict[str, Estimator] = {}
        self.queue = JobQueue(limits.waiting, at_once, self._free, FRESH_SECONDS)
        self.model_cache: ModelCache[Segmenter] = ModelCache(
            settings.models.memory_bytes, self._load, guess=self._guess, unloaded=self._unloaded, turn=turn
        )
        self._device = make_device(settings, on_host=self._on_host)
        # With more, each of many requests would have threads of its own, which wait for their next work by turning in
        # circles, on cores that the network needs.
        self._worker = Worker("request", self.queue.take, at_once, partial(hardware.use_threads, 1))
        self.watchdog = Watchdog(
            lambda: self._device.pulse,
            lambda: self._device.alive,
            batch_seconds=settings.watchdog.batch_seconds,
            grace_seconds=settings.watchdog.grace_seconds,
            device="the device" if name is None else f"the device {name}",
        )

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models, of which the `first` are loaded at once, and in the meantime no request is worked on."""
        self._specs = specs
        self._device.start()
        self.model_cache.start(first)
        self._worker.start()
        self.watchdog.start()

    def cancel_requests(self) -> None:
        """Accept nothing more, and end what waits or runs."""
        self.queue.close()
        self.queue.cancel_all()

    def stop(self, seconds: float) -> bool:
        """End the threads, once given up; False if one has not ended after so many seconds and as many again."""
        self.model_cache.close()
        self._worker.join(seconds)
        self._device.close()
        return self._device.join(seconds) and self._worker.join(seconds) and self.model_cache.join(seconds)

    @property
    def ended(self) -> bool:
        """Whether nothing is worked on any more, and nothing ever will be."""
        return not self._worker.alive

    @property
    def problem(self) -> str | None:
        """Why the device cannot be used, one sentence; None while it can."""
        if self.watchdog.problem is None and not self._device.alive:
            return "A thread that owns the device is not running."
        return self.watchdog.problem

    def routing_cost(self, model: str) -> tuple[bool, bool, float]:
        """Less where a request for this model is answered sooner.

        Not at all where the device or the model has failed, later where no more may wait or the start is not over, else
        after as many seconds as the work before it should take, and loading the model.
        """
        failed = self.problem is not None or model in self.model_cache.problems
        there = self.model_cache.get(model) is not None or self.model_cache.is_awaited(model)
        loading = 0.0 if there else self._load_seconds.get(model, ASSUMED_LOAD_SECONDS)
        return failed, self.queue.full or bool(self.model_cache.starting), self.queue.expected + loading

    def estimator(self, spec: ModelSpec) -> Estimator:
        """What can be said of requests to a model: as it runs here or last did, else as one does that nobody tuned."""
        if spec.name in self._estimators:
            return self._estimators[spec.name]
        here = self.settings, self._torch_device
        batch_size, streams = engine_selector.batch_size(*here), engine_selector.streams(*here)
        return Estimator(spec, self.settings, batch_size, on_host=self._on_host, streams=streams)

    @property
    def loaded_bytes(self) -> int:
        """Memory that the loaded models take."""
        return sum(loaded_model.nbytes for loaded_model in self.model_cache.loaded_models.values())

    def segment(self, job: Job[Any], segmenter: Segmenter, volume: Volume, options: Options) -> Result:
        """The work of a job, in a worker's thread. Raises what `Segmenter.segment` raises."""
        name = segmenter.spec.name

        def count(share: Share) -> None:
            self._metrics.count_batch(name, self.name, *share)
            job.device_seconds += share.seconds

        def revise(needed: Estimate) -> None:
            self.queue.revise(job, _needs(needed))

        run = partial(self._device.run, due=job.due, share=count)
        try:
            result = segmenter.segment(
                volume, options, cancelled=job.cancelled, progress=job.advance, run=run, revised=revise
            )
        except DeviceLost as error:
            self.watchdog.give_up(str(error))
            raise
        self._metrics.count_fallbacks(name, result.fallbacks)
        self._metrics.count_recomputed(name, int(result.recomputed))
        if result.skipped is not None:
            self._metrics.count_skipped(name, result.skipped.windows)
            log.info("%s skipped %s", name, result.skipped)
        return result

    def _free(self) -> Free:
        device = None if self._on_host else hardware.free_bytes(self._torch_device)
        return Free(hardware.available_memory(), device)

    def _guess(self, name: str) -> int:
        size = self._weights_size(name)
        return size * COPIES if self._on_host else size

    def _weights_size(self, name: str) -> int:
        """Bytes of the file; 0 where it is gone, which loading it then says."""
        try:
            return self._specs[name].weights_path.stat().st_size
        except OSError:
            return 0

    def _load(self, name: str) -> Segmenter:
        """A model that is ready to run.

        What is tried at start is timed, and needs the device for itself. On demand a model is made ready beside the
        batches of others, but on CUDA between them: recorded graphs belong to the thread that recorded them.
        """
        spec, starting = self._specs[name], name in self.model_cache.starting
        weights, limit = self._weights_size(name), self.settings.models.memory_bytes
        if weights > limit:
            raise BrokenModel(too_large(name, weights, limit))
        began = time.monotonic()
        try:
            segmenter = self._device.call(partial(self._made, spec)) if starting else self._made_on_demand(spec)
        except (RuntimeError, MemoryError) as error:
            if not exhausted(error):
                raise
            needed = self._guess(name)
            raise OutOfMemory(f"There is not enough memory to load {name}; try again later.", needed) from error
        self._load_seconds[name] = time.monotonic() - began
        self._estimators[name] = segmenter.estimator
        report = segmenter.report()
        layout = f"{report.precision} {report.memory_format} x{report.sw_batch_size}"
        self.engines[name] = f"{report.engine} ({report.compile_mode}) {layout} on {report.device_name}"
        how = f"{report.engine}, {report.precision}, {self.name}, warm-up {report.warm_up_seconds:.1f} s"
        log.info("%s is ready: %s, %.0f MiB", spec.identifier, how, segmenter.nbytes / 2**20)
        self._metrics.count_load(name)
        return segmenter

    def _made(self, spec: ModelSpec) -> Segmenter:
        segmenter = self._make(spec, self.settings)
        segmenter.warm_up()
        return segmenter

    def _made_on_demand(self, spec: ModelSpec) -> Segmenter:
        segmenter = self._make(spec, self.settings)
        warm_up = partial(segmenter.warm_up, tune=False)
        if self._on_host:
            warm_up()
        else:
            self._device.call(warm_up)
        return segmenter

    def _unloaded(self, name: str) -> None:
        """Free what refers to itself, and what torch keeps for later."""
        self._metrics.count_unload(name)
        torch_compile.drop_generated_code()
        gc.collect()
        hardware.release_memory(self._torch_device)


class Reservation:
    """Where a request is worked on: at a station, where it uses a model from when that is loaded until it is over."""

    def __init__(self, worker: DeviceWorker, model: str) -> None:
        self.device_worker, self.model = worker, model
        self._lease: Lease[Segmenter] | None = None
        self._needs: Needs | None = None

    @property
    def loading(self) -> bool:
        """Whether the model is waited for."""
        lease = self._lease
        return lease is not None and not lease.model.done()

    def take(self, job: Job[Any]) -> None:
        """Ask for the model. The job, which is in the station's queue, may begin once it is there, or fails with it."""
        self._lease = self.device_worker.model_cache.lease(self.model)
        job.when_over(self._leave)
        # Not the job itself, which would then hold itself, and what it computes.
        self._lease.model.add_done_callback(partial(self._seated, weakref.ref(job)))

    def needs(self, volume: Volume, options: Options) -> Needs:
        """What the work will take; called when the model is there, and again whenever the job might begin."""
        if self._needs is None:
            try:
                self._needs = _needs(self._segmenter.estimate(volume, options))
            except StackSegError:
                self._needs = Needs()  # and the work will raise the same
        return self._needs

    def segment(self, job: Job[Any], volume: Volume, options: Options) -> Result:
        """The work itself; see `DeviceWorker.segment`."""
        return self.device_worker.segment(job, self._segmenter, volume, options)

    @property
    def _segmenter(self) -> Segmenter:
        assert self._lease is not None  # noqa: S101 - the job has begun
        return self._lease.model.result(timeout=0)

    def _seated(self, known: weakref.ref[Job[Any]], model: Future[Segmenter]) -> None:
        job = known()
        if job is None or model.cancelled():
            return
        error = model.exception()
        if error is None:
            self.device_worker.queue.release(job)
        else:
            job.refuse(error)

    def _leave(self, _job: Job[Any]) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()


def device_worker_settings(settings: Settings) -> list[tuple[str | None, Settings]]:
    """Name and settings of each device's station; no name where there is but one. Raises ConfigError."""
    wanted = hardware.gpu_names() if settings.device.serve == "all" else settings.device.serve
    if not wanted:
        return [(None, settings)]
    shares = max(wanted.count("cpu"), 1)
    threads = settings.device.threads or max(hardware.usable_cores() // shares, 1)
    found: list[tuple[str | None, Settings]] = []
    for index, name in enumerate(wanted):
        before = wanted[:index].count(name)
        device = settings.device.model_copy(update={"name": name, "threads": threads})
        found.append((f"{name}-{before + 1}" if before else name, settings.model_copy(update={"device": device})))
    return found


def _needs(needed: Estimate) -> Needs:
    return Needs(needed.host_bytes, needed.device_bytes, needed.sw_batch_size)
