"""Differences between the configured engine settings and the engine that ran."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from service.core.sections.computing import Engine as EngineSettings
from service.engine import backends
from service.inference.types import EngineReport

# Engines that use `engine.compile_mode`. The mode has no effect on eager and openvino. winograd is always compiled if
# a mode is set.
COMPILED_KINDS = frozenset({"compiled", "cudagraph"})


def find_deviations(settings: EngineSettings, report: EngineReport) -> list[str]:
    """Return one sentence for each setting of `engine` that differs from how the network ran.

    Settings with the value auto, and settings that the engine does not use, are not compared. If `engine.kind` is fixed
    on a GPU, each warning of the engine counts as a deviation as well.
    """
    is_on_gpu = torch.device(report.device).type == "cuda"
    deviations = [
        f"engine.{name} is {configured_value}, but the network ran with {actual_value}"
        for name, configured_value, expected_value, actual_value in _list_settings(
            settings, report, is_on_gpu=is_on_gpu
        )
        if expected_value not in {"auto", actual_value}
    ]
    if is_on_gpu and settings.kind != "auto":
        deviations += [
            f"engine.kind is {settings.kind}, but the engine reported a warning: {warning}"
            for warning in report.warnings
        ]
    return deviations


def _list_settings(
    settings: EngineSettings, report: EngineReport, *, is_on_gpu: bool
) -> Iterator[tuple[str, str, str, str]]:
    """Yield each setting that the engine uses: name, value, and the expected and actual property of the network."""
    yield "kind", settings.kind, settings.kind, report.engine
    yield "precision", settings.precision, settings.precision, report.precision
    if settings.channels_last != "auto" and not backends.BACKENDS[report.engine].uses_float32_batches:
        expected_format = "channels_last_3d" if settings.channels_last else "contiguous"
        yield "channels_last", str(settings.channels_last).lower(), expected_format, report.memory_format
    if settings.kind in COMPILED_KINDS or (settings.kind == "auto" and is_on_gpu):
        yield "compile_mode", settings.compile_mode, settings.compile_mode, report.compile_mode or "none"
