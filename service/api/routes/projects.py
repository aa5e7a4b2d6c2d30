"""/projects: results, annotated stacks and models of one experiment, with one table and one archive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.dependencies import (
    RuntimeDependency,
    get_caller,
    get_quota_name,
)
from service.api.messages.headers import make_url_path
from service.api.messages.learning import ID_PATTERN
from service.api.messages.projects import (
    ARCHIVE_RESPONSES,
    TABLE_RESPONSES,
    ProjectChange,
    ProjectDeletion,
    ProjectList,
    ProjectReport,
    ProjectRequest,
    report_deletion,
    summarize_project,
)
from service.api.messages.result_headers import describe_attachment
from service.api.requests.jobs import AsyncJobsDependency
from service.api.requests.json_body import describe_json_body, read_json
from service.api.requests.projects import ProjectMembers, get_projects
from service.serving.jobs.projects.archive import make_path_part, stream_archive
from service.serving.jobs.projects.results import join_tables
from service.serving.jobs.projects.store import MemberKey, Project, ProjectChanges
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["projects"])

# Maximum size of the JSON body.
MAX_BODY_BYTES = 2**20
ProjectId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of the project.")]


class ChunkedResponse(StreamingResponse):
    """Response that sends the chunks of a generator, and closes the generator even if the client disconnects."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, name: str) -> None:
        headers = {"Content-Disposition": describe_attachment(name), "Cache-Control": "no-store"}
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


@router.post("/projects", status_code=201, openapi_extra=describe_json_body(ProjectRequest))
async def create_project(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, response: Response
) -> ProjectReport:
    """Create a project.

    A project collects results, annotated stacks and models. The service does not delete results that are in a project.
    Only the API key that created the project can see it.
    """
    body = await read_json(request, ProjectRequest, MAX_BODY_BYTES)
    members = ProjectMembers(request, runtime, async_jobs)

    def create() -> ProjectReport:
        changes = ProjectChanges(body.name, body.notes, (), members.name_new_members(body.add))
        return members.report(get_projects(request).create(get_caller(request), changes))

    report = await run_in_thread(create)
    response.headers["Location"] = make_url_path(request.scope, f"/projects/{report.id}")
    return report


@router.get("/projects")
async def list_projects(request: Request) -> ProjectList:
    """List the caller's projects."""
    projects = await run_in_thread(partial(get_projects(request).list_newest_first, get_caller(request)))
    return ProjectList(projects=[summarize_project(project) for project in projects])


@router.get("/projects/{project}")
async def get_project(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, project: ProjectId
) -> ProjectReport:
    """Get a project with its members."""
    members = ProjectMembers(request, runtime, async_jobs)
    return await run_in_thread(lambda: members.report(_find_project(request, project)))


@router.patch("/projects/{project}", openapi_extra=describe_json_body(ProjectChange))
async def change_project(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, project: ProjectId
) -> ProjectReport:
    """Change the name, the notes or the members of a project.

    Members are removed before others are added. Adding a member again changes its name and group. If any change is not
    possible, none is made.
    """
    body = await read_json(request, ProjectChange, MAX_BODY_BYTES)
    members = ProjectMembers(request, runtime, async_jobs)

    def change() -> ProjectReport:
        removed = [MemberKey(member.kind, member.id) for member in body.remove]
        changes = ProjectChanges(body.name, body.notes, removed, members.name_new_members(body.add))
        return members.report(get_projects(request).change(project, get_caller(request), changes))

    return await run_in_thread(change)


@router.delete("/projects/{project}")
async def delete_project(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, project: ProjectId
) -> ProjectDeletion:
    """Delete a project.

    Results that are in no other project are deleted `jobs.keep_hours` after their jobs ended. Annotated stacks and
    models are not deleted. The response lists both.
    """
    members = ProjectMembers(request, runtime, async_jobs)

    def delete() -> ProjectDeletion:
        report = members.report(_find_project(request, project))
        released_jobs = {record.id for record in get_projects(request).delete(project, get_caller(request))}
        return report_deletion(report, released_jobs)

    return await run_in_thread(delete)


@router.get(
    "/projects/{project}/table",
    response_class=StreamingResponse,
    responses=TABLE_RESPONSES,
)
async def download_table(
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    project: ProjectId,
    columns: Annotated[
        str,
        Query(
            max_length=1000,
            description="Measurements to include, such as `area,intensity_mean`. Numbers of channels and axes are"
            " omitted: `centroid` selects `centroid-0`, `centroid-1` and `centroid-2`. Default: all.",
        ),
    ] = "",
) -> Response:
    """Download one table with the objects of all results of a project.

    Contains the results of jobs with the parameter `measurements`. The labels are those before any correction.
    """
    found_project = await run_in_thread(partial(_find_project, request, project))
    members = ProjectMembers(request, runtime, async_jobs)
    results = await run_in_thread(partial(members.list_measured_results, found_project))
    chunks = join_tables(results, [name.strip() for name in columns.split(",") if name.strip()])
    return await _stream(request, runtime, chunks, "text/csv", f"{make_path_part(found_project.name)}_objects.csv")


@router.get("/projects/{project}/archive", response_class=StreamingResponse, responses=ARCHIVE_RESPONSES)
async def download_archive(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, project: ProjectId
) -> Response:
    """Download a project as a ZIP archive.

    Contains the labels and tables of all results, their joined table, the images and labels of the annotated stacks,
    the models that the caller has trained, and the properties of all members with the parameters of their jobs.
    """
    found_project = await run_in_thread(partial(_find_project, request, project))
    chunks = stream_archive(ProjectMembers(request, runtime, async_jobs).list_archived_files(found_project))
    return await _stream(request, runtime, chunks, "application/zip", f"{make_path_part(found_project.name)}.zip")


def _find_project(request: Request, project: str) -> Project:
    return get_projects(request).find(project, get_caller(request))


async def _stream(
    request: Request, runtime: Runtime, chunks: Generator[bytes, None, None], media_type: str, name: str
) -> Response:
    """Return the response with a file whose chunks are computed in a thread while they are sent.

    Errors before the first chunk are problem documents.
    """
    threads = runtime.host_threads.for_client(get_quota_name(request))
    read_chunk = partial(next, chunks, None)
    first_chunk = None if request.method == "HEAD" else await run_in_thread(read_chunk, threads)

    async def iterate() -> AsyncGenerator[bytes, None]:
        chunk = first_chunk
        with closing(chunks):
            while chunk is not None:
                yield chunk
                chunk = await run_in_thread(read_chunk, threads)

    return ChunkedResponse(iterate(), media_type, name)
