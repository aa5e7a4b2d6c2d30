"""The descriptions of all tools for agents, by which a language model chooses a tool."""

from __future__ import annotations

from service.api.agents import arguments as args
from service.api.agents import job_tools, preview_tools, stack_tools
from service.api.agents.calls import Tool

INSTRUCTIONS = (
    "StackSeg segments 3D microscopy stacks. Stacks are never part of a tool call: the service reads them as `input`"
    " (a file in a folder of its host, or the URL of an OME-Zarr in a store, if the operator has listed the folder or"
    " the store), or as `stack` (the id of a stack that the user has uploaded with POST /stacks). Typical order:"
    " inspect_stack, preview_stack, segment_stack, get_job until the state is done, preview_result to check the"
    " outlines, get_object_table. Heed `doubt` and `warnings` in the report of a job: they name parameters to try. The"
    " user can download labels from the URL path `result` of a job."
)

TOOLS = (
    Tool(
        "list_models",
        "List models",
        "List the segmentation models: purpose, training data, license, and number of input channels.",
        args.NoArguments,
        stack_tools.list_models,
    ),
    Tool(
        "inspect_stack",
        "Inspect a stack",
        "Describe a stack without segmenting it: axes, shape, voxel size, channels, scenes, time points, and the"
        " expected time and memory. `problem` says why it cannot be segmented as requested. If you do not know the path"
        " of `input`, pass a guess: the error lists the folders and stores that you may use.",
        args.StackArguments,
        stack_tools.inspect_stack,
        args.INSPECTION_PARAMETERS,
    ),
    Tool(
        "preview_stack",
        "Preview a stack",
        "Picture of one plane along Z of one channel of a stack.",
        args.StackPreviewArguments,
        preview_tools.preview_stack,
        (*args.STACK_PARAMETERS, "plane"),
    ),
    Tool(
        "segment_stack",
        "Segment a stack",
        "Segment a stack in a background job and return the report of the job. If the job does not end within"
        " `wait_seconds`, call get_job with its id. Objects are measured unless `output_to` or another output is set."
        " With `output_to`, the result is written to the host of the service. A folder as `input` needs `output_to`.",
        args.SegmentationArguments,
        job_tools.segment_stack,
        args.SEGMENTATION_PARAMETERS,
        is_read_only=False,
    ),
    Tool(
        "get_job",
        "Get the state of a job",
        "State, progress, remaining time, number of objects, confidence and warnings of a job.",
        args.JobStateArguments,
        job_tools.get_job,
    ),
    Tool("list_jobs", "List jobs", "List your jobs, newest first.", args.JobListArguments, job_tools.list_jobs),
    Tool(
        "cancel_job",
        "Cancel a job",
        "Cancel a waiting or running job. Jobs that have ended, and their results, are not changed.",
        args.JobArguments,
        job_tools.cancel_job,
        is_read_only=False,
        is_destructive=True,
    ),
    Tool(
        "get_object_table",
        "Get the object table of a job",
        "Measurements of the objects as CSV, one row per object: size, position, intensity and confidence. The first"
        " line states which rows are included, and how many there are.",
        args.TableArguments,
        job_tools.get_object_table,
    ),
    Tool(
        "preview_result",
        "Preview the result of a job",
        "Picture of one plane of the result of a job: outlines of the objects on the stack, to check the segmentation.",
        args.ResultPreviewArguments,
        preview_tools.preview_result,
    ),
)
TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}
