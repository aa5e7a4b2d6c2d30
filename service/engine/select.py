"""Build the engine that the settings ask for, warm it up, and fall back to eager where it does not run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from service import config
from service.engine import compiled, cudagraph, eager, winograd
from service.networks import Network

# The first call compiles, the second records CUDA graphs, the third is the first that runs as all later ones do.
WARM_UP_CALLS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """A network that has run. `compile_mode` is None where nothing is compiled."""

    network: Network
    kind: str
    compile_mode: str | None
    seconds: float
    warnings: tuple[str, ...] = ()


def build(module: nn.Module, example: Tensor, settings: config.Engine) -> Engine:
    """`module` as `service.engine.prepare` leaves it, `example` [B, C, z, y, x] the one batch it will be called with.

    An engine that fails is replaced by the eager one, with a warning; an error of the eager one passes through.
    """
    kind = settings.kind
    if kind == "cudagraph" and example.device.type != "cuda":
        return _eager(module, example, "CUDA graphs need a CUDA device; running eagerly.")
    if kind == "winograd" and not (example.device.type == "cpu" and example.dtype == torch.float32):
        return _eager(module, example, "Winograd convolutions are for CPUs in float32; running eagerly.")
    if kind == "eager":
        return _eager(module, example)
    kinds = _preferred(module, example) if kind == "auto" else [kind]
    failures: list[str] = []
    for candidate in kinds:
        try:
            return _fast(module, example, settings, candidate)
        except (RuntimeError, OSError, ImportError) as error:
            reason = str(error).strip().splitlines()
            log.warning("the %s engine failed: %s", candidate, error)
            failures.append(f"The {candidate} engine failed: {reason[0][:300] if reason else type(error).__name__}")
    return _eager(module, example, *failures[:-1], f"{failures[-1]} (the model runs eagerly)")


def _preferred(module: nn.Module, example: Tensor) -> list[str]:
    """The engines to try, fastest first as a rule."""
    if example.device.type != "cpu" or example.dtype != torch.float32:
        return ["compiled"]
    return ["winograd", "compiled"] if winograd.candidates(module) else ["compiled"]


def _fast(module: nn.Module, example: Tensor, settings: config.Engine, kind: str) -> Engine:
    mode = compile_mode(settings, example.device)
    if kind == "winograd":
        module = winograd.accelerate(module)
    if kind == "cudagraph":
        began = time.perf_counter()
        network = cudagraph.make(module, example)
        return Engine(network, kind, None, time.perf_counter() - began + _warm_up(network, example))
    network = compiled.make(module, mode, freeze=settings.freeze and example.device.type == "cpu")
    return Engine(network, kind, mode, _warm_up(network, example))


def compile_mode(settings: config.Engine, device: torch.device) -> str:
    """`auto`: reduce-overhead where launches cost (CUDA), default elsewhere."""
    if settings.compile_mode != "auto":
        return settings.compile_mode
    return "reduce-overhead" if device.type == "cuda" else "default"


def _eager(module: nn.Module, example: Tensor, *warnings: str) -> Engine:
    network = eager.make(module)
    return Engine(network, "eager", None, _warm_up(network, example), warnings)


def _warm_up(network: Network, example: Tensor) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        for _ in range(WARM_UP_CALLS):
            network(example)
    if example.device.type == "cuda":
        torch.cuda.synchronize(example.device)
    return time.perf_counter() - began
