"""Results of `stackseg bench`: single measurements and summaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from service.cli.benchmark.engine_comparison import EngineRow
from service.cli.benchmark.timing import Spread
from service.core.quantities import Size
from service.inference.types import EngineReport

SecondsByName = dict[str, float]


@dataclass(frozen=True)
class WindowSeconds:
    """Seconds for all windows of a stack.

    bare      only the forward passes of the windows, in a bare loop
    stitched  from pixels to scores
    """

    bare: float
    stitched: float

    @property
    def ratio(self) -> float:
        """Windows per second from pixels to scores relative to the bare loop."""
        return self.bare / self.stitched


@dataclass(frozen=True)
class Repeat:
    """Measurements of one repeat.

    stages       seconds of the request by stage, including `total`
    windows      wall-clock seconds of the windows alone
    cpu_windows  CPU seconds of the windows alone
    plain        seconds of the baseline script by stage; empty without `--baseline`
    plain_tf32   whether the baseline script was allowed to use TF32
    """

    stages: SecondsByName
    windows: WindowSeconds
    cpu_windows: WindowSeconds
    plain: SecondsByName = field(default_factory=dict)
    plain_tf32: bool = False

    @property
    def speedup(self) -> float:
        """Total seconds of the baseline script divided by those of the request."""
        return self.plain["total"] / self.stages["total"]


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of the first request and of the repeats.

    windows        number of windows of the stack
    first          total seconds of the first request
    stages         seconds of the repeats by stage, including `total`
    stitched       seconds of the windows alone, from pixels to scores
    bare           seconds of the forward passes of the windows, in a bare loop
    stitching      windows per second of `stitched` relative to `bare`, pair by pair
    cpu_stitching  the same ratio in CPU seconds
    plain          seconds of the baseline script by stage
    speedup        time of the baseline script divided by that of the request, repeat by repeat
    plain_tf32     whether the baseline script was allowed to use TF32
    """

    windows: int
    first: float
    stages: dict[str, Spread]
    stitched: Spread
    bare: Spread
    stitching: Spread
    cpu_stitching: Spread
    plain: dict[str, Spread]
    speedup: Spread | None
    plain_tf32: bool = False

    @classmethod
    def summarize(cls, windows: int, first: float, repeats: Sequence[Repeat]) -> RequestTimes:
        """Summarize one or more repeats."""
        has_plain = bool(repeats[0].plain)
        return cls(
            windows=windows,
            first=first,
            stages=_summarize_stages([repeat.stages for repeat in repeats]),
            stitched=Spread.from_values([repeat.windows.stitched for repeat in repeats]),
            bare=Spread.from_values([repeat.windows.bare for repeat in repeats]),
            stitching=Spread.from_values([repeat.windows.ratio for repeat in repeats]),
            cpu_stitching=Spread.from_values([repeat.cpu_windows.ratio for repeat in repeats]),
            plain=_summarize_stages([repeat.plain for repeat in repeats]),
            speedup=Spread.from_values([repeat.speedup for repeat in repeats]) if has_plain else None,
            plain_tf32=any(repeat.plain_tf32 for repeat in repeats),
        )

    @property
    def windows_per_second(self) -> float:
        """Windows per second from pixels to scores."""
        return self.windows / self.stitched.median


@dataclass
class Report:
    """Results of a complete run.

    starts        seconds of each startup, in which the model is loaded and its network prepared; the keys describe how
                  the engine was selected
    answered      times of the requests
    gflop         floating-point operations of one window, in units of 1e9
    peaks         GFLOP/s of a large matrix product by precision
    peak_bytes    peak resident memory of the process up to the last request
    device_bytes  peak memory on a GPU
    tf32          whether float32 matrix products of the engine may use TF32
    rows          results of the comparison of engines
    """

    model: str
    shape: Size
    device: str
    threads: int
    engine: EngineReport
    starts: SecondsByName
    answered: RequestTimes
    gflop: float
    peaks: dict[str, float]
    peak_bytes: int
    device_bytes: int
    tf32: bool = False
    rows: list[EngineRow] = field(default_factory=list)
    torch_version: str = str(torch.__version__)

    @property
    def voxels_per_second(self) -> float:
        return math.prod(self.shape) / self.answered.stages["total"].median

    @property
    def gflop_per_second(self) -> float:
        return self.gflop * self.answered.windows_per_second

    @property
    def peak_share(self) -> float:
        return self.gflop_per_second / self.peaks[self.engine.precision]


def _summarize_stages(runs: Sequence[SecondsByName]) -> dict[str, Spread]:
    return {stage: Spread.from_values([run[stage] for run in runs]) for stage in runs[0]}
