from __future__ import annotations

from pathlib import Path

import pytest
from fakes import wait_until
from faulty_server import FaultyDriver
from runtimes import run_ready_runtime, settings

from service.core.errors import DeviceLost
from service.core.hardware import host
from service.serving.devices.local.settings import split_settings
from service.serving.devices.queue.job import Job


def test_cpu_devices_share_the_cores(bands_repository: Path, tmp_path: Path) -> None:
    config = settings(bands_repository, tmp_path, device={"serve": ["cpu", "cpu"]})
    devices = split_settings(config)
    assert [name for name, _ in devices] == ["cpu", "cpu-2"]
    cores = host.count_usable_cores()
    assert all(1 <= device_settings.device.threads <= max(cores // 2, 1) for _, device_settings in devices)
    assert split_settings(settings(bands_repository, tmp_path)) == [(None, settings(bands_repository, tmp_path))]


def test_cancelled_job_does_not_keep_a_lease(bands_repository: Path, tmp_path: Path) -> None:
    with run_ready_runtime(settings(bands_repository, tmp_path)) as runtime:
        job: Job[None] = Job("bands", lambda _job: None)
        job.cancel()
        runtime.reserve("bands").request_model(job)
        (device,) = runtime.devices.all
        assert device.loaded_models["bands"].active_request_count == 0


@pytest.mark.parametrize("operation", ["free memory", "unload"])
def test_loss_of_an_idle_device_is_detected(operation: str, bands_repository: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with run_ready_runtime(settings(bands_repository, tmp_path), driver=FaultyDriver(faults)) as runtime:
        (device,) = runtime.devices.all
        queue = device.scheduler.queue
        assert queue._memory._query_free_memory().device_bytes is not None
        (faults / "broken").touch()
        if operation == "unload":
            with pytest.raises(DeviceLost):
                device.scheduler.models.cache._after_unload("bands")
        else:
            # The device memory is unknown. Jobs may begin, and fail by themselves.
            assert queue._memory._query_free_memory().device_bytes is None
        wait_until(lambda: device.problem is not None)
        assert "has failed" in str(device.problem)
