"""Data types of an inference request: the plan, the estimates, the result and the engine report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from numpy.typing import NDArray

from service.core.errors import StackSegError
from service.core.quantities import Diameter, Size, TimeInterval, VoxelSize
from service.core.types import (
    Description,
    Linking,
    OutputKind,
    PostprocessingOptions,
    Segmentation,
    StackShape,
    Views,
    Volume,
)
from service.engine.tuning.plans import Trial

if TYPE_CHECKING:
    from service.models.spec import ModelSpec

Table = dict[str, NDArray[Any]]
"""Columns by name. Each column is an array with one entry per object, in the order of the labels."""


def describe_default_diameter(diameter: Diameter) -> str:
    """Return a note for the user if the default diameter of a model is used."""
    return (
        f"Objects are assumed to be {diameter.describe()}, as in the stacks that the model was trained on. If this is"
        " wrong, set diameter=."
    )


class Plan(NamedTuple):
    """Options of a request after the operator's defaults and limits are applied.

    diameter                 object diameter in the volume, which is resampled so that objects get the model's diameter;
                             None to ignore the object diameter
    needs_diameter_estimate  whether the diameter is to be estimated; until then the default diameter or, if there is
                             none, the original resolution is assumed
    has_default_diameter     whether `diameter` is the default of the model because the request does not specify one
    skip_below               gray value; windows without brighter voxels are skipped; "auto": the background level;
                             None: no windows are skipped
    postprocessing           options of the request that change how scores are converted to objects
    decode_on_host           whether scores are decoded on the host because the memory of the device may be too small
    views                    original and mirrored views in which windows are scored; empty: only the original view
    """

    output: OutputKind
    sw_batch_size: int
    overlap: float
    diameter: Diameter | None = None
    needs_diameter_estimate: bool = False
    has_default_diameter: bool = False
    skip_below: float | Literal["auto"] | None = None
    postprocessing: PostprocessingOptions = PostprocessingOptions()
    decode_on_host: bool = False
    views: Views = ()

    @property
    def num_views(self) -> int:
        """Number of times that each window is scored."""
        return max(len(self.views), 1)

    @property
    def diameter_notes(self) -> tuple[str, ...]:
        """A note for the user if the default diameter of the model is used."""
        if self.diameter is None or not self.has_default_diameter:
            return ()
        return (describe_default_diameter(self.diameter),)


@dataclass(frozen=True)
class ResourceEstimate:
    """Number of windows and peak memory of a request.

    The byte counts exclude the loaded model. On the CPU, all memory is host memory. A window counts once for each view
    in which it is scored. The pages of the stack are not counted, because they belong to a memory-mapped file and the
    operating system can reclaim them.
    """

    windows: int
    sw_batch_size: int
    overlap: float
    working_size: Size
    host_bytes: int
    device_bytes: int


class PlannedRequest(NamedTuple):
    """The plan of a request and its estimate."""

    plan: Plan
    estimate: ResourceEstimate


class DiameterTrial(NamedTuple):
    """Comparison of the confidence at several diameters.

    confidence            confidence at the selected diameter
    previous_confidence   confidence at the diameter that was estimated from objects, or at the original resolution if
                          there was no estimate
    num_diameters         number of diameters that were compared
    is_smallest_diameter  whether the selected diameter is the smallest that a trial compares
    """

    confidence: float
    previous_confidence: float
    num_diameters: int
    is_smallest_diameter: bool


class DiameterEstimate(NamedTuple):
    """An estimate of the object diameter.

    diameter         estimated diameter in voxels of the image, or `default`; None if it could not be estimated
    matches_model    whether the diameter suits the model without resampling
    num_objects      number of objects that were measured
    num_windows      number of windows that were scored
    likely_diameter  the diameter, or a value to suggest if the diameter could not be estimated; None if no window
                     appears to contain objects
    trial            the trial that selected the diameter; None if the diameter was estimated from the sizes of objects
    default          default diameter of the model, with which the estimate was compared; None if there is no default
    """

    diameter: Diameter | None
    matches_model: bool
    num_objects: int
    num_windows: int
    likely_diameter: Diameter | None = None
    trial: DiameterTrial | None = None
    default: Diameter | None = None

    @property
    def is_estimated(self) -> bool:
        """Whether there is a diameter that is not the default diameter of the model."""
        return self.diameter is not None and self.diameter != self.default

    @property
    def resampling_diameter(self) -> Diameter | None:
        """Object diameter to use for resampling; None if the image is used at its original resolution."""
        return None if self.matches_model else self.diameter

    @property
    def note(self) -> str:
        """A sentence about the estimate for the user."""
        if self.default is not None and self.diameter is not None:
            if not self.is_estimated:
                return describe_default_diameter(self.diameter)
            return (
                f"Objects seem to be {self.diameter.describe()} ({self.num_objects} objects in {self.num_windows}"
                f" windows), which suits the model better than {self.default}, the diameter of the stacks that it was"
                f" trained on. If this is wrong, set diameter={self.default}."
            )
        if self.trial is not None:
            limit_note = " Smaller diameters were not tried." if self.trial.is_smallest_diameter else ""
            return (
                f"Of {self.trial.num_diameters} object diameters tried on {self.num_windows} windows, {self.diameter}"
                f" gave the best result.{limit_note} If this is wrong, set diameter=, or set diameter=none to use the"
                " stack at its original resolution."
            )
        measurement = f"{self.num_objects} object{'' if self.num_objects == 1 else 's'} in {self.num_windows} windows"
        if self.diameter is None:
            return (
                f"The object diameter could not be estimated ({measurement}), so the stack is used at its original"
                " resolution. If you know the diameter, set diameter=."
            )
        estimate = f"Objects seem to be {self.diameter.describe()} ({measurement})"
        if self.matches_model:
            return f"{estimate}, so the stack needs no resampling. If this is wrong, set diameter=."
        return (
            f"{estimate}. If this is wrong, set diameter=, or set diameter=none to use the stack at its original"
            " resolution."
        )


class QualityWarning(NamedTuple):
    """Warning that a result may be wrong.

    confidence  confidence in the result, 0 to 1; None if no object was found
    detail      the likely reason and what to try next, in one or two sentences
    suggestion  a parameter to try, such as "diameter=4px"; "" if there is no suggestion
    """

    confidence: float | None
    detail: str
    suggestion: str

    @property
    def suggested_parameters(self) -> dict[str, str]:
        """Suggested value of each parameter; empty if there is no suggestion."""
        parameter, _, value = self.suggestion.partition("=")
        return {parameter: value} if parameter else {}


class SkippedWindows(NamedTuple):
    """Summary of the windows on which the network was not run.

    windows  number of skipped windows
    total    number of windows of the image
    limits   highest gray value that a skipped window may contain, per channel
    """

    windows: int
    total: int
    limits: tuple[float, ...]

    def __str__(self) -> str:
        """Return a short description for users."""
        return f"{self.windows} of {self.total} windows; up to {', '.join(f'{limit:.6g}' for limit in self.limits)}"


class SeriesInfo(NamedTuple):
    """Additional results of a series of time points.

    num_time_points  number of time points in the result, counted from the start of the series
    total            number of time points in the series
    table            measurements of all objects; None if they were not requested
    error            error that ended the series early; None if the series is complete
    """

    num_time_points: int
    total: int
    table: Table | None = None
    error: StackSegError | None = None


class Result(NamedTuple):
    """Result of one segmentation.

    seconds                run time of each stage in seconds, in this order: prepare, size (diameter estimation), skip
                           (search for empty windows), windows (the network), decode
    notes                  information for the user about this result
    diameter               object diameter, specified or estimated; None if it was neither
    is_diameter_estimated  whether the diameter was estimated
    num_fallbacks          number of times that the batch size was reduced for lack of memory
    is_recomputed          whether the scores were computed again in float32
    skipped                windows on which the network was not run; None if skipping was disabled
    spec                   spec of the model at the time of the request, even if the model has been replaced since; None
                           if no model was used
    engine                 name and precision of the engine that ran the network
    series                 additional results of a time series; None for a single volume
    confidence             confidence in the result, 0 to 1; None if it is not available or no object was found
    quality_warning        warning that the result may be wrong; None if there is no warning
    """

    segmentation: Segmentation
    seconds: dict[str, float]
    notes: tuple[str, ...]
    num_fallbacks: int = 0
    is_recomputed: bool = False
    diameter: Diameter | None = None
    is_diameter_estimated: bool = False
    skipped: SkippedWindows | None = None
    spec: ModelSpec | None = None
    engine: str = ""
    series: SeriesInfo | None = None
    confidence: float | None = None
    quality_warning: QualityWarning | None = None

    @property
    def model(self) -> str:
        """Name and version of the model."""
        return "" if self.spec is None else self.spec.identifier

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages for the user. The first one is the warning that the result may be wrong, if there is one."""
        return self.notes if self.quality_warning is None else (self.quality_warning.detail, *self.notes)

    @property
    def diameter_text(self) -> str | None:
        """Diameter in the format of the parameter `diameter`, followed by whether it was estimated or stated."""
        return (
            None
            if self.diameter is None
            else f"{self.diameter}; {'estimated' if self.is_diameter_estimated else 'stated'}"
        )


@dataclass(frozen=True)
class EngineReport:
    """Report on an engine.

    compile_mode             mode of torch.compile; None if the engine does not compile the network
    roi_size, sw_batch_size  window size and number of windows per batch
    streams                  number of batches that run concurrently
    planned                  how the engine was selected: fixed (by the configuration), known-order (the first engine in
                             a predefined order whose labels are correct) or tuned (the fastest in a comparison)
    cached                   whether the selection was made at an earlier start
    trials                   engines that were considered, each with the reason if it was not selected
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
    """Time points of one file. Pixels are read one time point at a time.

    times     indices of the time points in the file
    read      returns the volume to segment at a time point, and the volume to measure (None to measure nothing)
    shape     shape of each time point; all time points also have the same voxel size and channels
    interval  time between adjacent time points; None if it is not known
    link      method for linking objects across time points; None if they are not linked
    """

    times: range
    read: Callable[[int], tuple[Volume, Volume | None]]
    shape: StackShape
    voxel_size: VoxelSize | None
    interval: TimeInterval | None
    link: Linking | None = None

    @classmethod
    def from_description(
        cls, description: Description, read: Callable[[int], tuple[Volume, Volume | None]], link: Linking | None
    ) -> Series:
        """Return the series of the time points that were selected from a file."""
        if description.time_points is None:
            raise ValueError("The selection does not contain a range of time points.")
        times = range(*description.time_points)
        return cls(times, read, description.shape, description.voxel_size, description.time_interval, link)

    @property
    def voxel_count(self) -> int:
        """Number of voxels of one channel at all time points."""
        return len(self.times) * math.prod(self.shape[1:])
