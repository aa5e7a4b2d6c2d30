"""Tools that draw a plane of a stack, or of a stack with the outlines of its labels, as a PNG picture."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from service.api.agents.arguments import ResultPreviewArguments, StackPreviewArguments
from service.api.agents.calls import Client, ToolAnswer
from service.api.requests.body import inspect_file, receive_file
from service.api.requests.pictures import choose_clear_view, draw_view
from service.api.requests.volumes import open_host_volume, open_label_volume, open_stack_volume
from service.core.errors import BadParameter, RequestError
from service.core.quantities import TimeRange
from service.core.types import Selection, Volume
from service.formats.writers import draw_labels, draw_plane
from service.serving.jobs.active_job import JobView
from service.serving.parameters import Query
from service.serving.storage.threads import run_in_thread


async def preview_stack(client: Client, arguments: StackPreviewArguments) -> ToolAnswer:
    """Draw a plane of a stack in gray."""
    async with AsyncExitStack() as exit_stack:
        selection, time_note = arguments.selection, ""
        try:
            volume = await _open_image(client, exit_stack, arguments, selection)
        except BadParameter as error:
            if error.parameter != "time" or isinstance(selection.time, int):
                raise
            selection, time_note = await _choose_time(client, arguments)
            volume = await _open_image(client, exit_stack, arguments, selection)
        view = await choose_clear_view(client.runtime, client.quota_name, volume, arguments.plane)
        png = await draw_view(client.runtime, client.quota_name, [volume], view, draw_plane)
    return ToolAnswer(f"{time_note}{view.describe()} {_describe_grid(volume)}", image=png)


async def preview_result(client: Client, arguments: ResultPreviewArguments) -> ToolAnswer:
    """Draw a plane of the labels of a job: their outlines on the stack if it still exists, otherwise their areas."""
    time, time_note = arguments.time, ""
    if time is None:
        file, metadata = await run_in_thread(partial(client.async_jobs.open_result, arguments.job, client.name))
        file.close()
        if metadata.time_points is not None and metadata.time_points[0] > 1:
            time, time_note = _choose_middle(0, metadata.time_points[0])
    labels = await open_label_volume(client.make_request("", {}), client.runtime, arguments.job, time)
    job = await run_in_thread(partial(client.async_jobs.view, arguments.job, client.name))
    async with AsyncExitStack() as exit_stack:
        image = await _find_image(client, exit_stack, job, labels, time or 0)
        shown = labels if image is None else image
        view = await choose_clear_view(client.runtime, client.quota_name, shown, arguments.plane)
        draw = partial(draw_view, client.runtime, client.quota_name, view=view)
        if labels.dtype.kind == "f":
            drawing, png = "Probabilities of the first class.", await draw([labels], draw_planes=draw_plane)
        elif image is None:
            drawing, png = "Labels in color, without the stack.", await draw([labels], draw_planes=draw_labels)
        else:
            drawing, png = "Outlines of the labels.", await draw([image, labels], draw_planes=draw_plane)
    return ToolAnswer(f"{time_note}{view.describe()} {drawing} {_describe_grid(labels)}", image=png)


async def _choose_time(client: Client, arguments: StackPreviewArguments) -> tuple[Selection, str]:
    """Select the middle one of the selected time points of a file. Return the selection, and a sentence about it."""
    request = client.make_request("/inspect", arguments.make_parameters())
    async with receive_file(request, arguments) as file:
        description = await inspect_file(client.runtime, file)
    time, note = _choose_middle(*(description.time_points or (0, description.times)))
    return replace(arguments.selection, time=time), note


def _choose_middle(first: int, stop: int) -> tuple[int, str]:
    """Return the middle time point, and a sentence about it."""
    time = (first + stop) // 2
    return time, f"Time point {time}, the middle one of {first} to {stop - 1}. Set `time` to see another one. "


async def _find_image(
    client: Client, exit_stack: AsyncExitStack, job: JobView, labels: Volume, time: int
) -> Volume | None:
    """Open the stack that a job has segmented. Return None if it was not stored, or has been deleted or changed."""
    query = Query.model_validate(job.record.request.parameters)
    if query.stack is None and query.input is None:
        return None
    selected_time = query.selection.time
    if isinstance(selected_time, TimeRange):
        selected_time = selected_time.first + time
    selection = replace(query.selection, time=selected_time)
    try:
        image = await _open_image(client, exit_stack, query, selection)
    except RequestError:
        return None
    return image if image.shape[1:] == labels.shape[1:] else None


async def _open_image(client: Client, exit_stack: AsyncExitStack, query: Query, selection: Selection) -> Volume:
    request = client.make_request("", {})
    if query.stack is not None:
        return await open_stack_volume(request, client.runtime, query.stack, selection)
    opened = open_host_volume(request, client.runtime, query.input or "", selection)
    return await exit_stack.enter_async_context(opened)


def _describe_grid(volume: Volume) -> str:
    size = " x ".join(map(str, volume.shape[1:]))
    if volume.voxel_size is None:
        return f"The stack has {size} voxels (Z x Y x X) of unknown size."
    voxel_size = " x ".join(f"{edge:.4g}" for edge in volume.voxel_size)
    return f"The stack has {size} voxels (Z x Y x X) of {voxel_size} micrometers."
