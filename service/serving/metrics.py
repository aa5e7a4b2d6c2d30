"""Metrics of the process in the Prometheus text format."""

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
# Upper bounds of the histogram buckets for the durations of stages, in seconds.
STAGE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
# Maximum number of segmentations that `Metrics.recent_segmentations` returns.
MAX_RECENT_SEGMENTATIONS = 50

GAUGES = {
    "stackseg_waiting": "Requests in the queues of all devices.",
    "stackseg_running": "Requests that are being processed.",
    "stackseg_scratch_bytes": "Disk space used by requests.",
    "stackseg_cache_bytes": "Size of the result cache.",
    "stackseg_ready": "1 if the service is ready for requests, else 0.",
    "stackseg_compiled_graphs": "Graphs compiled so far. Only loading a model should compile graphs.",
    "stackseg_recompilations": "Graphs compiled while no model was being loaded. Should be 0.",
    "stackseg_reader_kills": "Processes killed while reading a file, usually because the host ran out of memory.",
}
# Label name and description of each gauge.
LABELED_GAUGES = {
    "stackseg_trainings": ("state", "Training runs by state."),
    "stackseg_disk_used_bytes": ("files", "Disk space used by each kind of file."),
    "stackseg_disk_free_bytes": ("files", "Free space on the disk that stores each kind of file."),
    "stackseg_loaded_models": ("device", "Loaded models by device."),
    "stackseg_loaded_bytes": ("device", "Memory used by the loaded models of each device."),
    "stackseg_workers": ("state", "Workers of the cluster by state."),
    "stackseg_gpu_memory_used_bytes": ("gpu", "Memory of each GPU used by all processes."),
    "stackseg_gpu_memory_total_bytes": ("gpu", "Total memory of each GPU."),
}


class SegmentationRecord(NamedTuple):
    """A completed segmentation.

    ended    end time in seconds since 1970
    seconds  duration of each stage, in the order of the stages
    """

    ended: float
    model: str
    voxels: int
    objects: int | None
    seconds: dict[str, float]


class Metrics:
    """Metrics of one process. Dashboards depend on the names and labels, so they must not change.

    Public attributes are counters, which are called with the values of their labels, such as
    `metrics.model_loads("nuclei").inc()`.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._recent_segmentations: deque[SegmentationRecord] = deque(maxlen=MAX_RECENT_SEGMENTATIONS)
        self._requests = self._make_counter("stackseg_requests", "Requests by route and status.", "route", "status")
        self._errors = self._make_counter("stackseg_errors", "Requests that failed, by problem type.", "type")
        self._requests_by_caller = self._make_counter(
            "stackseg_caller_requests", "Requests by name of the API key.", "caller"
        )
        description = "Duration of each stage of a segmentation."
        stages = Histogram(
            "stackseg_stage_seconds", description, ["stage"], registry=self._registry, buckets=STAGE_BUCKETS
        )
        self._stages = cache(stages.labels)
        self.cache_lookups = self._make_counter("stackseg_cache", "Lookups in the result cache.", "outcome")
        self._voxels = self._make_counter("stackseg_voxels", "Voxels segmented.", "model")
        self._objects = self._make_counter("stackseg_objects", "Objects found.", "model")
        self._windows = self._make_counter("stackseg_windows", "Windows processed.", "model")
        self._slots = self._make_counter(
            "stackseg_batch_slots",
            "Window slots of the processed batches. The ratio of windows to slots is the fill level of the batches.",
            "model",
        )
        self._device_windows = self._make_counter("stackseg_device_windows", "Windows processed, by device.", "device")
        self._device_seconds = self._make_counter(
            "stackseg_device_seconds", "Time that a device spent processing windows, in seconds.", "device"
        )
        self.memory_fallbacks = self._make_counter(
            "stackseg_memory_fallbacks", "Batches that were reduced because memory was exhausted.", "model"
        )
        self.skipped_windows = self._make_counter(
            "stackseg_skipped_windows", "Windows skipped because they contain only background.", "model"
        )
        self.recomputed_volumes = self._make_counter(
            "stackseg_recomputed", "Volumes recomputed in float32 because their scores were not finite.", "model"
        )
        self.model_loads = self._make_counter("stackseg_model_loads", "Number of times a model was loaded.", "model")
        self.model_unloads = self._make_counter(
            "stackseg_model_unloads", "Number of times a model was unloaded to free memory for another model.", "model"
        )
        ProcessCollector(registry=self._registry)

    def _make_counter(self, name: str, description: str, *labels: str) -> Callable[..., Counter]:
        """Register a counter and return its `labels` method, cached because the library locks on every lookup."""
        return cache(Counter(name, description, labels, registry=self._registry).labels)

    def register_gauge(self, name: str, get_value: Callable[[], float]) -> None:
        """Register a gauge from `GAUGES`. `get_value` is called whenever metrics are exposed."""
        Gauge(name, GAUGES[name], registry=self._registry).set_function(get_value)

    def register_labeled_gauge(self, name: str, get_values: Callable[[], Mapping[str, float]]) -> None:
        """Register a gauge from `LABELED_GAUGES`. `get_values` is called whenever metrics are exposed.

        get_values  returns the value of the gauge for each label
        """
        label, description = LABELED_GAUGES[name]
        self._registry.register(_LabeledGauge(name, description, label, get_values))

    def count_request(self, route: str, status: int, *, caller: str = "anonymous", problem: str | None = None) -> None:
        """Count a request and, if it failed, its problem type.

        Every value of a label is stored, so labels must not contain strings from clients: `route` is a path template,
        and `caller` is the name of an API key.
        """
        self._requests(route, str(status)).inc()
        self._requests_by_caller(caller).inc()
        if problem is not None:
            self._errors(problem).inc()

    def count_segmentation(
        self, model: str, voxel_count: int, object_count: int | None, seconds_by_stage: Mapping[str, float]
    ) -> None:
        """Count a completed segmentation and its voxels and objects, and record the duration of each stage."""
        self._voxels(model).inc(voxel_count)
        if object_count is not None:
            self._objects(model).inc(object_count)
        for stage, stage_seconds in seconds_by_stage.items():
            self._stages(stage).observe(stage_seconds)
        self._recent_segmentations.appendleft(
            SegmentationRecord(time.time(), model, voxel_count, object_count, dict(seconds_by_stage))
        )

    @property
    def recent_segmentations(self) -> tuple[SegmentationRecord, ...]:
        """The most recent segmentations, newest first."""
        # Copying is atomic. During an iteration, other threads could add segmentations.
        return tuple(self._recent_segmentations.copy())

    def count_batch(self, model: str, device: str, window_count: int, slot_count: float, device_seconds: float) -> None:
        """Count the share of one request in a batch: its windows, batch slots and device seconds."""
        self._windows(model).inc(window_count)
        self._device_windows(device).inc(window_count)
        self._device_seconds(device).inc(device_seconds)
        self._slots(model).inc(slot_count)

    def format_exposition(self) -> bytes:
        """Return all metrics, encoded as `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _LabeledGauge(Collector):
    """A gauge with one label. Its values are computed whenever metrics are exposed."""

    def __init__(self, name: str, description: str, label: str, get_values: Callable[[], Mapping[str, float]]) -> None:
        self._family = (name, description, label)
        self._get_values = get_values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for family in self.describe():
            for label, value in self._get_values().items():
                family.add_metric([label], value)
            yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauge without values. Without this method, registering the gauge would compute them."""
        name, description, label = self._family
        yield GaugeMetricFamily(name, description, labels=[label])
