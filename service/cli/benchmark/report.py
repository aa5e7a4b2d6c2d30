"""Format the report of `stackseg bench` as Markdown lines, JSON, or an image."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.cli.benchmark.engine_comparison import EngineRow, format_precision
from service.cli.benchmark.results import Repeat, Report
from service.cli.benchmark.timing import Spread
from service.core.quantities import Size
from service.inference.types import EngineReport

DERIVED_VALUE_NAMES = ("voxels_per_second", "gflop_per_second", "peak_share")
TABLE_HEADER = (
    "| {} | batch size | ms per window | windows/s | GFLOP/s | share of peak | speed relative to the first row |"
)


def format_engine(model: str, engine: EngineReport, *, tf32_allowed: bool) -> Iterator[str]:
    """Return the line for the engine in use, and one line for each of its warnings."""
    precision = format_precision(engine.precision, tf32_allowed=tf32_allowed)
    engine_text = f"{engine.engine} {precision} {engine.memory_format}, compile_mode {engine.compile_mode or 'none'}"
    yield f"{model}: {engine_text}, batch size {engine.sw_batch_size}, streams {engine.streams}"
    yield from format_warnings(engine.warnings)


def format_warnings(warnings: Iterable[str]) -> Iterator[str]:
    """Return one line for each warning."""
    return (f"warning: {warning}" for warning in warnings)


def format_first_request(shape: Size, window_count: int, seconds: float) -> Iterator[str]:
    """Return the lines for the stack and the first request."""
    yield ""
    yield f"{'x'.join(map(str, shape))} voxels, {window_count} windows; first request {seconds:.2f} s"


def format_repeat_header(repeat: Repeat) -> Iterator[str]:
    """Return the header of the table of repeats, with the columns of this repeat."""
    column_names = ["repeat", *(f"{stage} s" for stage in repeat.stages), "windows per second relative to a bare loop"]
    if repeat.plain:
        column_names += [
            f"{_format_baseline_name(tf32_allowed=repeat.plain_tf32)}, total s",
            "speedup over the baseline script",
        ]
    yield ""
    yield f"| {' | '.join(column_names)} |"
    yield "|---" * len(column_names) + "|"


def format_repeat(repeat_number: int, repeat: Repeat) -> str:
    """Return the table row of one repeat."""
    cells = [
        str(repeat_number),
        *(f"{seconds:.3f}" for seconds in repeat.stages.values()),
        f"{repeat.windows.ratio:.2f}",
    ]
    if repeat.plain:
        cells += [f"{repeat.plain['total']:.3f}", f"{repeat.speedup:.2f}"]
    return f"| {' | '.join(cells)} |"


def format_summary(report: Report) -> Iterator[str]:
    """Return the lines that summarize all repeats."""
    request_times, peak = report.answered, report.peaks[report.engine.precision]
    baseline_name = _format_baseline_name(tf32_allowed=request_times.plain_tf32)
    yield ""
    yield "| stage | median s (minimum to maximum) |" + (f" {baseline_name} |" if request_times.plain else "")
    yield "|---|---|" + ("---|" if request_times.plain else "")
    for stage in dict.fromkeys((*request_times.stages, *request_times.plain)):
        columns = [request_times.stages, request_times.plain] if request_times.plain else [request_times.stages]
        yield f"| {stage} | " + " | ".join(_format_seconds(column.get(stage)) for column in columns) + " |"
    yield ""
    yield f"{request_times.windows_per_second:.1f} windows/s, {report.voxels_per_second / 1e6:.2f} M voxels/s"
    precision = format_precision(report.engine.precision, tf32_allowed=report.tf32)
    share_text = f"{report.peak_share:.0%} of the {peak:.0f} GFLOP/s of a large {precision} matrix product"
    yield f"{report.gflop:.2f} GFLOP per window, {report.gflop_per_second:.0f} GFLOP/s: {share_text}"
    loop_text = (
        f"{_format_seconds(request_times.stitched)} s; a bare loop of their forward passes:"
        f" {_format_seconds(request_times.bare)} s"
    )
    yield f"windows from pixels to scores: {loop_text}"
    ratio_text = (
        f"{_format_ratio(request_times.stitching)}, in CPU seconds {_format_ratio(request_times.cpu_stitching)}"
    )
    yield f"windows per second relative to a bare loop: {ratio_text}"
    if request_times.speedup is not None:
        yield f"speed relative to the {baseline_name}: {_format_ratio(request_times.speedup)}"
    device_text = f", {report.device_bytes / 2**30:.2f} GiB on the device" if report.device_bytes else ""
    yield f"peak memory: {report.peak_bytes / 2**30:.2f} GiB{device_text}"


def _format_baseline_name(*, tf32_allowed: bool) -> str:
    return "baseline script (eager FP32; torch's defaults allow TF32)" if tf32_allowed else "baseline script"


def format_table(title: str, rows: Iterable[EngineRow]) -> Iterator[str]:
    """Return the lines of a comparison table. Each row is yielded as soon as `rows` yields it."""
    yield TABLE_HEADER.format(title)
    yield "|---" * TABLE_HEADER.count(" |") + "|"
    for row in rows:
        name_cells = f"| {row.name} | {row.windows} |"
        if row.ms_per_window is None or row.ratio is None:
            yield f"{name_cells} {row.problem} | | | | |"
        else:
            ms_cell = f"{row.ms_per_window.median:.1f} ({row.ms_per_window.least:.1f} to {row.ms_per_window.most:.1f})"
            rate_cells = f"{row.windows_per_second:.1f} | {row.gflop_per_second:.0f} | {row.peak_share:.0%}"
            yield f"{name_cells} {ms_cell} | {rate_cells} | {_format_ratio(row.ratio)} |"


def _format_seconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.3f} ({spread.least:.3f} to {spread.most:.3f})"


def _format_ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.most:.2f})"


def to_json(report: Report) -> str:
    """Return all measurements of the report as JSON."""
    derived_values = {name: getattr(report, name) for name in DERIVED_VALUE_NAMES}
    derived_values["windows_per_second"] = report.answered.windows_per_second
    return json.dumps(asdict(report) | derived_values, indent=1)


def plot(report: Report, path: Path) -> None:
    """Plot stages and comparisons as bar charts. Requires the `demo` extra."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    rows = [row for row in report.rows if row.windows_per_second]
    figure = Figure(figsize=(12 if rows else 6, 4 + 0.15 * len(rows)), layout="constrained")
    stage_axes, *engine_axes = figure.subplots(1, 2 if rows else 1, squeeze=False)[0]
    stages = {stage: spread.median for stage, spread in report.answered.stages.items() if stage != "total"}
    _draw_bars(stage_axes, list(stages), list(stages.values()))
    stage_axes.set(title=f"{report.model}, {'x'.join(map(str, report.shape))}", xlabel="seconds, median")
    for axes in engine_axes:
        _draw_engines(axes, rows)
    figure.suptitle(f"{report.device}, {report.threads} threads")
    figure.savefig(path, dpi=100)


def _draw_engines(axes: Any, rows: list[EngineRow]) -> None:
    _draw_bars(axes, [f"{row.name} x{row.windows}" for row in rows], [row.windows_per_second or 0 for row in rows])
    axes.set(title="engine", xlabel="windows per second, median")


def _draw_bars(axes: Any, names: list[str], values: list[float]) -> None:
    axes.barh(range(len(names)), values)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
