from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEstimator, FakeSegmenter, FakeSegmenterFactory, close_gate, wait_until
from runtimes import (
    get_loaded_segmenter,
    list_model_caches,
    run_ready_runtime,
    run_runtime,
    settings,
    submit_segmentation,
)

from service.core.errors import (
    Cancelled,
    ConfigError,
    NotReady,
    QueueFull,
    StorageUnavailable,
    UnknownModel,
)
from service.core.types import Options, Volume
from service.inference.types import Result
from service.serving.build import build_runtime
from service.serving.devices.local.model import Segmenter
from service.serving.devices.queue.job import Job
from service.serving.devices.reservation import Reservation
from service.serving.runtime import Runtime
from service.serving.segmentation import DeviceRequest, queue_work, segment_pixels
from service.serving.storage.disk import DiskUsage


@pytest.fixture
def stack() -> Volume:
    return Volume.from_array(np.full((1, 4, 5, 6), 200, np.uint8))


def submit(runtime: Runtime, stack: Volume, model: str | None = None) -> Job[Result]:
    return submit_segmentation(runtime, runtime.models.get_spec(model), stack, Options())


def test_work_after_segmentation_runs_in_the_thread_of_the_queue(
    bands_repository: Path, tmp_path: Path, stack: Volume
) -> None:
    with run_ready_runtime(settings(bands_repository, tmp_path)) as runtime:
        spec = runtime.models.get_spec(None)

        def name_thread(reservation: Reservation, job: Any) -> Any:
            return segment_pixels(reservation, job, stack, Options()), threading.current_thread().name

        request = DeviceRequest(spec, stack, Options(), None)
        fake_segmenters = queue_work(runtime, request, name_thread)
        result, thread = fake_segmenters.future.result(10)
        assert (result.segmentation.pixels.shape, thread) == ((4, 5, 6), "request")
        failed = queue_work(runtime, request, lambda _reservation, _job: runtime.models.get_spec("nobody"))
        with pytest.raises(UnknownModel):
            failed.future.result(10)


def test_unexpected_planning_error_does_not_block_the_queue(
    bands_repository: Path, tmp_path: Path, stack: Volume
) -> None:
    class FailingEstimator(FakeEstimator):
        def plan_request(self, volume: Any, options: Any) -> Any:
            raise RuntimeError("unexpected")

        def estimate(self, volume: Any, options: Any) -> Any:
            return super().plan_request(volume, options).estimate

    class FailingSegmenter(FakeSegmenter):
        @property
        def estimator(self) -> FakeEstimator:
            return FailingEstimator(self.spec, self.settings)

    with run_ready_runtime(settings(bands_repository, tmp_path), FailingSegmenter) as runtime:
        for _ in range(40):
            assert submit(runtime, stack).future.result(10) is not None


def test_draining_makes_the_service_unready_and_cancels_requests_after_a_while(
    bands_repository: Path, tmp_path: Path, stack: Volume
) -> None:
    with run_ready_runtime(settings(bands_repository, tmp_path)) as runtime:
        fake = get_loaded_segmenter(runtime.models, None)
        fake.gate.clear()
        first, second = (submit(runtime, stack) for _ in range(2))
        runtime.drain()
        runtime.drain()
        assert runtime.list_unready_reasons() == ("The service is stopping.",)
        with pytest.raises(NotReady):
            runtime.check_admission()
        with pytest.raises(Cancelled):
            first.future.result(10)
        wait_until(lambda: second.state == "cancelled")
    assert runtime.devices.has_ended


def test_stop_does_not_wait_for_a_model_that_is_being_loaded(bands_repository: Path, tmp_path: Path) -> None:
    fakes = FakeSegmenterFactory(close_gate)
    with run_runtime(settings(bands_repository, tmp_path), fakes) as runtime:
        wait_until(lambda: fakes)
    assert not runtime.devices.has_ended
    fakes[0].gate.set()
    wait_until(lambda: runtime.devices.has_ended)


def test_services_that_share_a_scratch_folder_use_separate_subfolders_and_delete_them(
    bands_repository: Path, tmp_path: Path
) -> None:
    config = settings(bands_repository, tmp_path)
    with run_runtime(config) as one, run_runtime(config) as other:
        for runtime in (one, other):
            (runtime.scratch.make_request_folder() / "upload.tif").write_bytes(b"II*")
            assert runtime.scratch.path.stat().st_mode & 0o077 == 0
        assert one.scratch.path != other.scratch.path
    assert list(tmp_path.iterdir()) == []


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="requires a host without GPU")


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("server", {"scratch_folder": "/nowhere"}, "scratch_folder"),
        ("device", {"name": "cuda:99"}, r"device\.name"),
        pytest.param("device", {"serve": "all"}, "no CUDA device", marks=NO_GPU),
        pytest.param("device", {"serve": ["cuda:0", "cuda:1"]}, "no CUDA device", marks=NO_GPU),
    ],
)
def test_missing_folder_or_device_is_rejected_when_the_runtime_is_built(
    bands_repository: Path, tmp_path: Path, section: str, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_runtime(settings(bands_repository, tmp_path, **{section: values}))


@pytest.fixture
def three_models(bands_content: dict[str, Any], write_model: Any, tmp_path: Path) -> Path:
    """Return a repository with the models alpha, beta and gamma."""
    for name in ("alpha", "beta", "gamma"):
        write_model(bands_content | {"name": name})
    return tmp_path / "models"


def states(runtime: Runtime) -> dict[str, str]:
    return {model.name: model.state for model in runtime.models.list_states()}


def test_models_are_loaded_at_startup_or_on_their_first_request(
    three_models: Path, tmp_path: Path, stack: Volume
) -> None:
    config = settings(three_models, tmp_path, models={"folder": three_models, "default": "beta", "load": ["gamma"]})
    with run_ready_runtime(config) as runtime:
        assert states(runtime) == {"alpha": "unloaded", "beta": "ready", "gamma": "ready"}
        with pytest.raises(NotReady, match="not loaded"):
            get_loaded_segmenter(runtime.models, "alpha")
        job = submit(runtime, stack, "alpha")
        assert job.future.result(10).segmentation.pixels.all()
        assert states(runtime)["alpha"] == "ready"
        fake_segmenters: Any = [get_loaded_segmenter(runtime.models, name) for name in ("alpha", "beta", "gamma")]
        assert [fake.was_tuned for fake in fake_segmenters] == [False, True, True], "models are tuned only at startup"
    with run_ready_runtime(settings(three_models, tmp_path, models={"folder": three_models, "load": "all"})) as runtime:
        assert set(states(runtime).values()) == {"ready"}


def test_estimator_of_a_model_that_was_never_loaded_matches_the_loaded_model(
    three_models: Path, tmp_path: Path, stack: Volume
) -> None:
    sections: dict[str, Any] = {
        "models": {"folder": three_models, "serve": ["alpha", "beta"]},
        "device": {"name": "cpu", "threads": 2},
        "engine": {"kind": "eager", "streams": 2, "cache_folder": tmp_path / "plans"},
    }
    with run_ready_runtime(settings(three_models, tmp_path, **sections), Segmenter) as runtime:
        spec, models = runtime.models.get_spec("beta"), runtime.devices.all[0].scheduler.models
        expected = models.get_estimator(spec)
        assert (expected.streams, expected.window_bytes) == (2, None)
        submit(runtime, stack, "beta").future.result(60)
        known = get_loaded_segmenter(runtime.models, "beta").estimator
        assert expected == replace(known, window_bytes=None)
        assert models.get_estimator(spec) == known


@pytest.mark.parametrize(("models", "ready"), [({"load": ["delta"]}, True), ({"default": "delta"}, False)])
def test_missing_model_is_reported_and_the_default_model_is_required(
    three_models: Path, tmp_path: Path, models: dict[str, Any], *, ready: bool
) -> None:
    with run_runtime(settings(three_models, tmp_path, models={"folder": three_models, **models})) as runtime:
        wait_until(lambda: not list_model_caches(runtime)[0].pending_startup_models)
        assert ["delta" in reason for reason in runtime.list_unready_reasons()] == ([] if ready else [True])
        assert any("delta" in sentence for sentence in runtime.list_degradations()) is ready


def test_service_stays_ready_while_another_model_is_loaded(three_models: Path, tmp_path: Path, stack: Volume) -> None:
    fakes = FakeSegmenterFactory(lambda fake: fake.spec.name == "alpha" or fake.gate.clear())
    with run_ready_runtime(settings(three_models, tmp_path), fakes) as runtime:
        waiting = submit(runtime, stack, "beta")
        wait_until(lambda: len(fakes) == 2)
        assert (states(runtime)["beta"], waiting.state, runtime.list_unready_reasons()) == ("loading", "waiting", ())
        assert submit(runtime, stack, "alpha").future.result(10)
        submit(runtime, stack, "gamma").cancel()
        fakes[1].gate.set()
        assert waiting.future.result(10)
        wait_until(lambda: not list_model_caches(runtime)[0].is_load_pending("gamma"))
        assert len(fakes) == 2, "the only request for gamma was cancelled"


def test_models_are_swapped_if_memory_holds_only_one(three_models: Path, tmp_path: Path, stack: Volume) -> None:
    size = max(file.stat().st_size for file in three_models.glob("*/weights.safetensors"))
    load = FakeSegmenterFactory(lambda fake: setattr(fake, "nbytes", size))
    with run_ready_runtime(
        settings(three_models, tmp_path, models={"folder": three_models, "memory_bytes": 3 * size // 2}), load
    ) as runtime:
        jobs = [submit(runtime, stack, name) for name in ("beta", "alpha", "gamma", "beta")]
        assert all(job.future.result(20).segmentation.pixels.all() for job in jobs)
        wait_until(lambda: list(states(runtime).values()).count("ready") == 1)
        metrics = runtime.metrics.format_exposition().decode()
        assert 'stackseg_loaded_models{device="cpu"} 1.0' in metrics
        assert f'stackseg_loaded_bytes{{device="cpu"}} {float(size)}' in metrics
        assert 'stackseg_model_loads_total{model="gamma"} 1.0' in metrics
        assert 'stackseg_model_unloads_total{model="alpha"}' in metrics


def test_disk_usage_omits_kinds_that_cannot_be_measured(three_models: Path, tmp_path: Path) -> None:
    def fail() -> DiskUsage:
        raise StorageUnavailable("The database is locked.")

    with run_runtime(settings(three_models, tmp_path), FakeSegmenter) as runtime:
        runtime.disk_usage_functions["jobs"] = fail
        hold = runtime.scratch_space.make_reservation("ann")
        hold.add(1000)
        assert runtime.measure_disks().keys() == {"requests", "results"}
        metrics = runtime.metrics.format_exposition().decode()
        assert 'stackseg_disk_used_bytes{files="requests"} 1000.0' in metrics
        assert 'files="jobs"' not in metrics
        hold.close()


def test_requests_are_routed_by_work_and_by_loaded_models(three_models: Path, tmp_path: Path, stack: Volume) -> None:
    config = settings(three_models, tmp_path, device={"serve": ["cpu", "cpu"], "threads": 1}, limits={"waiting": 1})
    fakes = FakeSegmenterFactory()
    with run_ready_runtime(config, fakes) as runtime:
        one, other = (device.scheduler for device in runtime.devices.all)
        assert [device.name for device in runtime.devices.all] == ["cpu", "cpu-2"]
        for fake in fakes:
            fake.gate.clear()
        jobs = [submit(runtime, stack, "alpha") for _ in range(2)]
        wait_until(lambda: (len(one.queue.running_jobs), len(other.queue.running_jobs)) == (1, 1))
        jobs += [submit(runtime, stack, "alpha") for _ in range(2)]
        with pytest.raises(QueueFull):
            runtime.check_admission()
        for fake in fakes:
            fake.gate.set()
        assert all(job.future.result(20) for job in jobs)
        submit(runtime, stack, "beta").future.result(20)
        owner = next(cache for cache in list_model_caches(runtime) if cache.get("beta"))
        for _ in range(3):
            submit(runtime, stack, "beta").future.result(20)
        assert [cache for cache in list_model_caches(runtime) if cache.get("beta")] == [owner]
