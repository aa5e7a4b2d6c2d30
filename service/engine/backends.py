"""Which engines there are, which choices the settings leave, and how one choice becomes a network that has run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.core import config, hardware
from service.engine import cuda_graph, eager, openvino, tensorrt, torch_compile
from service.engine.cpu import cpu_graph, onednn, winograd
from service.engine.plans import EngineConfig
from service.engine.precision import DTYPES
from service.engine.prepare import Float32Scores
from service.models.loader import Network, weight_bytes

# Seconds that torch.compile takes on a slow machine.
SLOW_COMPILATION = 30.0

# The first call compiles, the second records CUDA graphs, the third is the first that runs as all later ones do.
WARM_UP_CALLS = 3

FORMATS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}

Make = Callable[[nn.Module, Tensor, EngineConfig, config.Engine], Network]
BOTH = ("channels_last_3d", "contiguous")


def _present() -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One engine.

    make       prepared module, the batch it will be called with, choice and settings -> network
    formats    memory formats to try by device type, the most promising first; a type that is missing has no such engine
    transform  applied to the prepared module first
    suits      whether it makes anything of a module that others do not
    compiles   by torch.compile, and so in one of its modes
    optional   whether it runs without torch.compile as well, and does so unless a mode is asked for
    precisions that it computes, of those that the device has
    float32    batch and weights stay float32; `precision` is a hint to the engine
    packs      whether it keeps weights in a layout of its own, beside those of the module
    divides    whether it divides the cores among streams itself, and so is made for a number of them
    any_batch  whether it may take fewer windows than it was made for, unless it was compiled
    slow_build seconds that making it takes on a slow machine, torch.compile left out: not begun with less time left
    missing    why it cannot be used here, None where it can
    caution    what everybody who uses it is told
    """

    make: Make
    formats: dict[str, tuple[str, ...]]
    transform: Callable[[nn.Module], nn.Module] = lambda module: module
    suits: Callable[[nn.Module], bool] = lambda _module: True
    compiles: bool = False
    optional: bool = False
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    float32: bool = False
    packs: bool = False
    divides: bool = False
    any_batch: bool = False
    slow_build: float = 5.0
    missing: Callable[[], str | None] = _present
    caution: str | None = None


def _make_eager(module: nn.Module, _example: Tensor, _choice: EngineConfig, _settings: config.Engine) -> Network:
    return eager.make(module)


def _make_compiled(module: nn.Module, example: Tensor, choice: EngineConfig, settings: config.Engine) -> Network:
    freeze = settings.freeze and example.device.type == "cpu"
    return torch_compile.make(module, choice.compile_mode or "default", freeze=freeze)


def _make_winograd(module: nn.Module, example: Tensor, choice: EngineConfig, settings: config.Engine) -> Network:
    if choice.compile_mode is not None:
        return _make_compiled(module, example, choice, settings)
    # Blending widens scores where it reads them: a float32 copy of them would be written and read for nothing.
    scores = module.network if isinstance(module, Float32Scores) else module
    return cpu_graph.make(onednn.pack(scores, scores=True), example)


def _make_cudagraph(module: nn.Module, example: Tensor, _choice: EngineConfig, _settings: config.Engine) -> Network:
    return cuda_graph.make(module, example)


def _make_openvino(module: nn.Module, example: Tensor, choice: EngineConfig, _settings: config.Engine) -> Network:
    return openvino.make(module, example, choice.precision, choice.streams)


def _make_tensorrt(module: nn.Module, example: Tensor, _choice: EngineConfig, settings: config.Engine) -> Network:
    return tensorrt.make(module, example, tf32=settings.matmul_precision != "highest")


KINDS: dict[str, Backend] = {
    "winograd": Backend(
        _make_winograd,
        {"cpu": ("channels_last_3d",)},
        transform=winograd.accelerate,
        suits=lambda module: winograd.candidates(module) > 0,
        precisions=("bf16", "fp32"),
        compiles=True,
        optional=True,
        any_batch=True,
    ),
    "openvino": Backend(
        _make_openvino,
        {"cpu": ("contiguous",)},
        float32=True,
        packs=True,
        divides=True,
        slow_build=15.0,
        missing=openvino.missing,
    ),
    "cudagraph": Backend(_make_cudagraph, {"cuda": BOTH}),
    # On the CPU inductor lays convolutions out by itself, and the input's format matters little.
    "compiled": Backend(_make_compiled, {"cpu": ("channels_last_3d",), "cuda": BOTH}, compiles=True),
    "tensorrt": Backend(
        _make_tensorrt,
        {"cuda": ("contiguous",)},
        packs=True,
        slow_build=60.0,
        missing=tensorrt.missing,
        caution=tensorrt.UNTESTED,
    ),
    "eager": Backend(_make_eager, {"cpu": BOTH, "cuda": BOTH}),
}
"""In the order in which they are tried: first what is fast and quickly made, so that what is slow soon falls behind."""


class Built(NamedTuple):
    """A network that has run.

    seconds      making it and the first calls
    nbytes       of weights beside the module's, and of what each stream keeps
    elastic      whether it gives the same scores, to the bit, for fewer windows than the batch has, in all its streams
    lasting      whether its scores stay what they are after the next call
    score_bytes  of one window, where that is all that a forward takes beside what its stream keeps; None: it takes more
    """

    network: Network
    seconds: float
    nbytes: int = 0
    any_batch_size: bool = False
    owns_scores: bool = False
    score_bytes: int | None = None


def choices(
    settings: config.Engine, device: torch.device, precisions: tuple[str, ...], batch_size: int
) -> tuple[EngineConfig, ...]:
    """Everything that the settings leave open, in the order in which it is worth trying.

    precisions  to try, the narrowest first
    batch_size  windows per call of all of them
    """
    found = []
    kinds = KINDS if settings.kind == "auto" else {settings.kind: KINDS[settings.kind]}
    for name, kind in kinds.items():
        modes = compile_modes(settings, kind, device)
        able = (precision for precision in precisions if precision in kind.precisions)
        for precision, mode, memory_format in itertools.product(able, modes, memory_formats(settings, kind, device)):
            found.append(EngineConfig(name, precision, memory_format, batch_size, mode))
    return tuple(found)


def unfit(kind: Backend, name: str, device: torch.device, network: nn.Module) -> str | None:
    """Why an engine cannot or need not run `network` there in the precision of that name, None where it may."""
    if device.type not in kind.formats:
        return "needs " + " or ".join("a CUDA device" if place == "cuda" else "a CPU" for place in kind.formats)
    if name not in kind.precisions:
        return f"does not compute in {name}"
    return None if kind.suits(network) else "changes nothing in this network"


def memory_formats(settings: config.Engine, kind: Backend, device: torch.device) -> tuple[str, ...]:
    """Those of one engine that the settings allow, none where it does not run on such a device."""
    own = kind.formats.get(device.type, ())
    if settings.channels_last == "auto" or kind.float32 or not own:
        return own
    return ("channels_last_3d" if settings.channels_last else "contiguous",)


def compile_modes(settings: config.Engine, kind: Backend, device: torch.device) -> tuple[str | None, ...]:
    """`auto`: where launches cost (CUDA) reduce-overhead, then max-autotune; default elsewhere. None: not compiled."""
    if not kind.compiles:
        return (None,)
    if settings.compile_mode != "auto":
        return (settings.compile_mode,)
    if device.type == "cuda":
        return ("reduce-overhead", "max-autotune") if settings.kind == "auto" else ("reduce-overhead",)
    return (None, "default") if kind.optional else ("default",)


def slow_build(choice: EngineConfig) -> float:
    """Seconds that making it takes on a slow machine."""
    return KINDS[choice.engine].slow_build if choice.compile_mode is None else SLOW_COMPILATION


def one_at_a_time(choice: EngineConfig, settings: config.Engine) -> bool:
    """Whether only one batch may be computed at a time: torch.compile's guards want the threads that were there."""
    return choice.compile_mode is not None and not settings.freeze


def batch_dtype(choice: EngineConfig) -> torch.dtype:
    """What the engine's input and weights are stored in."""
    return torch.float32 if KINDS[choice.engine].float32 else DTYPES[choice.precision]


def build(module: nn.Module, example: Tensor, choice: EngineConfig, settings: config.Engine) -> Built:
    """`module` as `service.engine.prepare` leaves it, `example` [B, C, z, y, x] the one batch it will be called with.

    Raises RuntimeError, OSError or ImportError where this engine does not run here.
    """
    kind = KINDS[choice.engine]
    if (reason := kind.missing()) is not None:
        raise ImportError(reason)
    began = time.perf_counter()
    with torch.inference_mode():
        transformed = kind.transform(module)
        # Now, as engines may take weights out of it, in a layout whose bytes nobody tells.
        nbytes = weight_bytes(transformed)
        network = kind.make(transformed, example, choice, settings)
        owns_scores = _warmed_up(network, example)
        any_batch_size = (
            kind.any_batch and choice.compile_mode is None and takes_any_batch_size(network, example, choice.streams)
        )
    if example.device.type == "cuda":
        torch.cuda.synchronize(example.device)
    frozen = choice.compile_mode is not None and settings.freeze and example.device.type == "cpu"
    own = (transformed is not module) + (kind.packs or frozen)
    nbytes = own * nbytes + choice.streams * cpu_graph.kept(network)
    return Built(
        network, time.perf_counter() - began, nbytes, any_batch_size, owns_scores, cpu_graph.score_bytes(network)
    )


def takes_any_batch_size(network: Network, example: Tensor, streams: int) -> bool:
    """Whether each smaller batch gives what it gives within the whole one, however many of `streams` share the cores.

    Libraries choose their algorithms by the number of threads.
    """
    if len(example) == 1:
        return True
    cores = torch.get_num_threads()

    def check(threads: int) -> bool:
        hardware.use_threads(threads)
        return _takes_any_batch_size(network, example)

    # All cores come last: threads that have not asked yet take the number that was set last.
    numbers = sorted({max(cores // among, 1) for among in range(1, streams + 1)})
    with ThreadPoolExecutor(1, "any_batch_size") as crew:
        checked = list(crew.map(check, numbers))
    return all(checked)


@torch.inference_mode()
def _takes_any_batch_size(network: Network, example: Tensor) -> bool:
    generator = torch.Generator(example.device).manual_seed(0)
    batch = torch.empty_like(example).uniform_(generator=generator)
    scores = network(batch).clone()
    return all(torch.equal(network(batch[:length]), scores[:length]) for length in range(1, len(batch)))


def _warmed_up(network: Network, example: Tensor) -> bool:
    """Call it until it runs as it always will; whether every call gives scores in memory of their own."""
    if example.device.type != "cpu":
        # What is still held is in the way of graphs that are recorded.
        for _ in range(WARM_UP_CALLS):
            network(example)
        return False
    tensors = [example, *(network(example) for _ in range(WARM_UP_CALLS))]
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def first_line(error: BaseException) -> str:
    """What is worth showing of an error that a foreign library raised."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
