"""Building of networks that are ready to run, for one model on one device in any engine configuration."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn

from service.core.config import Settings
from service.core.hardware import devices, host
from service.core.hardware.devices import Driver
from service.core.telemetry import step
from service.engine import backends
from service.engine.cuda import tf32
from service.engine.prepare import prepare
from service.engine.tuning.plans import EngineConfig, EnginePlan
from service.inference.runner.label_agreement import MAX_WRONG_FRACTION, LabelAgreement
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow
from service.models.network import Network
from service.models.spec import ModelSpec

log = logging.getLogger(__name__)


# Default number of windows per call. On a CPU, one window is the slowest choice, because ATen has a slow path for small
# batches. A GPU needs several to be fully used; 11 windows of 64 voxels are one row of a 512 x 512 plane, so that no
# slot stays empty.
CPU_BATCH = 2
CUDA_BATCH = 11
# Default number of concurrent batches on a CPU: two streams of half the cores wait less than one stream of all.
CPU_STREAMS = 2


@dataclass(frozen=True)
class ReadyEngine:
    """Network that is ready to run, and how it was built.

    window       runs the network
    module       prepared module that it was built from, which runs eagerly with other batch sizes
    config       configuration of the engine
    seconds      time until the engine was ready, including the trials of others
    plan         how the engine was chosen; None if it is fixed by the settings
    cached       whether the plan is from an earlier start
    nbytes       bytes of weights that the engine holds in addition to the module's, and of the buffers of its streams
    score_bytes  bytes for one window, as in `backends.BuiltNetwork`
    """

    window: SlidingWindow
    module: nn.Module
    config: EngineConfig
    seconds: float
    warnings: tuple[str, ...] = ()
    plan: EnginePlan | None = None
    cached: bool = False
    nbytes: int = 0
    score_bytes: int | None = None


class EngineBuilder:
    """Builds any engine configuration for one model on one device.

    network       network as loaded, float32 on the CPU
    window_bytes  bytes of its float32 activations for one window
    native        dtypes to consider; None: those that the device supports in hardware
    faulty        supported dtypes to avoid, with the reason; None: those of `devices.faulty_precisions`
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        spec: ModelSpec,
        settings: Settings,
        device: torch.device,
        network: nn.Module,
        window_bytes: int,
        native: frozenset[torch.dtype] | None = None,
        driver: Driver = devices,
        faulty: Mapping[torch.dtype, str] | None = None,
    ) -> None:
        self._spec, self._settings, self._device = spec, settings, device
        self._network, self._window_bytes, self._driver = network, window_bytes, driver
        self._native = devices.native_precisions(device) if native is None else native
        self._faulty = devices.faulty_precisions(device) if faulty is None else faulty
        self._batch_size, self._streams = default_batch_size(settings, device), default_streams(settings, device)
        tf32.configure(settings.engine, device)

    def build(self, config: EngineConfig, *warnings: str) -> ReadyEngine:
        """Build a configuration. `warnings` are added to the result.

        Raises one of `backends.ENGINE_ERRORS` if the configuration does not run.
        """
        with step(f"building {config}"):
            module = self.module(config)
            window = self.sliding_window(module, config, config.sw_batch_size)
            built = backends.build(module, window.batch, config, self._settings.engine)
        window = window.with_network(
            built.network, accepts_any_batch_size=built.accepts_any_batch_size, owns_scores=built.owns_scores
        )
        ready = ReadyEngine(window, module, config, built.seconds, warnings)
        return replace(ready, nbytes=built.nbytes, score_bytes=built.score_bytes)

    def module(self, config: EngineConfig) -> nn.Module:
        """Prepare the module from which a configuration is built."""
        memory_format = backends.MEMORY_FORMATS[config.memory_format]
        return prepare(self._network, self._device, backends.get_batch_dtype(config), memory_format)

    def reference(self, batch_size: int) -> SlidingWindow:
        """Return windows for the network exactly as loaded: eager, float32 without TF32, and without folded layers."""
        network: Network = copy.deepcopy(self._network).to(self._device)
        if self._device.type == "cuda":
            network = tf32.without_tf32(network)
        return self.sliding_window(network, EngineConfig("eager", "fp32", "contiguous", batch_size), batch_size)

    def sliding_window(self, network: Network, config: EngineConfig, batch_size: int) -> SlidingWindow:
        """Return windows for `network` as configured. Batches smaller than the configured one have a single stream."""
        windows = self._settings.windows
        # MONAI blends the windows itself, and needs the unweighted scores of each.
        mode = "constant" if windows.inferer == "monai" else windows.blending
        return SlidingWindow(
            network,
            self._spec.input.channels,
            self._spec.input.roi_size,
            batch_size,
            blending=Blending(mode, windows.sigma),
            device=self._device,
            dtype=backends.get_batch_dtype(config),
            memory_format=backends.MEMORY_FORMATS[config.memory_format],
            streams=config.streams if batch_size >= config.sw_batch_size else 1,
        )

    def eager_config(self, name: str) -> EngineConfig:
        """Return the configuration that runs eagerly in the precision `name`."""
        memory_format = backends.BACKENDS["eager"].allowed_formats(self._settings.engine, self._device)[0]
        return EngineConfig("eager", name, memory_format, self._batch_size, streams=self._streams)

    def make_agreement(self) -> LabelAgreement:
        """Return the comparison with FP32. On devices other than the CPU, it also compares a full batch.

        There, the reference computes one window at a time, because some library bugs affect only large batches.
        """
        on_host = self._driver.is_on_host(self._device)
        windows = self._batch_size if on_host else 1
        return LabelAgreement(self._spec, self._device, lambda: self.reference(windows), full_batch=not on_host)

    def with_window(self, spec: ModelSpec, window_bytes: int) -> Self:
        """Return a builder for the same network with the window of `spec`."""
        other = copy.copy(self)
        other._spec, other._window_bytes = spec, window_bytes
        return other

    def rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        """Build a configuration for another window or batch size within seconds, without compiling anything.

        On devices other than the CPU, a full batch is compared with FP32, because libraries may choose other algorithms
        for a larger window. If the scores differ, the network runs eagerly in FP32.

        Raises one of `backends.ENGINE_ERRORS` if the network does not run eagerly either.
        """
        ready = self._rebuild(config, batch_size)
        if ready.config.precision == "fp32" or self._driver.is_on_host(self._device):
            return ready
        difference = self.make_agreement().batch_difference(ready.window)
        if difference <= MAX_WRONG_FRACTION:
            return ready
        problem = "not finite" if math.isnan(difference) else f"wrong at {difference:.2%} of the voxels of a window"
        size = "x".join(map(str, self._spec.input.roi_size))
        finding = f"{self._spec.identifier} with windows of {size} in {ready.config} returned scores that are {problem}"
        log.warning("%s. It runs eagerly in fp32 instead.", finding)
        del ready
        return _require_same_size(self.build(replace(self.eager_config("fp32"), sw_batch_size=batch_size)))

    def _rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        config = replace(config, sw_batch_size=batch_size)
        if config.compile_mode is not None:
            engine = "cudagraph" if self._device.type == "cuda" else "eager"
            config = replace(config, engine=engine, compile_mode=None)
        try:
            return _require_same_size(self.build(config))
        except backends.ENGINE_ERRORS as error:
            if config.engine == "eager":
                raise
            reason = backends.get_first_line(error)
            log.warning("%s does not run in %s and will run eagerly: %s", self._spec.identifier, config, reason)
            return _require_same_size(self.build(replace(config, engine="eager")))


def _require_same_size(ready: ReadyEngine) -> ReadyEngine:
    """Return the network if its scores have the size of its windows. Raises RuntimeError otherwise."""
    batch = ready.window.batch
    scores = ready.window.network(batch)
    if scores.shape[2:] != batch.shape[2:]:
        raise RuntimeError(f"the scores have the size {'x'.join(map(str, scores.shape[2:]))}, unlike the input")
    return ready


def default_batch_size(settings: Settings, device: torch.device) -> int:
    """Return the default number of windows per call: the configured one, or a suitable one for the device."""
    if settings.windows.sw_batch_size != "auto":
        return settings.windows.sw_batch_size
    return min(CPU_BATCH if device.type == "cpu" else CUDA_BATCH, settings.limits.sw_batch_size)


def default_streams(settings: Settings, device: torch.device) -> int:
    """Return the default number of concurrent batches: the configured one, or a suitable one for the device."""
    if device.type != "cpu":
        return 1
    configured = settings.engine.streams
    return min(CPU_STREAMS, settings.device.threads or host.usable_cores()) if configured == "auto" else configured
