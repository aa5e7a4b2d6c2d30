"""Differences between the engine that is configured and the engine that ran."""

from __future__ import annotations

import torch

from service.core.config import Engine as EngineSettings
from service.engine import backends
from service.inference.types import EngineReport

# Kinds that are compiled in the mode of `engine.compile_mode`. It changes nothing for eager and openvino, and winograd
# has no version that is not compiled once a mode is set.
COMPILED_KINDS = frozenset({"compiled", "cudagraph"})


def find_deviations(settings: EngineSettings, report: EngineReport) -> list[str]:
    """Return one sentence for each setting of `engine` that the network did not run with.

    Settings that are auto, and settings that the engine does not use, are not compared. With a fixed `engine.kind` on a
    GPU, each warning of the engine is a deviation, too.
    """
    on_gpu = torch.device(report.device).type == "cuda"
    deviations = [
        f"engine.{key} is {configured}, but the network ran with {used}"
        for key, configured, used in (
            ("kind", settings.kind, report.engine),
            ("precision", settings.precision, report.precision),
        )
        if configured not in {"auto", used}
    ]
    memory_format = "channels_last_3d" if settings.channels_last else "contiguous"
    ignores_format = backends.BACKENDS[report.engine].float32_batch
    if settings.channels_last != "auto" and not ignores_format and memory_format != report.memory_format:
        configured = str(settings.channels_last).lower()
        deviations.append(f"engine.channels_last is {configured}, but the network ran with {report.memory_format}")
    is_compiled = settings.kind in COMPILED_KINDS or (settings.kind == "auto" and on_gpu)
    if is_compiled and settings.compile_mode not in {"auto", report.compile_mode}:
        used = report.compile_mode or "none"
        deviations.append(f"engine.compile_mode is {settings.compile_mode}, but the network ran with {used}")
    if on_gpu and settings.kind != "auto":
        deviations += [f"engine.kind is {settings.kind}, but there is a warning: {text}" for text in report.warnings]
    return deviations
