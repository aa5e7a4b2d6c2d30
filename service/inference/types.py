"""The nouns of an inference request: the plan, the estimate, the result and the report of the engine. No algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from numpy.typing import NDArray

from service.core.errors import StackSegError
from service.core.quantities import Diameter, Size, TimeInterval, VoxelSize
from service.core.types import Description, Linking, OutputKind, Segmentation, StackShape, Steering, Views, Volume
from service.engine.tuning.plans import Trial

if TYPE_CHECKING:
    from service.models.spec import ModelSpec

Table = dict[str, NDArray[Any]]
"""One array per column, all of one length: an entry per object, in the order of their labels."""


class Plan(NamedTuple):
    """Options of a request after the operator's defaults and limits.

    diameter    of the objects, where the volume is resampled by it
    estimated   whether it is still to be estimated from the stack; until then the stack counts as it is sampled
    skip_below  grey value of windows that are not computed; None: all are
    steering    how scores become objects
    decode_on_host  whether scores are decoded on the host, as the device's memory may not hold what that takes
    views       in which windows are scored; none: as they are
    """

    output: OutputKind
    sw_batch_size: int
    overlap: float
    diameter: Diameter | None = None
    estimated: bool = False
    skip_below: float | Literal["auto"] | None = None
    steering: Steering = Steering()
    decode_on_host: bool = False
    views: Views = ()

    @property
    def scorings(self) -> int:
        """The number of times that each window is scored."""
        return max(len(self.views), 1)


@dataclass(frozen=True)
class Estimate:
    """Windows and memory of a request. Bytes are the peak beyond the loaded model; on the CPU all are host bytes.

    A window counts once for each view in which it is scored: it takes as long as so many windows.
    Pages of the stack are not counted: it is read from a mapped file, and the system takes its pages back at need.
    """

    windows: int
    sw_batch_size: int
    overlap: float
    working_size: Size
    host_bytes: int
    device_bytes: int


class PlannedRequest(NamedTuple):
    """Request as it is handed down: what is done, and what that takes."""

    plan: Plan
    estimate: Estimate


class DiameterTrial(NamedTuple):
    """Trial of several widths.

    confidence  with the chosen one
    before      with the one that was measured, or as the stack is sampled
    widths      that were tried
    narrowest   whether the chosen one is as narrow as any that is tried
    """

    confidence: float
    before: float
    widths: int
    narrowest: bool


class Sizing(NamedTuple):
    """An estimate of the diameter of objects.

    diameter  of the objects in voxels of the image, as a request would best state it; None where that is not known
    fits      whether the model works well on objects of this width without any resampling
    objects   that it was measured by, in so many windows
    guess     the diameter, or one that is worth a try where that is not known; None: nothing looks like an object
    trial     by which the diameter was chosen; None: objects were measured
    """

    diameter: Diameter | None
    fits: bool
    objects: int
    windows: int
    guess: Diameter | None = None
    trial: DiameterTrial | None = None

    @property
    def resampled_by(self) -> Diameter | None:
        """Diameter by which resampling brings something, None where the image is used as it is sampled."""
        return None if self.fits else self.diameter

    @property
    def note(self) -> str:
        """A sentence about the estimate for the user."""
        if self.trial is not None:
            confidence, before, widths, narrowest = self.trial
            limit = " (none narrower was tried)" if narrowest else ""
            against = f"{before:.2g}" if before >= 0.001 else "less than 0.001"
            return (
                f"Objects are taken to be {self.diameter} wide, chosen by a trial of {widths} widths on {self.windows}"
                f" windows: confidence {confidence:.2g} against {against}; state diameter= where that is wrong"
                f"{limit}, or diameter=none to use the stack as it is sampled."
            )
        seen = f"{self.objects} objects in {self.windows} windows"
        if self.diameter is None:
            return f"How wide objects are could not be told ({seen}): used as it is sampled; state diameter=."
        how = f"Objects seem to be {self.diameter} wide ({seen})"
        if self.fits:
            return f"{how}, which suits the model as it is sampled; state diameter= where that is wrong."
        return f"{how}; state diameter= where that is wrong, or diameter=none to use the stack as it is sampled."


class Doubt(NamedTuple):
    """The reason not to trust a result.

    confidence  in it, 0 to 1; None where nothing was found
    detail      the likely reason and what to try next, in a sentence
    attempt     that as a parameter, such as diameter=4px; "" where none is known
    """

    confidence: float | None
    detail: str
    attempt: str

    @property
    def suggested(self) -> dict[str, str]:
        """The attempt as a value by parameter; empty where none is known."""
        parameter, _, value = self.attempt.partition("=")
        return {parameter: value} if parameter else {}


class Skipped(NamedTuple):
    """The number of windows that are not computed, out of `total`.

    limits  grey values that no voxel of them exceeds, one per channel
    """

    windows: int
    total: int
    limits: tuple[float, ...]

    def __str__(self) -> str:
        """Return a short text for users."""
        return f"{self.windows} of {self.total} windows; up to {', '.join(f'{limit:.6g}' for limit in self.limits)}"


class SeriesFacts(NamedTuple):
    """Facts that only a series of time points has.

    points  time points in the result, the first ones of `total`
    table   of all objects, None where none was asked for
    fault   why those from `points` on are missing; None where none is
    """

    points: int
    total: int
    table: Table | None = None
    fault: StackSegError | None = None


class Result(NamedTuple):
    """Result of one segmentation.

    seconds     by stage, in order: prepare, size where the width of objects was estimated, skip where windows without
                anything in them were looked for, windows, decode
    notes       what a user should know about this result
    diameter    of the objects, where that was stated or estimated
    estimated   which of the two
    fallbacks   how often memory did not hold the batch, and a smaller one was taken
    recomputed  whether the scores had to be computed a second time, in float32
    skipped     windows that were not computed; None where all had to be
    spec        of the model that was loaded, which may have been replaced since; None where none was
    engine      that computed the windows, with its precision
    series      of several time points; None for one volume
    confidence  in the result, 0 to 1; None where the model has none or found nothing
    doubt       why it is not to be trusted; None: it may be
    """

    segmentation: Segmentation
    seconds: dict[str, float]
    notes: tuple[str, ...]
    fallbacks: int = 0
    recomputed: bool = False
    diameter: Diameter | None = None
    estimated: bool = False
    skipped: Skipped | None = None
    spec: ModelSpec | None = None
    engine: str = ""
    series: SeriesFacts | None = None
    confidence: float | None = None
    doubt: Doubt | None = None

    @property
    def model(self) -> str:
        """Name and version of the model."""
        return "" if self.spec is None else self.spec.identifier

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that a user should read, a doubt before anything else."""
        return self.notes if self.doubt is None else (self.doubt.detail, *self.notes)

    @property
    def width(self) -> str | None:
        """Diameter as the parameter takes it, and where it is from."""
        return None if self.diameter is None else f"{self.diameter}; {'estimated' if self.estimated else 'stated'}"


@dataclass(frozen=True)
class EngineReport:
    """Report on an engine. `compile_mode` is None unless compiled; `roi_size` and `sw_batch_size` make the shape.

    streams  batches that are computed at the same time
    planned  how it was chosen: fixed by the configuration, known-order for the first of the known best ones that gives
             the right labels, tuned for the winner of a race
    cached   whether that was found out before this start
    trials   what was considered, and why it was not taken
    """

    device: str
    device_name: str
    engine: str
    precision: str
    memory_format: str
    compile_mode: str | None
    roi_size: Size
    sw_batch_size: int
    overlap: float
    blending: str
    warm_up_seconds: float
    warnings: tuple[str, ...]
    streams: int = 1
    planned: str = "fixed"
    cached: bool = False
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class Series:
    """Time points of one file, whose pixels are read when their turn comes.

    times      numbers in the file
    read       of a time point returns the volume to segment, and the one to measure objects in, None for no table
    shape      of each time point, as are voxel size and channels
    link       how objects are given one number through time; None: they are not
    """

    times: range
    read: Callable[[int], tuple[Volume, Volume | None]]
    shape: StackShape
    voxel_size: VoxelSize | None
    interval: TimeInterval | None
    link: Linking | None = None

    @classmethod
    def of(
        cls, description: Description, read: Callable[[int], tuple[Volume, Volume | None]], link: Linking | None
    ) -> Series:
        """Return the series that was selected of a file."""
        if description.time_points is None:
            raise ValueError("No range of time points was selected.")
        times = range(*description.time_points)
        return cls(times, read, description.shape, description.voxel_size, description.time_interval, link)

    @property
    def voxels(self) -> int:
        """Voxels of one channel at all time points."""
        return len(self.times) * math.prod(self.shape[1:])
