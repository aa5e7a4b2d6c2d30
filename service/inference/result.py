"""Results of segmentations, and reports on how a model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from service.core.errors import StackSegError
from service.core.quantities import Diameter, Size
from service.core.types import Segmentation
from service.engine.tuning.plans import Trial
from service.inference.diameter.confidence import Doubt
from service.inference.measurements import Table
from service.inference.preprocessing.empty_windows import Skipped
from service.models.spec import ModelSpec


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
