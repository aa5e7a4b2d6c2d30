"""Counters, timers and gauges of the process, in Prometheus's text format."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
STAGE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
RECENT = 50

GAUGES = {
    "stackseg_waiting": "Requests that wait for the device.",
    "stackseg_running": "Requests that are worked on.",
    "stackseg_scratch_bytes": "Bytes on disk that requests hold.",
    "stackseg_cache_bytes": "Bytes of earlier results.",
    "stackseg_ready": "1 once the models that are loaded at start are warm.",
    "stackseg_compiled_graphs": "Graphs compiled so far; only loading a model adds some.",
    "stackseg_recompilations": "Graphs that were compiled while no model was loaded; there should be none.",
    "stackseg_reader_kills": (
        "Processes that were killed while they read a file, most likely for lack of memory on the host."
    ),
}
# The label and the meaning of each.
LABELLED_GAUGES = {
    "stackseg_trainings": ("state", "Trainings that run and wait."),
    "stackseg_disk_used_bytes": ("files", "Bytes of files of each kind."),
    "stackseg_disk_free_bytes": ("files", "Free bytes of the disk that they lie on."),
    "stackseg_loaded_models": ("device", "Models that are loaded, by device."),
    "stackseg_loaded_bytes": ("device", "Memory that they take."),
    "stackseg_workers": ("state", "Workers of the cluster."),
    "stackseg_gpu_memory_used_bytes": ("gpu", "Of each GPU, by all processes."),
    "stackseg_gpu_memory_total_bytes": ("gpu", "Of each GPU."),
}


class Segmented(NamedTuple):
    """A segmentation that has ended, at `ended` seconds since 1970; `seconds` by stage, in their order."""

    ended: float
    model: str
    voxels: int
    objects: int | None
    seconds: dict[str, float]


class Metrics:
    """Counters of one process. Names and labels are part of the interface: dashboards depend on them.

    What counts by itself is an attribute, called with the values of its labels: `metrics.loads("nuclei").inc()`.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._recent: deque[Segmented] = deque(maxlen=RECENT)
        self._requests = self._counter("stackseg_requests", "Requests answered.", "route", "status")
        self._errors = self._counter("stackseg_errors", "Requests answered with a problem document.", "type")
        self._callers = self._counter("stackseg_caller_requests", "Requests by the name of their API key.", "caller")
        about = "Seconds per stage of a segmentation."
        stages = Histogram("stackseg_stage_seconds", about, ["stage"], registry=self._registry, buckets=STAGE_BUCKETS)
        self._stages = cache(stages.labels)
        self.cache_lookups = self._counter("stackseg_cache", "Requests looked up among earlier results.", "outcome")
        self._voxels = self._counter("stackseg_voxels", "Voxels segmented.", "model")
        self._objects = self._counter("stackseg_objects", "Objects found.", "model")
        self._windows = self._counter("stackseg_windows", "Windows computed.", "model")
        self._slots = self._counter(
            "stackseg_batch_slots",
            "Windows that the computed batches had room for; windows per slot tells how full they are.",
            "model",
        )
        self._device_windows = self._counter("stackseg_device_windows", "Windows computed, by device.", "device")
        self._device_seconds = self._counter(
            "stackseg_device_seconds", "Seconds in which a device was busy with windows.", "device"
        )
        self.fallbacks = self._counter(
            "stackseg_memory_fallbacks", "How often memory did not hold a batch, and a smaller one was taken.", "model"
        )
        self.skipped = self._counter(
            "stackseg_skipped_windows", "Windows not computed because nothing is in them.", "model"
        )
        self.recomputed = self._counter(
            "stackseg_recomputed", "Volumes whose scores were not finite, and were computed again in float32.", "model"
        )
        self.loads = self._counter("stackseg_model_loads", "How often a model was loaded.", "model")
        self.unloads = self._counter(
            "stackseg_model_unloads", "How often a model was unloaded, to make room for another.", "model"
        )
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Callable[..., Counter]:
        """Register a counter and return its `labels`, cached: the library looks each label up under a lock."""
        return cache(Counter(name, meaning, labels, registry=self._registry).labels)

    def watch(self, name: str, value: Callable[[], float]) -> None:
        """Register one of `GAUGES`, which calls `value` at every exposition."""
        Gauge(name, GAUGES[name], registry=self._registry).set_function(value)

    def watch_each(self, name: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Register one of `LABELLED_GAUGES`, which calls `values` at every exposition, for the value of each label."""
        label, meaning = LABELLED_GAUGES[name]
        self._registry.register(_LabelledGauge(name, meaning, label, values))

    def count_request(self, route: str, status: int, *, caller: str = "anonymous", problem: str | None = None) -> None:
        """Count a request that was answered, with the type of its problem document, if any.

        `route` is a path template and `caller` the name of a key, never text of a client: every value is kept.
        """
        self._requests(route, str(status)).inc()
        self._callers(caller).inc()
        if problem is not None:
            self._errors(problem).inc()

    def count_segmentation(self, model: str, voxels: int, objects: int | None, seconds: Mapping[str, float]) -> None:
        self._voxels(model).inc(voxels)
        if objects is not None:
            self._objects(model).inc(objects)
        for stage, value in seconds.items():
            self._stages(stage).observe(value)
        self._recent.appendleft(Segmented(time.time(), model, voxels, objects, dict(seconds)))

    @property
    def recent(self) -> tuple[Segmented, ...]:
        """The last segmentations, newest first."""
        # Other threads may add one meanwhile: the copy is made in one step.
        return tuple(self._recent.copy())

    def count_batch(self, model: str, device: str, windows: int, slots: float, seconds: float) -> None:
        """Count the share of one request in a batch: windows, slots of the batch, seconds of the device."""
        self._windows(model).inc(windows)
        self._device_windows(device).inc(windows)
        self._device_seconds(device).inc(seconds)
        self._slots(model).inc(slots)

    def exposition(self) -> bytes:
        """Return all metrics in the format of `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _LabelledGauge(Collector):
    """A gauge with one label, whose values are looked up at every exposition."""

    def __init__(self, name: str, meaning: str, label: str, values: Callable[[], Mapping[str, float]]) -> None:
        self._family = (name, meaning, label)
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for family in self.describe():
            for label, value in self._values().items():
                family.add_metric([label], value)
            yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauge without values: registering would otherwise look them up."""
        name, meaning, label = self._family
        yield GaugeMetricFamily(name, meaning, labels=[label])
