"""GET /gpu and GET /metrics: state of hardware and process."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from service.api.dependencies import RuntimeDependency
from service.api.schemas import DeviceReport, GpuReport, HostReport
from service.core.hardware.gpus import query_gpus
from service.core.hardware.host import query_cpu
from service.serving.metrics import CONTENT_TYPE

router = APIRouter(tags=["operation"])


@router.get("/gpu")
async def gpu(runtime: RuntimeDependency) -> GpuReport:
    """Every GPU with its memory, load and temperature, the processor, the devices in use, and each loaded model."""
    gpus = await asyncio.to_thread(query_gpus)
    models = {model.name: model.segmenter.report() for model in runtime.models.states() if model.segmenter is not None}
    devices = [
        DeviceReport(
            name=worker.name,
            host=worker.host,
            waiting=worker.queue.waiting,
            running=len(worker.queue.running),
            models=sorted(worker.loaded_models),
            loaded_bytes=worker.loaded_bytes,
            problem=worker.problem,
            given_back=worker.given_back,
            starting=worker.starting,
        )
        for worker in runtime.device_workers
    ]
    message = (
        f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}." if gpus else "No NVIDIA GPU; models run on the CPU."
    )
    hosts = [HostReport(host=host.host, gpus=list(host.gpus), cpu=host.cpu) for host in runtime.hosts]
    return GpuReport(message=message, gpus=list(gpus), cpu=query_cpu(), hosts=hosts, devices=devices, models=models)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(runtime: RuntimeDependency) -> Response:
    """Counters and stage times in Prometheus's text format."""
    return Response(await asyncio.to_thread(runtime.metrics.exposition), media_type=CONTENT_TYPE)
