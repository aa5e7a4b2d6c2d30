"""Networks that are ready to run: any configuration of an engine for one model on one device."""

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
from service.inference.runner.label_agreement import MAX_SHARE_BEYOND_ROUNDING, LabelAgreement
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow
from service.models.network import Network
from service.models.spec import ModelSpec

log = logging.getLogger(__name__)


# Windows per call. On a CPU one at a time is the slowest, since ATen has a slow path for small batches. A GPU needs
# several to be busy at all; 11 windows of 64 voxels are one row of a plane of 512 x 512, so that no slot stays empty.
CPU_BATCH = 2
CUDA_BATCH = 11
# Batches at the same time: on a CPU two teams of half the cores wait less than one of all.
CPU_STREAMS = 2


@dataclass(frozen=True)
class ReadyEngine:
    """Network that runs, and how it was made.

    window       calls it
    module       what it was made from, to be run eagerly with other batch sizes
    config       how it runs
    seconds      until it ran, whatever was tried before included
    plan         how it was chosen, None where the engine is fixed
    cached       whether the plan was made earlier
    nbytes       of weights that the engine keeps beside those of the module, and of what its streams keep
    score_bytes  of one window, as in `backends.BuiltNetwork`
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
    """Builds any configuration of an engine for one model on one device.

    network       as loaded, float32 on the CPU
    window_bytes  float32 that its layers take for one window
    native        dtypes that are worth trying; None: those that the device has units for
    faulty        dtypes that it has units for, but that are left out, and why; None: as from `faulty_precisions`
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
        tf32.use(settings.engine, device)

    def build(self, config: EngineConfig, *warnings: str) -> ReadyEngine:
        """Build a configuration, with these warnings after its own.

        Raises one of `backends.ENGINE_FAILURES` where it does not run.
        """
        with step(f"building {config}"):
            module = self.module(config)
            window = self.sliding_window(module, config, config.sw_batch_size)
            built = backends.build(module, window.batch, config, self._settings.engine)
        window = window.with_network(built.network, any_batch_size=built.any_batch_size, owns_scores=built.owns_scores)
        ready = ReadyEngine(window, module, config, built.seconds, warnings)
        return replace(ready, nbytes=built.nbytes, score_bytes=built.score_bytes)

    def module(self, config: EngineConfig) -> nn.Module:
        """Prepare the module that a configuration is built from."""
        memory_format = backends.MEMORY_FORMATS[config.memory_format]
        return prepare(self._network, self._device, backends.batch_dtype(config), memory_format)

    def reference(self, batch_size: int) -> SlidingWindow:
        """Return windows through the network exactly as it was loaded: eager, float32 without TF32, nothing folded."""
        network: Network = copy.deepcopy(self._network).to(self._device)
        if self._device.type == "cuda":
            network = tf32.without_tf32(network)
        return self.sliding_window(network, EngineConfig("eager", "fp32", "contiguous", batch_size), batch_size)

    def sliding_window(self, network: Network, config: EngineConfig, batch_size: int) -> SlidingWindow:
        """Return windows through `network` as `config` says; a batch that is smaller than its own has one stream."""
        windows = self._settings.windows
        # MONAI blends windows by itself, and gets the scores of each as they are.
        mode = "constant" if windows.inferer == "monai" else windows.blending
        return SlidingWindow(
            network,
            self._spec.input.channels,
            self._spec.input.roi_size,
            batch_size,
            blending=Blending(mode, windows.sigma),
            device=self._device,
            dtype=backends.batch_dtype(config),
            memory_format=backends.MEMORY_FORMATS[config.memory_format],
            streams=config.streams if batch_size >= config.sw_batch_size else 1,
        )

    def eager(self, name: str) -> EngineConfig:
        """Return the configuration that runs eagerly in a precision."""
        memory_format = backends.BACKENDS["eager"].allowed_formats(self._settings.engine, self._device)[0]
        return EngineConfig("eager", name, memory_format, self._batch_size, streams=self._streams)

    def make_agreement(self) -> LabelAgreement:
        """Return the comparison with FP32: on devices other than the CPU, of a full batch as well.

        The reference computes one window at a time there, so that no fault with large batches affects it.
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
        """Build what runs with another window or batch within seconds: as `config` says, but nothing is compiled.

        On devices other than the CPU a full batch is compared with FP32, as libraries may choose other algorithms for
        a larger window. If it differs, the network runs eagerly in FP32.

        Raises one of `backends.ENGINE_FAILURES` where the network does not run eagerly either.
        """
        ready = self._rebuild(config, batch_size)
        if ready.config.precision == "fp32" or self._driver.is_on_host(self._device):
            return ready
        difference = self.make_agreement().batch_difference(ready.window)
        if difference <= MAX_SHARE_BEYOND_ROUNDING:
            return ready
        wrong = "not finite" if math.isnan(difference) else f"wrong at {difference:.2%} of the voxels of a window"
        size = "x".join(map(str, self._spec.input.roi_size))
        found = f"{self._spec.identifier} with windows of {size} in {ready.config}: its scores are {wrong}"
        log.warning("%s. It runs eagerly in fp32 instead.", found)
        del ready
        return _require_same_size(self.build(replace(self.eager("fp32"), sw_batch_size=batch_size)))

    def _rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        config = replace(config, sw_batch_size=batch_size)
        if config.compile_mode is not None:
            engine = "cudagraph" if self._device.type == "cuda" else "eager"
            config = replace(config, engine=engine, compile_mode=None)
        try:
            return _require_same_size(self.build(config))
        except backends.ENGINE_FAILURES as error:
            if config.engine == "eager":
                raise
            reason = backends.first_line(error)
            log.warning("%s does not run in %s, so it runs eagerly: %s", self._spec.identifier, config, reason)
            return _require_same_size(self.build(replace(config, engine="eager")))


def _require_same_size(ready: ReadyEngine) -> ReadyEngine:
    """Return a network whose scores are as large as its windows. Raises RuntimeError."""
    batch = ready.window.batch
    scores = ready.window.network(batch)
    if scores.shape[2:] != batch.shape[2:]:
        raise RuntimeError(f"its scores are {'x'.join(map(str, scores.shape[2:]))}")
    return ready


def default_batch_size(settings: Settings, device: torch.device) -> int:
    """Return the windows per call where nothing else is known: the configured ones, else what suits the device."""
    if settings.windows.sw_batch_size != "auto":
        return settings.windows.sw_batch_size
    return min(CPU_BATCH if device.type == "cpu" else CUDA_BATCH, settings.limits.sw_batch_size)


def default_streams(settings: Settings, device: torch.device) -> int:
    """Return the batches at the same time where nothing else is known: as configured, else what suits the device."""
    if device.type != "cpu":
        return 1
    wanted = settings.engine.streams
    return min(CPU_STREAMS, settings.device.threads or host.usable_cores()) if wanted == "auto" else wanted
