"""GET /limits: what the caller may do beyond segmenting, so that a page can leave out what is switched off."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.dependencies import RuntimeDependency
from service.api.schemas import Abilities

router = APIRouter(tags=["operation"])


@router.get("/limits")
async def limits(runtime: RuntimeDependency) -> Abilities:
    """Whether corrected labels are kept, and how much of them."""
    quota = runtime.settings.annotations.quota_bytes
    return Abilities(corrections=quota > 0, annotations_bytes=quota, training=False)
