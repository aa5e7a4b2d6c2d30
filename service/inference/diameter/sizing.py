"""The object diameter of one request: estimated if the request does not specify it, and used to plan the request."""

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


class RequestWithDiameter(NamedTuple):
    """A planned request and its object diameter.

    diameter  specified or estimated; None if it is neither
    notes     information for the user about the estimate
    """

    request: PlannedRequest
    diameter: Diameter | None
    notes: tuple[str, ...] = ()


def measure_diameter(image: Image, volume: Extent, spec: ModelSpec, score_windows: ScoreWindows) -> Sizing:
    """Estimate the object diameter in the normalized image of a volume. Raises the errors of `score_windows`."""
    base = base_factors(volume, spec)
    return DiameterEstimator(image, base, spec, score_windows, volume.voxel_size).estimate()


def plan_with_diameter(
    request: PlannedRequest, sizing: Sizing, plan_request: Callable[[Diameter], PlannedRequest]
) -> RequestWithDiameter:
    """Plan a request again with the estimated diameter if resampling improves the result.

    If `plan_request` raises TooLarge or OutOfMemory, the stack is segmented at its original resolution.
    """
    if sizing.resampled_by is None:
        return RequestWithDiameter(request, sizing.diameter, (sizing.note,))
    try:
        planned, estimate = plan_request(sizing.resampled_by)
    except (TooLarge, OutOfMemory) as error:
        note = (
            f"The objects seem to be {sizing.diameter} wide, but the stack is segmented at its original resolution."
            f" {error}"
        )
        return RequestWithDiameter(request, sizing.diameter, (note,))
    plan = request.plan._replace(diameter=sizing.resampled_by, decode_on_host=planned.decode_on_host)
    return RequestWithDiameter(PlannedRequest(plan, estimate), sizing.diameter, (sizing.note,))
