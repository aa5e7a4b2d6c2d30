"""GET /gpu and GET /metrics: state of hardware and process."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from service.api.dependencies import RuntimeDependency
from service.api.schemas import DeviceReport, GpuReport, HostReport
from service.core import hardware
from service.serving.devices.device import Device, DeviceState, loaded_bytes
from service.serving.metrics import CONTENT_TYPE

router = APIRouter(tags=["operation"])


@router.get("/gpu")
async def gpu(runtime: RuntimeDependency) -> GpuReport:
    """Every GPU with its memory, load and temperature, the processor, the devices in use, and each loaded model."""
    gpus = await asyncio.to_thread(hardware.gpus)
    states = runtime.models.states()
    models = {state.name: state.device_model.report() for state in states if state.device_model is not None}
    message = (
        f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}." if gpus else "No NVIDIA GPU; models run on the CPU."
    )
    hosts = [HostReport(host=host.host, gpus=list(host.gpus), cpu=host.cpu) for host in runtime.devices.hosts]
    return GpuReport(
        message=message,
        gpus=list(gpus),
        cpu=hardware.cpu(),
        hosts=hosts,
        devices=[_describe(device) for device in runtime.devices.all],
        models=models,
    )


def _describe(device: Device) -> DeviceReport:
    queue = device.scheduler.queue
    return DeviceReport(
        name=device.name,
        host=device.host,
        waiting=queue.waiting,
        running=len(queue.running),
        models=sorted(device.loaded_models),
        loaded_bytes=loaded_bytes(device),
        problem=device.problem,
        given_back=device.state is DeviceState.GIVEN_BACK,
        starting=device.state is DeviceState.STARTING,
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(runtime: RuntimeDependency) -> Response:
    """Counters and stage times in Prometheus's text format."""
    return Response(await asyncio.to_thread(runtime.metrics.exposition), media_type=CONTENT_TYPE)
