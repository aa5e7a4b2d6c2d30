"""Tools that segment stacks as jobs, follow and cancel jobs, and read their object tables."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import IO, BinaryIO, TextIO
from zipfile import ZipFile

from service.api.agents.arguments import (
    JobArguments,
    JobListArguments,
    JobStateArguments,
    SegmentationArguments,
    TableArguments,
)
from service.api.agents.calls import Client, ToolAnswer
from service.api.messages.jobs import JobReport, report_job
from service.api.requests.jobs import submit_job
from service.core.errors import BadParameter
from service.serving.results.answers import MEASUREMENTS_FILE
from service.serving.results.media_types import ARCHIVE_TYPE, TABLE_TYPE
from service.serving.results.metadata import ResultMetadata
from service.serving.storage.threads import run_in_thread

# Interval between checks of a job while a tool waits for its end.
POLL_SECONDS = 0.25
# Maximum size of the rows in one answer. A table with many channels has long rows.
MAX_TABLE_CHARS = 50_000
END_STATES = {"done", "failed", "cancelled", "expired"}


async def segment_stack(client: Client, arguments: SegmentationArguments) -> ToolAnswer:
    """Submit a job, and wait for its end. By default, objects are measured if the result contains labels."""
    parameters = arguments.make_parameters()
    if arguments.measurements is None and arguments.output_to is None and _gives_labels(client, arguments):
        parameters["measurements"] = "zip"
    report = await submit_job(client.make_request("/jobs", parameters), client.runtime, client.async_jobs)
    return ToolAnswer.from_data(await _wait_for_end(client, report.id, arguments.wait_seconds))


def _gives_labels(client: Client, arguments: SegmentationArguments) -> bool:
    spec = client.runtime.models.get_spec(arguments.model)
    return client.runtime.get_estimator(spec).get_output_kind(arguments.options) == "labels"


async def get_job(client: Client, arguments: JobStateArguments) -> ToolAnswer:
    """Return the report of a job, if requested after its end."""
    return ToolAnswer.from_data(await _wait_for_end(client, arguments.job, arguments.wait_seconds))


async def list_jobs(client: Client, arguments: JobListArguments) -> ToolAnswer:
    """Return short reports of the newest jobs."""
    views = await run_in_thread(partial(client.async_jobs.list_newest, client.name, arguments.limit))
    reports = [report_job(view, client.async_jobs.keep_seconds, client.request.scope) for view in views]
    members = {"id", "state", "name", "model", "created", "ended", "objects", "confidence", "problem"}
    jobs = [report.model_dump(mode="json", include=members, exclude_none=True) for report in reports]
    return ToolAnswer.from_data({"jobs": jobs})


async def cancel_job(client: Client, arguments: JobArguments) -> ToolAnswer:
    """Cancel an unfinished job. Unlike `DELETE /jobs/{job}`, this never deletes a result."""
    await run_in_thread(partial(client.async_jobs.cancel, arguments.job, client.name, keep_finished=True))
    return ToolAnswer.from_data(await _report(client, arguments.job))


async def _wait_for_end(client: Client, job: str, seconds: float) -> JobReport:
    """Return the report of a job as soon as the job ends, the time is over, or the service shuts down."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        report = await _report(client, job)
        seconds_left = deadline - loop.time()
        if report.state in END_STATES or seconds_left <= 0 or client.runtime.is_draining:
            return report
        await asyncio.sleep(min(POLL_SECONDS, seconds_left))


async def _report(client: Client, job: str) -> JobReport:
    view = await run_in_thread(partial(client.async_jobs.view, job, client.name))
    return report_job(view, client.async_jobs.keep_seconds, client.request.scope)


async def get_object_table(client: Client, arguments: TableArguments) -> ToolAnswer:
    """Return rows of the object table of a job as CSV, and state how many rows there are."""
    file, metadata = await run_in_thread(partial(client.async_jobs.open_result, arguments.job, client.name))
    threads = client.runtime.decode_threads.for_client(client.quota_name)
    with file:
        return await run_in_thread(partial(_read_rows, file, metadata, arguments), threads)


def _read_rows(file: BinaryIO, metadata: ResultMetadata, arguments: TableArguments) -> ToolAnswer:
    with _open_table(file, metadata) as table:
        records = csv.reader(table)
        header = next(records, [])
        skipped_count = sum(1 for _ in islice(records, arguments.first - 1))
        rows, char_count, omitted_count = list[list[str]](), 0, 0
        for row in islice(records, arguments.rows):
            char_count += sum(map(len, row)) + len(row)
            if rows and char_count > MAX_TABLE_CHARS:
                omitted_count = 1
                break
            rows.append(row)
        total_count = skipped_count + len(rows) + omitted_count + sum(1 for _ in records)
    if total_count and not rows:
        raise BadParameter(
            f"first: the table has {total_count} rows. Choose a number from 1 to {total_count}.", parameter="first"
        )
    return _describe_rows(header, rows, arguments.first, total_count)


@contextmanager
def _open_table(file: BinaryIO, metadata: ResultMetadata) -> Iterator[TextIO]:
    """Open the object table in a result. Raises BadParameter if it has none."""
    with ExitStack() as exit_stack:
        content: IO[bytes] = file
        if metadata.media_type == ARCHIVE_TYPE:
            archive = exit_stack.enter_context(ZipFile(file))
            content = exit_stack.enter_context(archive.open(MEASUREMENTS_FILE))
        elif metadata.media_type != TABLE_TYPE:
            raise BadParameter(
                "This job has no object table. Segment the stack again with measurements=zip and without output_to."
                " Only labels can be measured, not classes or probabilities."
            )
        yield io.TextIOWrapper(content, "utf-8", newline="")


def _describe_rows(header: list[str], rows: list[list[str]], first: int, total_count: int) -> ToolAnswer:
    last = first + len(rows) - 1
    if not rows:
        statement = "The table has no rows, because no objects were found."
    elif last < total_count:
        statement = f"Rows {first} to {last} of {total_count}. The next row is {last + 1}."
    else:
        statement = f"Rows {first} to {last} of {total_count}."
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return ToolAnswer(f"{statement}\n{text.getvalue()}")
