"""The tools that agents can call, with their descriptions, and the dispatch of calls to them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from service.api.agents import arguments as args
from service.api.agents import jobs, previews
from service.api.agents.calls import Client, ToolAnswer
from service.api.messages.models import report_models
from service.api.messages.problems import handle_error
from service.api.requests.admission import admit
from service.api.requests.inspection import inspect_request
from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error

log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "StackSeg segments 3D microscopy stacks. Stacks are never part of a tool call: the service reads them as `input`"
    " (a file in a folder of its host, or the URL of an OME-Zarr in a store, if the operator has listed the folder or"
    " the store), or as `stack` (the id of a stack that the user has uploaded with POST /stacks). Typical order:"
    " inspect_stack, preview_stack, segment_stack, get_job until the state is done, preview_result to check the"
    " outlines, get_object_table. Heed `doubt` and `warnings` in the report of a job: they name parameters to try. The"
    " user can download labels from the URL path `result` of a job."
)


@dataclass(frozen=True)
class Tool:
    """A tool: its description for language models, the model of its arguments, and its function.

    argument_names  the arguments to describe; None: all
    is_read_only    whether the tool changes nothing
    is_destructive  whether the tool may undo work
    """

    name: str
    title: str
    description: str
    arguments: type[BaseModel]
    run: Callable[[Client, Any], Awaitable[ToolAnswer]]
    argument_names: Collection[str] | None = None
    is_read_only: bool = True
    is_destructive: bool = False

    @property
    def input_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return args.describe_arguments(self.arguments, self.argument_names)


async def list_models(client: Client, _arguments: args.NoArguments) -> ToolAnswer:
    """Return the properties of models by which a model is chosen."""
    report = report_models(client.runtime, lambda _model: False)
    members = {"name", "version", "state", "summary", "licence", "training_data", "outputs", "decoding", "problem"}
    models = [
        model.model_dump(mode="json", include=members, exclude_none=True)
        | ({} if model.input is None else {"channels": model.input.channels})
        for model in report.models
    ]
    return ToolAnswer.from_data({"default": report.default, "models": models})


async def inspect_stack(client: Client, arguments: args.StackArguments) -> ToolAnswer:
    """Describe a stack, and estimate the time and memory of its segmentation."""
    request = client.make_request("/inspect", arguments.make_parameters())
    query = (await admit(request, client.runtime)).query
    return ToolAnswer.from_data(await inspect_request(request, client.runtime, query))


TOOLS = (
    Tool(
        "list_models",
        "List models",
        "List the segmentation models: purpose, training data, license, and number of input channels.",
        args.NoArguments,
        list_models,
    ),
    Tool(
        "inspect_stack",
        "Inspect a stack",
        "Describe a stack without segmenting it: axes, shape, voxel size, channels, scenes, time points, and the"
        " expected time and memory. `problem` says why it cannot be segmented as requested. If you do not know the path"
        " of `input`, pass a guess: the error lists the folders and stores that you may use.",
        args.StackArguments,
        inspect_stack,
        args.INSPECTION_PARAMETERS,
    ),
    Tool(
        "preview_stack",
        "Preview a stack",
        "Picture of one plane along Z of one channel of a stack.",
        args.StackPreviewArguments,
        previews.preview_stack,
        (*args.STACK_PARAMETERS, "plane"),
    ),
    Tool(
        "segment_stack",
        "Segment a stack",
        "Segment a stack in a background job and return the report of the job. If the job does not end within"
        " `wait_seconds`, call get_job with its id. Objects are measured unless `output_to` or another output is set."
        " With `output_to`, the result is written to the host of the service. A folder as `input` needs `output_to`.",
        args.SegmentationArguments,
        jobs.segment_stack,
        args.SEGMENTATION_PARAMETERS,
        is_read_only=False,
    ),
    Tool(
        "get_job",
        "Get the state of a job",
        "State, progress, remaining time, number of objects, confidence and warnings of a job.",
        args.JobStateArguments,
        jobs.get_job,
    ),
    Tool("list_jobs", "List jobs", "List your jobs, newest first.", args.JobListArguments, jobs.list_jobs),
    Tool(
        "cancel_job",
        "Cancel a job",
        "Cancel a waiting or running job. Jobs that have ended, and their results, are not changed.",
        args.JobArguments,
        jobs.cancel_job,
        is_read_only=False,
        is_destructive=True,
    ),
    Tool(
        "get_object_table",
        "Get the object table of a job",
        "Measurements of the objects as CSV, one row per object: size, position, intensity and confidence. The first"
        " line states which rows are included, and how many there are.",
        args.TableArguments,
        jobs.get_object_table,
    ),
    Tool(
        "preview_result",
        "Preview the result of a job",
        "Picture of one plane of the result of a job: outlines of the objects on the stack, to check the segmentation.",
        args.ResultPreviewArguments,
        previews.preview_result,
    ),
)
TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


async def call_tool(request: Request, tool: Tool, arguments: Mapping[str, Any]) -> ToolAnswer:
    """Call a tool for the client of an HTTP request. An error becomes an answer with the text of its problem document.

    If the calling task is cancelled, the tool is cancelled as well.
    """
    task = asyncio.ensure_future(_run(request, tool, arguments))
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if (exception := task.exception()) is None:
        return task.result()
    error = translate_error(exception)
    if not isinstance(error, StackSegError):
        log.error("the tool %s failed", tool.name, exc_info=exception)
    response = handle_error(request, error if isinstance(error, Exception) else Exception())
    problem = json.loads(bytes(response.body))
    return ToolAnswer(problem["detail"], problem, is_error=True)


async def _run(request: Request, tool: Tool, arguments: Mapping[str, Any]) -> ToolAnswer:
    return await tool.run(Client(request), args.parse_arguments(tool.arguments, arguments))
