"""GET /limits: what the caller may do beyond segmenting, so that a page can leave out what is switched off."""

from __future__ import annotations

from fastapi import APIRouter, Request

from service.api.access.authentication import check_trainer
from service.api.dependencies import RuntimeDependency, get_trainings
from service.api.schemas import Abilities
from service.core.errors import SwitchedOff, Unauthorized

router = APIRouter(tags=["operation"])


@router.get("/limits")
async def limits(request: Request, runtime: RuntimeDependency) -> Abilities:
    """Whether corrected labels are kept, how much of them, and whether the caller may train on them, else why not."""
    quota = runtime.settings.annotations.quota_bytes
    problem: str | None = None
    try:
        get_trainings(request).check_enabled()
        check_trainer(request, runtime.settings.access)
    except (SwitchedOff, Unauthorized) as error:
        problem = str(error)
    return Abilities(
        corrections=quota > 0,
        annotations_bytes=quota,
        training=problem is None,
        training_problem=problem,
        training_minutes=runtime.settings.trainings.minutes,
    )
