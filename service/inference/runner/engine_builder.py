"""Builder of engines for one model on one device, in any configuration."""

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


# Default number of windows per call. On a CPU, one window per call is slowest, because ATen has a slow path for small
# batches. A GPU needs several windows to be fully utilized. A batch of 11 windows that are 64 voxels wide holds one row
# of windows of a 512 x 512 plane.
DEFAULT_CPU_BATCH_SIZE = 2
DEFAULT_CUDA_BATCH_SIZE = 11
# Default number of concurrent batches on a CPU. Two streams with half of the cores each wait less than one stream with
# all cores.
DEFAULT_CPU_STREAMS = 2


@dataclass(frozen=True)
class ReadyEngine:
    """Network that is ready to run, and information on how it was built.

    window       runs the network
    module       prepared module from which the engine was built; it runs eagerly with other batch sizes
    config       configuration of the engine
    seconds      time until the engine was ready, including trials of other engines
    plan         plan that describes how the engine was chosen; None if the settings fix the engine
    is_cached    whether the plan is from an earlier start
    nbytes       bytes of the weights that the engine holds in addition to the module, and of the buffers of its streams
    score_bytes  bytes of memory per window, as in `backends.BuiltNetwork`
    """

    window: SlidingWindow
    module: nn.Module
    config: EngineConfig
    seconds: float
    warnings: tuple[str, ...] = ()
    plan: EnginePlan | None = None
    is_cached: bool = False
    nbytes: int = 0
    score_bytes: int | None = None


class EngineBuilder:
    """Builds engines in any configuration for one model on one device.

    network        network as loaded, float32 on the CPU
    window_bytes   bytes of its float32 activations for one window
    native_dtypes  dtypes to consider; None: the dtypes that the device supports in hardware
    faulty_dtypes  supported dtypes to avoid, with the reason; None: use `devices.list_faulty_precisions`
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        spec: ModelSpec,
        settings: Settings,
        device: torch.device,
        network: nn.Module,
        window_bytes: int,
        native_dtypes: frozenset[torch.dtype] | None = None,
        driver: Driver = devices,
        faulty_dtypes: Mapping[torch.dtype, str] | None = None,
    ) -> None:
        self._spec, self._settings, self._device = spec, settings, device
        self._network, self._window_bytes, self._driver = network, window_bytes, driver
        self._native_dtypes = devices.list_native_precisions(device) if native_dtypes is None else native_dtypes
        self._faulty_dtypes = devices.list_faulty_precisions(device) if faulty_dtypes is None else faulty_dtypes
        self._batch_size, self._streams = (
            choose_default_batch_size(settings, device),
            choose_default_streams(settings, device),
        )
        tf32.configure(settings.engine, device)

    def build(self, config: EngineConfig, *warnings: str) -> ReadyEngine:
        """Build an engine in a configuration. `warnings` are added to the result.

        Raises one of `backends.ENGINE_ERRORS` if the network does not run in this configuration.
        """
        with step(f"building {config}"):
            module = self.prepare_module(config)
            window = self.make_sliding_window(module, config, config.sw_batch_size)
            built_network = backends.build(module, window.batch, config, self._settings.engine)
        window = window.with_network(
            built_network.network,
            accepts_partial_batches=built_network.accepts_partial_batches,
            owns_scores=built_network.owns_scores,
        )
        engine = ReadyEngine(window, module, config, built_network.seconds, warnings)
        return replace(engine, nbytes=built_network.nbytes, score_bytes=built_network.score_bytes)

    def prepare_module(self, config: EngineConfig) -> nn.Module:
        """Prepare the module from which the engine is built."""
        memory_format = backends.MEMORY_FORMATS[config.memory_format]
        return prepare(self._network, self._device, backends.get_batch_dtype(config), memory_format)

    def make_reference(self, batch_size: int) -> SlidingWindow:
        """Return a `SlidingWindow` for the network as loaded: eager, in float32 without TF32, without folded layers."""
        network: Network = copy.deepcopy(self._network).to(self._device)
        if self._device.type == "cuda":
            network = tf32.wrap_without_tf32(network)
        return self.make_sliding_window(network, EngineConfig("eager", "fp32", "contiguous", batch_size), batch_size)

    def make_sliding_window(self, network: Network, config: EngineConfig, batch_size: int) -> SlidingWindow:
        """Return a `SlidingWindow` for `network`. It has a single stream if `batch_size` is smaller than configured."""
        windows = self._settings.windows
        # MONAI blends the windows itself, and needs the unweighted scores of each window.
        mode = "constant" if windows.inferer == "monai" else windows.blending
        return SlidingWindow(
            network,
            self._spec.input.channels,
            self._spec.input.roi_size,
            batch_size,
            blending=Blending(mode, windows.sigma, self._spec.tiling),
            device=self._device,
            dtype=backends.get_batch_dtype(config),
            memory_format=backends.MEMORY_FORMATS[config.memory_format],
            streams=config.streams if batch_size >= config.sw_batch_size else 1,
        )

    def make_eager_config(self, precision_name: str) -> EngineConfig:
        """Return the configuration of the eager engine in the precision `precision_name`."""
        memory_format = backends.BACKENDS["eager"].list_allowed_formats(self._settings.engine, self._device)[0]
        return EngineConfig("eager", precision_name, memory_format, self._batch_size, streams=self._streams)

    def make_label_agreement(self) -> LabelAgreement:
        """Return an object that compares labels with those of the FP32 network.

        On devices other than the CPU, the scores of a full batch are also compared. There, the reference computes one
        window at a time, because some library bugs affect only large batches.
        """
        uses_host_memory = self._driver.uses_host_memory(self._device)
        num_windows = self._batch_size if uses_host_memory else 1
        return LabelAgreement(
            self._spec,
            self._device,
            lambda: self.make_reference(num_windows),
            compares_full_batch=not uses_host_memory,
        )

    def with_window(self, spec: ModelSpec, window_bytes: int) -> Self:
        """Return a builder for the same network with the window size of `spec`."""
        new_builder = copy.copy(self)
        new_builder._spec, new_builder._window_bytes = spec, window_bytes
        return new_builder

    def rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        """Build an engine for a different window or batch size. Nothing is compiled, so this takes only a few seconds.

        On devices other than the CPU, a full batch is compared with FP32, because libraries may choose different
        algorithms for larger windows. If the scores differ, the network runs eagerly in FP32.

        Raises one of `backends.ENGINE_ERRORS` if the network does not run eagerly either.
        """
        engine = self._rebuild(config, batch_size)
        if engine.config.precision == "fp32" or self._driver.uses_host_memory(self._device):
            return engine
        difference = self.make_label_agreement().compute_batch_difference(engine.window)
        if difference <= MAX_WRONG_FRACTION:
            return engine
        problem = "not finite" if math.isnan(difference) else f"wrong at {difference:.2%} of the voxels of a window"
        size = "x".join(map(str, self._spec.input.roi_size))
        description = (
            f"{self._spec.identifier} with windows of {size} in {engine.config} returned scores that are {problem}"
        )
        log.warning("%s. The model runs eagerly in fp32 instead.", description)
        del engine
        return self._require_score_size(self.build(replace(self.make_eager_config("fp32"), sw_batch_size=batch_size)))

    def _rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        config = replace(config, sw_batch_size=batch_size)
        if config.compile_mode is not None:
            engine = "cudagraph" if self._device.type == "cuda" else "eager"
            config = replace(config, engine=engine, compile_mode=None)
        try:
            return self._require_score_size(self.build(config))
        except backends.ENGINE_ERRORS as error:
            if config.engine == "eager":
                raise
            reason = backends.get_first_line(error)
            log.warning("%s does not run in %s and will run eagerly: %s", self._spec.identifier, config, reason)
            return self._require_score_size(self.build(replace(config, engine="eager")))

    def _require_score_size(self, engine: ReadyEngine) -> ReadyEngine:
        """Return the engine. Raises RuntimeError if the size of its scores does not match the size of its windows."""
        batch, step = engine.window.batch, self._spec.tiling.step
        scores = engine.window.network(batch)
        if any(n * factor != length for n, factor, length in zip(scores.shape[2:], step, batch.shape[2:], strict=True)):
            raise RuntimeError(
                f"the size of the scores, {'x'.join(map(str, scores.shape[2:]))}, does not match the window size"
            )
        return engine


def choose_default_batch_size(settings: Settings, device: torch.device) -> int:
    """Return the default number of windows per call: the configured number, or a number that suits the device."""
    if settings.windows.sw_batch_size != "auto":
        return settings.windows.sw_batch_size
    return min(
        DEFAULT_CPU_BATCH_SIZE if device.type == "cpu" else DEFAULT_CUDA_BATCH_SIZE, settings.limits.sw_batch_size
    )


def choose_default_streams(settings: Settings, device: torch.device) -> int:
    """Return the default number of concurrent batches: the configured number, or a number that suits the device."""
    if device.type != "cpu":
        return 1
    configured_streams = settings.engine.streams
    return (
        min(DEFAULT_CPU_STREAMS, settings.device.threads or host.count_usable_cores())
        if configured_streams == "auto"
        else configured_streams
    )
