from __future__ import annotations

from pathlib import Path

import pytest
from fakes import until
from faulty_server import FaultyDevice
from runtimes import ready, settings

from service.core.errors import DeviceLost
from service.core.hardware import host
from service.serving.devices.local.settings import split_settings
from service.serving.devices.queue.job import Job


def test_threads_of_the_processor_are_shared_by_its_workers(bands_repository: Path, tmp_path: Path) -> None:
    chosen = settings(bands_repository, tmp_path, device={"serve": ["cpu", "cpu"]})
    found = split_settings(chosen)
    assert [name for name, _ in found] == ["cpu", "cpu-2"]
    cores = host.usable_cores()
    assert all(1 <= own.device.threads <= max(cores // 2, 1) for _, own in found)
    assert split_settings(settings(bands_repository, tmp_path)) == [(None, settings(bands_repository, tmp_path))]


def test_job_that_was_cancelled_meanwhile_keeps_no_model(bands_repository: Path, tmp_path: Path) -> None:
    with ready(settings(bands_repository, tmp_path)) as runtime:
        job: Job[None] = Job("bands", lambda _job: None)
        job.cancel()
        runtime.reserve("bands").take(job)
        (device,) = runtime.devices.all
        assert device.loaded_models["bands"].users == 0


@pytest.mark.parametrize("lose", ["ask for memory", "unload"])
def test_device_that_is_lost_without_a_request_is_lost(lose: str, bands_repository: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with ready(settings(bands_repository, tmp_path), driver=FaultyDevice(faults)) as runtime:
        (device,) = runtime.devices.all
        queue = device.scheduler.queue
        assert queue._memory._ask().device is not None
        (faults / "broken").touch()
        if lose == "unload":
            with pytest.raises(DeviceLost):
                device.scheduler.models.cache._unloaded("bands")
        else:
            # Its jobs go on, to fail by themselves.
            assert queue._memory._ask().device is None
        until(lambda: device.problem is not None)
        assert "has failed" in str(device.problem)
