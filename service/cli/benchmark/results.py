"""Results of `stackseg bench`, as they are measured and as they are summarised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from service.cli.benchmark.networks import Row
from service.cli.benchmark.timing import Spread
from service.core.quantities import Size
from service.inference.types import EngineReport

Seconds = dict[str, float]


@dataclass(frozen=True)
class WindowSeconds:
    """Seconds of all windows of a stack.

    bare      a bare loop of their forward passes
    stitched  from pixels to scores
    """

    bare: float
    stitched: float

    @property
    def ratio(self) -> float:
        """Windows per second from pixels to scores, relative to the bare loop."""
        return self.bare / self.stitched


@dataclass(frozen=True)
class Repeat:
    """Measurements of one repeat.

    stages       seconds of the request by stage, `total` among them
    windows      wall-clock seconds of the windows alone
    cpu_windows  the same in CPU seconds
    plain        seconds of the plain script by stage; empty without `--baseline`
    plain_tf32   whether the plain script may use TF32
    """

    stages: Seconds
    windows: WindowSeconds
    cpu_windows: WindowSeconds
    plain: Seconds = field(default_factory=dict)
    plain_tf32: bool = False

    @property
    def speedup(self) -> float:
        """Total seconds of the plain script over those of the request."""
        return self.plain["total"] / self.stages["total"]


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of requests: of the first one, and of the repeats.

    stages      seconds of the repeats by stage, `total` among them
    stitched    seconds of the windows alone, from pixels to scores; `bare`: of a bare loop of their forward passes
    stitching   windows per second of stitched over bare, pair by pair; `cpu_stitching`: by CPU seconds
    plain       seconds of the plain script by stage; `speedup`: its time over ours, repeat by repeat
    plain_tf32  whether the plain script may use TF32
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
    def summarise(cls, windows: int, first: float, repeats: Sequence[Repeat]) -> RequestTimes:
        """Summarise the repeats, of which there is at least one."""
        has_plain = bool(repeats[0].plain)
        return cls(
            windows=windows,
            first=first,
            stages=_summarise_stages([repeat.stages for repeat in repeats]),
            stitched=Spread.of([repeat.windows.stitched for repeat in repeats]),
            bare=Spread.of([repeat.windows.bare for repeat in repeats]),
            stitching=Spread.of([repeat.windows.ratio for repeat in repeats]),
            cpu_stitching=Spread.of([repeat.cpu_windows.ratio for repeat in repeats]),
            plain=_summarise_stages([repeat.plain for repeat in repeats]),
            speedup=Spread.of([repeat.speedup for repeat in repeats]) if has_plain else None,
            plain_tf32=any(repeat.plain_tf32 for repeat in repeats),
        )

    @property
    def windows_per_second(self) -> float:
        """Windows per second from pixels to scores."""
        return self.windows / self.stitched.median


@dataclass
class Report:
    """Results of a run.

    starts      seconds of loading the model and making its network ready, by how its engine was chosen
    gflop       of one window; `peaks`: GFLOP per second of a large matrix product, by precision
    peak_bytes  largest resident memory of the process until the last request; `device_bytes` on a GPU
    tf32        whether float32 products of the engine may use TF32
    rows        of the comparisons
    """

    model: str
    shape: Size
    device: str
    threads: int
    engine: EngineReport
    starts: Seconds
    answered: RequestTimes
    gflop: float
    peaks: dict[str, float]
    peak_bytes: int
    device_bytes: int
    tf32: bool = False
    rows: list[Row] = field(default_factory=list)
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


def _summarise_stages(runs: Sequence[Seconds]) -> dict[str, Spread]:
    return {stage: Spread.of([taken[stage] for taken in runs]) for stage in runs[0]}
