"""Tools that list the models, and describe a stack without segmenting it."""

from __future__ import annotations

from service.api.agents.arguments import NoArguments, StackArguments
from service.api.agents.calls import Client, ToolAnswer
from service.api.messages.models import report_models
from service.api.requests.admission import admit
from service.api.requests.inspection import inspect_request


async def list_models(client: Client, _arguments: NoArguments) -> ToolAnswer:
    """Return the properties of models by which a model is chosen."""
    report = report_models(client.runtime, lambda _model: False)
    members = {"name", "version", "state", "summary", "licence", "training_data", "outputs", "decoding", "problem"}
    models = [
        model.model_dump(mode="json", include=members, exclude_none=True)
        | ({} if model.input is None else {"channels": model.input.channels})
        for model in report.models
    ]
    return ToolAnswer.from_data({"default": report.default, "models": models})


async def inspect_stack(client: Client, arguments: StackArguments) -> ToolAnswer:
    """Describe a stack, and estimate the time and memory of its segmentation."""
    request = client.make_request("/inspect", arguments.make_parameters())
    query = (await admit(request, client.runtime)).query
    return ToolAnswer.from_data(await inspect_request(request, client.runtime, query))
