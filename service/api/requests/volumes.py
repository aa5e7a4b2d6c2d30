"""Volumes that a client may view: uploaded stacks, files on the host, and the labels of finished jobs."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import Request

from service.api.dependencies import get_caller, get_quota_name, get_stacks
from service.api.http.waiting import run_while_connected
from service.core.types import CancellationCheck, Selection, Volume
from service.models.spec import ModelSpec
from service.serving.jobs.job_manager import JobManager
from service.serving.reading import read_with_reservation
from service.serving.results.conversion import read_labels
from service.serving.runtime import Runtime
from service.serving.storage.disk import translate_disk_errors
from service.serving.storage.threads import run_in_thread
from service.serving.storage.volume_cache import ReserveFunction, VolumeKey

ReadFunction = Callable[[Path, ReserveFunction, CancellationCheck], Volume]
"""Function that decodes a volume into an empty folder, after reserving disk space for it."""


async def open_stack_volume(request: Request, runtime: Runtime, stack: str, selection: Selection) -> Volume:
    """Return the selected part of an uploaded stack. Raises UnknownStack, and the errors of `_open_volume`."""
    stored_stack = await run_in_thread(partial(get_stacks(request).find, stack, get_caller(request)))

    def read(folder: Path, reserve: ReserveFunction, cancelled: CancellationCheck) -> Volume:
        return read_with_reservation(
            runtime.reader, stored_stack.path, selection, reserve, scratch=folder, cancelled=cancelled
        )

    return await _open_volume(request, runtime, VolumeKey(stack, selection), read)


async def open_label_volume(request: Request, runtime: Runtime, job: str, time: int | None) -> Volume:
    """Return the labels of a finished job. Raises the errors of `JobManager.open_result` and `_open_volume`."""
    async_jobs: JobManager = request.app.state.async_jobs
    file, metadata = await run_in_thread(partial(async_jobs.open_result, job, get_caller(request)))

    def read(folder: Path, reserve: ReserveFunction, cancelled: CancellationCheck) -> Volume:
        read_file = partial(
            read_with_reservation,
            runtime.reader,
            selection=Selection(time=time),
            scratch=folder,
            reserve=reserve,
            cancelled=cancelled,
        )
        return read_labels(read_file, file, metadata, folder)

    with file:
        return await _open_volume(request, runtime, VolumeKey(job, time), read)


async def open_sample(request: Request, runtime: Runtime, spec: ModelSpec) -> list[Volume]:
    """Return the sample of a model [C, Z, Y, X] and its labels [1, Z, Y, X]; only the sample if the labels do not fit.

    The model must have a sample. Raises the errors of `Reader.read` and `_open_volume`.
    """
    if spec.sample is None:
        raise ValueError(f"The model {spec.name} has no sample.")
    sample, labels = [
        await _open_volume(
            request,
            runtime,
            VolumeKey(f"model-{spec.folder}-{spec.weights.sha256}-{name}", Selection()),
            partial(_read_host_file, runtime, spec.folder / name),
        )
        for name in (spec.sample.input, spec.sample.expected)
    ]
    return [sample, labels] if sample.shape[1:] == labels.shape[1:] else [sample]


def _read_host_file(
    runtime: Runtime, path: Path, folder: Path, reserve: ReserveFunction, cancelled: CancellationCheck
) -> Volume:
    return read_with_reservation(
        runtime.reader, path, Selection(), reserve, scratch=folder, is_shared=True, cancelled=cancelled
    )


@asynccontextmanager
async def open_host_volume(
    request: Request, runtime: Runtime, location: str, selection: Selection
) -> AsyncIterator[Volume]:
    """Context manager that opens the selected part of a file on the host or of a remote store.

    The volume is not cached, because other programs may change the file. Raises the errors of `HostFiles.open_input`
    and `_open_volume`.
    """
    key = VolumeKey(f"host-{uuid.uuid4()}", selection)

    def read(folder: Path, reserve: ReserveFunction, cancelled: CancellationCheck) -> Volume:
        with runtime.host_files.open_input(location, get_caller(request)) as source:
            return read_with_reservation(
                runtime.reader.for_client(get_quota_name(request)),
                source.path,
                selection,
                reserve,
                scratch=folder,
                is_shared=True,
                cancelled=cancelled,
            )

    try:
        yield await _open_volume(request, runtime, key, read)
    finally:
        runtime.volume_cache.discard(key.source_id)


async def _open_volume(request: Request, runtime: Runtime, key: VolumeKey, read: ReadFunction) -> Volume:
    """Return the cached volume for a key, or decode the volume in a decoder thread.

    Raises the same errors as `read` and `VolumeCache.get_or_read`, and Cancelled if the client disconnects.
    """
    if (volume := runtime.volume_cache.find(key)) is not None:
        return volume
    cancelled = threading.Event()

    def decode(reserve: ReserveFunction) -> Volume:
        folder = runtime.scratch.make_request_folder()
        try:
            return read(folder, reserve, cancelled.is_set)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    with translate_disk_errors():
        client = get_quota_name(request)
        open_volume = partial(runtime.volume_cache.get_or_read, key, client, runtime.scratch_space, decode)
        threads = runtime.decode_threads.for_client(client)
        return await run_while_connected(request, run_in_thread(open_volume, threads, cancelled))
