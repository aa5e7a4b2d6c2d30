"""Registry of engines: list the configurations that the settings allow, and build one of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from service.core.hardware import devices
from service.core.sections.computing import Engine as EngineSettings
from service.engine.base import ALL_MEMORY_FORMATS, Backend, DeviceBuild
from service.engine.compile.torch_compile import TorchCompileBackend, explain_missing_compiler
from service.engine.cpu.backend import CpuBuild, WinogradBackend
from service.engine.cuda.graph import CudaBuild, CudaGraphBackend
from service.engine.openvino import OpenVinoBackend
from service.engine.precision import DTYPES
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network, count_weight_bytes

# Errors raised by an engine that cannot run a network. Inductor's CUDA graphs report problems as assertion errors.
ENGINE_ERRORS = (RuntimeError, OSError, ImportError, AssertionError)

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}


class EagerBackend(Backend):
    """PyTorch eager execution, the reference for other engines and the fallback if none of them works."""

    memory_formats: ClassVar = {"cpu": ALL_MEMORY_FORMATS, "cuda": ALL_MEMORY_FORMATS}

    def build(self, module: nn.Module, /, *_: object) -> Network:
        """Return the module itself: [B, C, z, y, x] -> float32 [B, K, z, y, x]."""
        return module


# Engines by `engine.kind`, in the order in which they are tried.
BACKENDS: dict[str, Backend] = {
    "winograd": WinogradBackend(),
    "openvino": OpenVinoBackend(),
    "cudagraph": CudaGraphBackend(),
    "compiled": TorchCompileBackend(),
    "eager": EagerBackend(),
}


class BuiltNetwork(NamedTuple):
    """A network that was built and warmed up.

    seconds                  time for building and the warm-up calls
    nbytes                   size in bytes of the buffers of all streams, and of weights held in addition to the
                             module's
    accepts_partial_batches  whether smaller batches give bit-identical scores in all streams
    owns_scores              whether returned scores stay valid after the next call
    score_bytes              size in bytes of one window's scores if a forward pass allocates nothing else outside the
                             buffers of its stream; otherwise None
    """

    network: Network
    seconds: float
    nbytes: int = 0
    accepts_partial_batches: bool = False
    owns_scores: bool = False
    score_bytes: int | None = None


def list_configs(
    settings: EngineSettings, device: torch.device, precisions: tuple[str, ...], batch_size: int
) -> tuple[EngineConfig, ...]:
    """Return every configuration that the settings allow, the most promising first.

    precisions  precisions to try, with the narrowest one first
    batch_size  number of windows per call, for all configurations
    """
    configs = []
    backends = BACKENDS if settings.kind == "auto" else {settings.kind: BACKENDS[settings.kind]}
    for name, backend in backends.items():
        modes = backend.list_compile_modes(settings, device)
        supported_precisions = (precision for precision in precisions if precision in backend.precisions)
        for precision, mode, memory_format in itertools.product(
            supported_precisions, modes, backend.list_allowed_formats(settings, device)
        ):
            configs.append(EngineConfig(name, precision, memory_format, batch_size, mode))
    return tuple(configs)


def list_quick_configs(configs: Sequence[EngineConfig], features: Sequence[str]) -> list[EngineConfig]:
    """Return the configurations that build within seconds and are usually fast, the fastest first.

    configs   configurations from `list_configs`
    features  instruction sets of the processor, as in `HostStatus.features`
    """
    quick_configs = [config for config in configs if config.engine not in {"compiled", "eager"}]
    # The first configuration of an engine and precision is the most promising one.
    first_configs = {(config.engine, config.precision): config for config in reversed(quick_configs)}
    # On processors with AMX, OpenVINO's bfloat16 convolutions (oneDNN) are faster than StackSeg's kernels.
    preferred_engine = ("openvino", "bf16") if "amx_bf16" in features else None
    return sorted(
        first_configs.values(),
        key=lambda config: ((config.engine, config.precision) != preferred_engine, quick_configs.index(config)),
    )


def explain_unavailability(config: EngineConfig, device: torch.device) -> str | None:
    """Return why a configuration cannot be built on this machine, or None if it can."""
    reason = BACKENDS[config.engine].explain_unavailability()
    needs_compiler = config.compile_mode is not None and device.type == "cpu"
    return explain_missing_compiler() if reason is None and needs_compiler else reason


def needs_single_stream(config: EngineConfig, settings: EngineSettings) -> bool:
    """Return whether only one batch may run at a time, because torch.compile's guards fix the number of threads."""
    return config.compile_mode is not None and not settings.freeze


def get_batch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of the engine's input and weights."""
    return torch.float32 if BACKENDS[config.engine].uses_float32_batches else DTYPES[config.precision]


def build(module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings) -> BuiltNetwork:
    """Build a network from a module that `service.engine.prepare` has prepared, and warm it up.

    example  batch [B, C, z, y, x] with the shape, dtype and layout of all later batches

    Raises one of `ENGINE_ERRORS` if the engine cannot run the module on this machine.
    """
    backend = BACKENDS[config.engine]
    if (reason := explain_unavailability(config, example.device)) is not None:
        raise ImportError(reason)
    start_time = time.perf_counter()
    device_build: DeviceBuild = CudaBuild(example.device) if example.device.type == "cuda" else CpuBuild()
    with torch.inference_mode():
        transformed_module = backend.transform(module, settings)
        # Count the bytes before building, because engines may move weights into a layout whose size cannot be read, and
        # after the first calls, in which layers may pack weights.
        unbuilt_bytes = count_weight_bytes(transformed_module)
        network = backend.build(transformed_module, example, config, settings)
        owns_scores = device_build.warm_up(network, example)
        module_bytes = max(unbuilt_bytes, count_weight_bytes(transformed_module))
        may_accept_smaller_batches = backend.accepts_smaller_batches and config.compile_mode is None
        accepts_partial_batches = may_accept_smaller_batches and supports_smaller_batches(
            network, example, config.streams
        )
    is_frozen = config.compile_mode is not None and settings.freeze and example.device.type == "cpu"
    copy_count = (transformed_module is not module) + (backend.packs_weights or is_frozen)
    nbytes = copy_count * module_bytes + device_build.count_buffer_bytes(network, config.streams)
    score_bytes = device_build.count_score_bytes(network)
    seconds = time.perf_counter() - start_time
    return BuiltNetwork(network, seconds, nbytes, accepts_partial_batches, owns_scores, score_bytes)


def supports_smaller_batches(network: Network, example: Tensor, stream_count: int) -> bool:
    """Return whether windows get the same scores in a smaller batch as in a full one, in up to `stream_count` streams.

    The check runs with every number of threads that a stream may have, because libraries choose algorithms based on
    that number.
    """
    if len(example) == 1:
        return True
    total_threads = torch.get_num_threads()

    def check_with_threads(thread_count: int) -> bool:
        devices.set_torch_threads(thread_count)
        return _matches_smaller_batches(network, example)

    # The total number of threads comes last, because threads that have not yet read the setting use the last value.
    thread_counts = sorted({max(total_threads // count, 1) for count in range(1, stream_count + 1)})
    with ThreadPoolExecutor(1, "accepts_partial_batches") as executor:
        check_results = list(executor.map(check_with_threads, thread_counts))
    return all(check_results)


@torch.inference_mode()
def _matches_smaller_batches(network: Network, example: Tensor) -> bool:
    generator = torch.Generator(example.device).manual_seed(0)
    batch = torch.empty_like(example).uniform_(generator=generator)
    scores = network(batch).clone()
    return all(torch.equal(network(batch[:length]), scores[:length]) for length in range(1, len(batch)))


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error message from a library, or the name of the exception if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
