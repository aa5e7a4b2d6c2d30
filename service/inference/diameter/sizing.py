"""The object diameter of one request: estimated where the request leaves it open, and used to plan the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from service.core.errors import OutOfMemory, TooLarge
from service.core.quantities import Diameter
from service.core.types import Extent
from service.inference.diameter.estimation import DiameterEstimator
from service.inference.preprocessing.resample import base_factors
from service.inference.types import PlannedRequest, Sizing
from service.inference.windows.sliding_window import Image, ScoreWindows
from service.models.spec import ModelSpec


class SizedRequest(NamedTuple):
    """Request after the diameter of its objects was stated or estimated; None: neither is the case."""

    request: PlannedRequest
    diameter: Diameter | None
    notes: tuple[str, ...] = ()


def measure_diameter(image: Image, volume: Extent, spec: ModelSpec, score_windows: ScoreWindows) -> Sizing:
    """Estimate the diameter of the objects in the normalised image of a volume. Raises what `score_windows` raises."""
    base = base_factors(volume, spec)
    return DiameterEstimator(image, base, spec, score_windows, volume.voxel_size).estimate()


def plan_by_diameter(
    request: PlannedRequest, sizing: Sizing, plan_with: Callable[[Diameter], PlannedRequest]
) -> SizedRequest:
    """Plan a request anew with the estimated diameter, if resampling by it brings something.

    `plan_with` may raise TooLarge and OutOfMemory; the stack is then used at its original resolution.
    """
    if sizing.resampled_by is None:
        return SizedRequest(request, sizing.diameter, (sizing.note,))
    try:
        planned, estimate = plan_with(sizing.resampled_by)
    except (TooLarge, OutOfMemory) as error:
        note = f"Objects seem to be {sizing.diameter} wide, yet the stack is used as it is sampled: {error}"
        return SizedRequest(request, sizing.diameter, (note,))
    plan = request.plan._replace(diameter=sizing.resampled_by, decode_on_host=planned.decode_on_host)
    return SizedRequest(PlannedRequest(plan, estimate), sizing.diameter, (sizing.note,))
