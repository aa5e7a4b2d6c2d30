"""GET /gpu and GET /metrics: how the hardware and the process are doing."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from service.api.admission import RuntimeDependency
from service.api.schemas import DeviceReport, GpuReport
from service.core import hardware
from service.serving.metrics import CONTENT_TYPE

router = APIRouter(tags=["operation"])


@router.get("/gpu")
async def gpu(runtime: RuntimeDependency) -> GpuReport:
    """Every GPU with its memory, load and temperature, the processor, the devices in use, and each loaded model."""
    gpus = await asyncio.to_thread(hardware.gpus)
    models = {model.name: model.segmenter.report() for model in runtime.models if model.segmenter is not None}
    devices = [
        DeviceReport(
            name=station.name,
            waiting=station.queue.waiting,
            running=len(station.queue.running),
            models=sorted(station.residents.standings),
            loaded_bytes=station.loaded_bytes,
            problem=station.problem,
        )
        for station in runtime.stations
    ]
    found = (
        f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}." if gpus else "No NVIDIA GPU; models run on the CPU."
    )
    return GpuReport(message=found, gpus=list(gpus), cpu=hardware.cpu(), devices=devices, models=models)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(runtime: RuntimeDependency) -> Response:
    """Counters and stage times in Prometheus's text format."""
    return Response(await asyncio.to_thread(runtime.metrics.exposition), media_type=CONTENT_TYPE)
