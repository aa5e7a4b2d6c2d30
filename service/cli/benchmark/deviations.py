"""Differences between the engine that is configured and the engine that ran."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from service.core.sections.computing import Engine as EngineSettings
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
        f"engine.{name} is {configured}, but the network ran with {used}"
        for name, configured, wanted, used in _list_settings(settings, report, on_gpu=on_gpu)
        if wanted not in {"auto", used}
    ]
    if on_gpu and settings.kind != "auto":
        deviations += [f"engine.kind is {settings.kind}, but there is a warning: {text}" for text in report.warnings]
    return deviations


def _list_settings(
    settings: EngineSettings, report: EngineReport, *, on_gpu: bool
) -> Iterator[tuple[str, str, str, str]]:
    """Yield each setting that the engine uses: name, value, and the wanted and the used property of the network."""
    yield "kind", settings.kind, settings.kind, report.engine
    yield "precision", settings.precision, settings.precision, report.precision
    if settings.channels_last != "auto" and not backends.BACKENDS[report.engine].float32_batch:
        wanted = "channels_last_3d" if settings.channels_last else "contiguous"
        yield "channels_last", str(settings.channels_last).lower(), wanted, report.memory_format
    if settings.kind in COMPILED_KINDS or (settings.kind == "auto" and on_gpu):
        yield "compile_mode", settings.compile_mode, settings.compile_mode, report.compile_mode or "none"
