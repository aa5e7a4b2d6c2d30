"""Responses to inference requests: a JSON object, which the values of the output may follow as binary data."""

from __future__ import annotations

import json
import math
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.dependencies import get_quota_name
from service.api.kserve.body import LENGTH_HEADER, WINDOW_BITS
from service.api.kserve.messages import OUTPUT_DATATYPES, InferenceRequest
from service.api.kserve.tensors import DTYPES
from service.api.messages.headers import get_header
from service.api.messages.result_headers import build_headers
from service.api.requests.downloads import build_response
from service.core.errors import BadParameter
from service.core.types import Array, Selection, Volume
from service.serving.reading import read_with_reservation
from service.serving.results.conversion import read_labels
from service.serving.results.metadata import ResultMetadata
from service.serving.runtime import Runtime
from service.serving.segmentation import StackResult
from service.serving.storage.disk import translate_disk_errors
from service.serving.storage.threads import run_in_thread

# Maximum number of values in a JSON object.
MAX_JSON_VALUES = 2**22
# End of a JSON object after the values.
JSON_END = b"]}]}"
# Approximate size of the parts of a response.
CHUNK_BYTES = 2**20


def check_json_values(count: int) -> None:
    """Raise BadParameter if an output has too many values for a JSON object."""
    if count > MAX_JSON_VALUES:
        raise BadParameter(
            f"outputs: an output with more than {MAX_JSON_VALUES:,} values must be binary. Set binary_data to true in"
            " the parameters of the output.",
            parameter="outputs",
        )


class OutputTensor(NamedTuple):
    """An output: the pixels of a result in the datatype that the model declares.

    shape  [Z, Y, X], or [K, Z, Y, X] for probabilities
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    volume: Volume

    @classmethod
    def from_volume(cls, metadata: ResultMetadata, volume: Volume) -> OutputTensor:
        """Return the output for a result, whose pixels are read from `volume`."""
        shape = volume.shape if metadata.kind == "probabilities" else volume.shape[1:]
        return cls(metadata.kind, OUTPUT_DATATYPES[metadata.kind], shape, volume)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * DTYPES[self.datatype].itemsize

    def read_blocks(self) -> Iterator[Array]:
        """Yield the values in C order, in blocks of about `CHUNK_BYTES`, or of one plane if that is larger."""
        channel_count, plane_count, *plane_shape = self.volume.shape
        dtype = DTYPES[self.datatype]
        step = max(CHUNK_BYTES // (math.prod(plane_shape) * dtype.itemsize), 1)
        for channel in range(channel_count):
            for z in range(0, plane_count, step):
                block = self.volume.read(z, min(z + step, plane_count))[channel]
                yield np.ascontiguousarray(block, dtype)


async def build_inference_response(
    request: Request, runtime: Runtime, message: InferenceRequest, stack: StackResult
) -> InferenceResponse:
    """Return the response with the result for a tensor. Raises the errors of `read_with_reservation`."""
    result = build_response(stack.path, stack.metadata, stack.content, stack.file_status)
    with translate_disk_errors(), ExitStack() as exit_stack:
        if stack.file is not None:
            exit_stack.callback(stack.file.close)
        file = exit_stack.enter_context(await run_in_thread(result.open))
        space = exit_stack.enter_context(runtime.scratch_space.make_reservation(get_quota_name(request)))
        folder = runtime.scratch.make_request_folder()
        exit_stack.callback(partial(shutil.rmtree, folder, ignore_errors=True))
        cancelled = threading.Event()
        read_file = partial(
            read_with_reservation,
            runtime.reader,
            selection=Selection(),
            reserve=space.reserve,
            scratch=folder,
            cancelled=cancelled.is_set,
        )
        read = partial(read_labels, read_file, file, stack.metadata, folder)
        volume = await run_in_thread(read, runtime.decode_threads.for_client(space.client), cancelled)
        output = OutputTensor.from_volume(stack.metadata, volume)
        if not message.is_output_binary:
            check_json_values(math.prod(output.shape))
        response = InferenceResponse(message, stack.metadata, output)
        if stack.cache_status is not None:
            response.headers["X-Cache"] = stack.cache_status
        response.resources.callback(exit_stack.pop_all().close)
        return response


class InferenceResponse(Response):
    """Response that reads and sends the values of an output in parts, and then closes `resources`, even after an error.

    It is compressed if the client accepts nothing but one of the encodings gzip and deflate, as clients of Triton do.
    Other clients offer these encodings without a need for them.
    """

    def __init__(self, message: InferenceRequest, metadata: ResultMetadata, output: OutputTensor) -> None:
        super().__init__(headers=build_headers(metadata))
        self.resources = AsyncExitStack()
        self._is_binary = message.is_output_binary
        self._output = output
        self._json = json.dumps(_describe_result(message, metadata, output)).encode()
        if self._is_binary:
            self.headers[LENGTH_HEADER] = str(len(self._json))
        self.headers["content-type"] = "application/octet-stream" if self._is_binary else "application/json"

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        encoding = get_header(scope, b"accept-encoding").strip().lower()
        chunks = self._iterate_binary() if self._is_binary else self._iterate_json()
        if encoding in WINDOW_BITS:
            self.headers["content-encoding"] = encoding
            chunks = _compress(chunks, WINDOW_BITS[encoding])
        del self.headers["content-length"]
        if self._is_binary and encoding not in WINDOW_BITS:
            self.headers["content-length"] = str(len(self._json) + self._output.nbytes)
        async with self.resources:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (chunk := await run_in_thread(partial(next, chunks, None))) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _iterate_binary(self) -> Iterator[bytes]:
        yield self._json
        for block in self._output.read_blocks():
            content = block.reshape(-1).view(np.uint8).data
            for start in range(0, len(content), CHUNK_BYTES):
                yield bytes(content[start : start + CHUNK_BYTES])

    def _iterate_json(self) -> Iterator[bytes]:
        yield self._json[: -len(JSON_END)]
        separator = b""
        for block in self._output.read_blocks():
            yield separator + json.dumps(block.ravel().tolist())[1:-1].encode()
            separator = b", "
        yield JSON_END


def _describe_result(message: InferenceRequest, metadata: ResultMetadata, output: OutputTensor) -> dict[str, Any]:
    """Return the JSON object of a response, which ends with `JSON_END` if the values belong in it."""
    name, _, version = metadata.model.partition("/")
    tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
    if message.is_output_binary:
        tensor["parameters"] = {"binary_data_size": output.nbytes}
    else:
        tensor["data"] = []
    voxel_size = metadata.voxel_size
    parameters = {
        "objects": metadata.objects,
        "confidence": metadata.confidence,
        "voxel_size": None if voxel_size is None else ",".join(f"{size:.10g}" for size in voxel_size),
        "diameter": metadata.diameter,
        "warning": None if metadata.doubt is None else metadata.doubt["detail"],
        "try": None if metadata.doubt is None else metadata.doubt["try"],
        "note": " ".join(metadata.notes) or None,
    }
    return {
        **({} if message.id is None else {"id": message.id}),
        "model_name": name,
        "model_version": version,
        "parameters": {key: value for key, value in parameters.items() if value is not None},
        "outputs": [tensor],
    }


def _compress(chunks: Iterator[bytes], window_bits: int) -> Iterator[bytes]:
    """Compress chunks with the fastest level. Labels are repetitive, so a higher level gains little."""
    compressor = zlib.compressobj(1, wbits=window_bits)
    for chunk in chunks:
        if compressed := compressor.compress(chunk):
            yield compressed
    yield compressor.flush()
