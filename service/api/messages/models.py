"""Responses about models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel

from service.api.messages.text import RedactedText
from service.core.errors import remove_host_details
from service.inference.types import EngineReport
from service.models.input_spec import Input
from service.models.repository import PICTURE_FILE
from service.models.spec import Lineage, ModelSpec
from service.serving.devices.models.state import ModelState
from service.serving.runtime import Runtime


def _remove_folders_from_report(report: EngineReport) -> EngineReport:
    trials = tuple(
        replace(trial, verdict=trial.verdict._replace(detail=remove_host_details(trial.verdict.detail)))
        for trial in report.trials
    )
    return replace(report, warnings=tuple(map(remove_host_details, report.warnings)), trials=trials)


RedactedEngineReport = Annotated[EngineReport, AfterValidator(_remove_folders_from_report)]


class LoadedModel(BaseModel):
    """A model on one device. `bytes` is its size in device memory, and `used` is when a request last used it."""

    device: str
    bytes: int
    used: datetime


class PublicationReference(BaseModel):
    """A publication to cite. `url` is its address, with which a DOI is resolved; null if it is unknown."""

    text: str
    url: str | None


class ModelInfo(BaseModel):
    """A model that the service offers.

    - `state`: `unloaded` until the first request for the model, `loading`, `ready`, or `failed` (see `problem`).
    - `picture`: URL path of an image that shows what the model segments; null if the model has neither an image nor a
      sample.
    - `authors`, `cite`: authors of the model, and publications to cite; empty if its model file does not state them.
    - `outputs`: names of the output channels of the network.
    - `calibrated`: whether the confidence of an object is the probability that it matches a true object, and the
      confidence of a result is the expected F1.
    - `lineage`: for a model that was trained on this service, its base model and the scores before and after training.
    - `removable`: whether the caller may delete the model. Only models that were trained on this service can be
      deleted, and only by admins or with the API key of the client that trained the model.
    - `engine`: engine, precision and memory format of a loaded model, and warnings about them.
    - `devices`: devices on which the model is loaded.
    - `problem`: why the model cannot be used; null if it can be used.
    """

    name: str
    state: str
    picture: str | None = None
    version: str | None = None
    summary: str | None = None
    licence: str | None = None
    training_data: str | None = None
    authors: tuple[str, ...] = ()
    cite: list[PublicationReference] = []
    architecture: str | None = None
    input: Input | None = None
    outputs: tuple[str, ...] = ()
    decoding: str | None = None
    calibrated: bool = False
    lineage: Lineage | None = None
    removable: bool = False
    engine: RedactedEngineReport | None = None
    loaded: bool = False
    devices: list[LoadedModel] = []
    problem: RedactedText | None = None


class ModelList(BaseModel):
    """All models. `default` is the model that is used for requests without the parameter `model`."""

    default: str | None
    models: list[ModelInfo]


class ModelReload(BaseModel):
    """Names of the models that were added, changed and removed.

    `broken` contains error messages for model folders that could not be loaded, by model name.
    """

    added: list[str]
    changed: list[str]
    removed: list[str]
    broken: dict[str, RedactedText]


def find_picture(spec: ModelSpec) -> Path | None:
    """Return the path of the picture in a model folder; None if there is none."""
    path = spec.folder / PICTURE_FILE
    return path if path.is_file() else None


def report_models(runtime: Runtime, can_delete: Callable[[ModelState], bool]) -> ModelList:
    """Report all models in the repository. `can_delete` returns whether the caller may delete a model."""
    models = [report_model(model, removable=can_delete(model)) for model in runtime.models.list_states()]
    return ModelList(default=runtime.models.default_name, models=models)


def report_model(model: ModelState, *, removable: bool) -> ModelInfo:
    """Report the metadata, state and devices of a model."""
    spec, engine = model.spec, model.device_model.report() if model.device_model else None
    if spec is None:
        return ModelInfo(name=model.name, state=model.state, removable=removable, problem=model.problem)
    return ModelInfo(
        name=spec.name,
        state=model.state,
        version=spec.version,
        summary=spec.summary,
        picture=f"/models/{spec.name}/picture" if find_picture(spec) or spec.sample else None,
        licence=spec.licence,
        training_data=spec.training_data,
        authors=spec.authors,
        cite=[PublicationReference(text=citation.text, url=citation.address) for citation in spec.cite],
        architecture=spec.network_name,
        input=spec.input,
        outputs=spec.outputs,
        decoding=spec.decoding.kind,
        calibrated=spec.confidence is not None and spec.confidence.objects is not None,
        lineage=spec.lineage,
        removable=removable,
        engine=engine,
        loaded=model.device_model is not None,
        devices=[
            LoadedModel(
                device=device, bytes=loaded_model.nbytes, used=datetime.fromtimestamp(loaded_model.last_used, UTC)
            )
            for device, loaded_model in model.usage.items()
        ],
        problem=model.problem,
    )
