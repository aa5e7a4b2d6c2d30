"""The composition root: creates the devices, stores, file readers, job manager and training manager of the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from service.core.config import Settings
from service.core.hardware import devices, gpus
from service.core.hardware.devices import Driver
from service.engine.compile import torch_compile
from service.serving.devices.cluster.cluster_devices import ClusterConnector, open_cluster
from service.serving.devices.cluster.device_actor import connect_cluster
from service.serving.devices.device import count_loaded_bytes
from service.serving.devices.local.device import LocalDevice, SharedResources
from service.serving.devices.local.model import Segmenter, SegmenterFactory, load_model
from service.serving.devices.local.settings import split_settings
from service.serving.devices.model_registry import ModelRegistry
from service.serving.devices.pool import DevicePool
from service.serving.jobs.job_manager import JobManager
from service.serving.jobs.projects.store import ProjectStore
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_manager import TrainingManager
from service.serving.metrics import Metrics
from service.serving.results.cache import ResultCache
from service.serving.results.metadata import ResultMetadata
from service.serving.runtime import Runtime, StorageServices
from service.serving.storage.disk import count_bytes, measure_disk
from service.serving.storage.host_files import HostFiles
from service.serving.storage.readers import FileReaders
from service.serving.storage.scratch import ScratchFolder
from service.serving.storage.volume_cache import VolumeCache


class ServiceFactories(NamedTuple):
    """Functions that create parts of the service. Tests and simulations replace them.

    load           loads a model into a new segmenter
    choose_driver  returns the driver of a device by its name; the name is None if there is only one device
    connect        connects to the cluster and returns a function that requests an actor
    """

    load: SegmenterFactory = Segmenter
    choose_driver: Callable[[str | None], Driver] = lambda _name: devices
    connect: ClusterConnector = partial(connect_cluster, load=partial(load_model, Segmenter))


DEFAULT_FACTORIES = ServiceFactories()


class Service(NamedTuple):
    """The long-lived objects of the service that requests use."""

    runtime: Runtime
    async_jobs: JobManager
    annotations: AnnotationStore
    trainings: TrainingManager
    projects: ProjectStore


def build(settings: Settings, factories: ServiceFactories = DEFAULT_FACTORIES) -> Service:
    """Create the service without starting it. Raises ConfigError if a device or folder does not exist."""
    runtime = build_runtime(settings, factories)
    annotations = AnnotationStore(settings.annotations_folder, quota_bytes=settings.annotations.quota_bytes)
    trainings = TrainingManager(settings, annotations, runtime.models, lambda: runtime.is_draining)
    trained_folder = settings.trained_folder
    async_jobs = JobManager(settings)
    runtime.disk_usage_functions |= {
        "jobs": async_jobs.measure_jobs,
        "stacks": async_jobs.measure_stacks,
        "annotations": lambda: measure_disk(annotations.folder, annotations.measure_usage().nbytes, None),
        "trained-models": lambda: measure_disk(trained_folder, count_bytes(trained_folder), None),
    }
    runtime.metrics.register_labeled_gauge("stackseg_trainings", trainings.queue.count_by_state)
    projects = ProjectStore(
        lambda: async_jobs.store, quota_bytes=settings.jobs.quota_bytes, is_shared=len(settings.access.keys) > 1
    )
    return Service(runtime, async_jobs, annotations, trainings, projects)


def build_runtime(settings: Settings, factories: ServiceFactories = DEFAULT_FACTORIES) -> Runtime:
    """Create only the runtime, not the managers of jobs and training runs. Raises ConfigError as `build` does."""
    host_files, metrics, loading_lock = HostFiles(settings.references), Metrics(), torch_compile.LoadingLock()
    shared_resources = SharedResources(partial(load_model, factories.load), metrics, loading_lock)
    local_devices = [
        LocalDevice(name, device_settings, shared_resources, factories.choose_driver(name))
        for name, device_settings in split_settings(settings)
    ]
    cluster = open_cluster(settings, factories.connect, metrics)
    devices = DevicePool(local_devices, [device.watchdog for device in local_devices], cluster)
    models = ModelRegistry(settings.models, devices.all, settings.trained_folder)
    scratch = ScratchFolder(settings.server.scratch_folder)
    cache: ResultCache[tuple[ResultMetadata, str]] = ResultCache(scratch.results_folder, settings.limits.cache_bytes)
    runtime = Runtime(
        settings,
        devices,
        models,
        metrics,
        StorageServices(host_files, scratch, cache, VolumeCache(), FileReaders(settings)),
    )
    _register_gauges(runtime, loading_lock)
    return runtime


def _register_gauges(runtime: Runtime, loading_lock: torch_compile.LoadingLock) -> None:
    """Register the gauges that show the state of the runtime."""
    devices, metrics = runtime.devices, runtime.metrics
    gauges: Mapping[str, Callable[[], float]] = {
        "stackseg_waiting": lambda: devices.waiting_count,
        "stackseg_running": lambda: len(devices.running_jobs),
        "stackseg_scratch_bytes": lambda: float(runtime.scratch_space.used_bytes),
        "stackseg_cache_bytes": lambda: float(runtime.result_cache.nbytes),
        "stackseg_ready": lambda: float(not runtime.list_unready_reasons()),
        "stackseg_compiled_graphs": torch_compile.count_graphs,
        "stackseg_recompilations": lambda: loading_lock.recompilation_count,
        "stackseg_reader_kills": lambda: float(runtime.reader.killed_child_count),
    }
    labeled_gauges: Mapping[str, Callable[[], Mapping[str, float]]] = {
        "stackseg_disk_used_bytes": lambda: _measure_disk_bytes(runtime, "used"),
        "stackseg_disk_free_bytes": lambda: _measure_disk_bytes(runtime, "free"),
        "stackseg_loaded_models": lambda: {device.name: float(len(device.loaded_models)) for device in devices.all},
        "stackseg_loaded_bytes": lambda: {device.name: float(count_loaded_bytes(device)) for device in devices.all},
        "stackseg_workers": lambda: devices.worker_counts,
        "stackseg_gpu_memory_used_bytes": lambda: _query_gpu_bytes(devices, "memory_used"),
        "stackseg_gpu_memory_total_bytes": lambda: _query_gpu_bytes(devices, "memory_total"),
    }
    for name, get_value in gauges.items():
        metrics.register_gauge(name, get_value)
    for name, get_values in labeled_gauges.items():
        metrics.register_labeled_gauge(name, get_values)


def _measure_disk_bytes(runtime: Runtime, field: str) -> dict[str, float]:
    """Return a field of the disk usage in bytes, by kind of file."""
    return {kind: float(getattr(usage, field)) for kind, usage in runtime.measure_disks().items()}


def _query_gpu_bytes(devices: DevicePool, field: str) -> dict[str, float]:
    """Return a field of `GpuStatus` in bytes for every GPU that reports it.

    Keys are GPU indices, with the prefix `HOST:` for GPUs on other hosts.
    """
    values = {str(gpu.index): getattr(gpu, field) for gpu in gpus.query_gpus()}
    for status in devices.host_statuses:
        values |= {f"{status.host}:{gpu.index}": getattr(gpu, field) for gpu in status.gpus}
    return {index: float(value) for index, value in values.items() if value is not None}
