"""Requests and responses for projects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.api.messages.headers import BINARY_CONTENT, OCTET_STREAM
from service.serving.jobs.projects.store import Member, MemberKind, Project

MAX_MEMBERS_PER_REQUEST = 2000
ARCHIVE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A ZIP archive. `project.json` lists the members of the project, and the members that are"
        " missing in the archive because they were deleted.",
        "content": {"application/zip": BINARY_CONTENT, OCTET_STREAM: BINARY_CONTENT},
    }
}
TABLE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A table with one row per object. The first columns are `stack`, `group`, `job` and `model`.",
        "content": {"text/csv": {"schema": {"type": "string"}}},
    }
}


def _normalize_spaces(text: str) -> str:
    """Return a text of one line without control characters. Raises ValueError if there are any."""
    line = " ".join(text.split())
    if not line.isprintable():
        raise ValueError("the text must not contain control characters")
    return line


def _check_not_empty(text: str) -> str:
    if not text:
        raise ValueError("the name must not be empty")
    return text


Line = Annotated[str, AfterValidator(_normalize_spaces)]
ProjectName = Annotated[Line, Field(max_length=100), AfterValidator(_check_not_empty)]
Notes = Annotated[str, Field(max_length=10_000)]


class MemberReference(BaseModel):
    """A member of a project: the id of a job or of an annotated stack, or the name of a model."""

    model_config = ConfigDict(extra="forbid")

    kind: MemberKind
    id: Annotated[str, Field(pattern="^[a-z0-9_-]{1,64}$")]


class MemberRequest(MemberReference):
    """A member to add to a project, or whose name and group change.

    - `group`: label of the members that belong together, such as `control`.
    - `name`: name of the stack. Default: the name of the file, of the annotated stack or of the model.
    """

    group: Annotated[Line, Field(max_length=64)] = ""
    name: Annotated[Line, Field(max_length=200)] = ""


Members = Annotated[list[MemberRequest], Field(max_length=MAX_MEMBERS_PER_REQUEST)]


class ProjectRequest(BaseModel):
    """A new project. Its name must differ from those of the caller's other projects."""

    model_config = ConfigDict(extra="forbid")

    name: ProjectName
    notes: Notes = ""
    add: Members = []


class ProjectChange(BaseModel):
    """Changes to a project. Members that are not mentioned are not changed."""

    model_config = ConfigDict(extra="forbid")

    name: ProjectName | None = None
    notes: Notes | None = None
    add: Members = []
    remove: Annotated[list[MemberReference], Field(max_length=MAX_MEMBERS_PER_REQUEST)] = []


class MemberReport(BaseModel):
    """A member of a project.

    - `available`: whether the member still exists. The other properties are null if it was deleted.
    - `objects`: number of objects of a result or of an annotated stack.
    - `model`: name and version of a model, of the model of a result, or of the base model of an annotated stack.
    - `channel`: channel that was segmented, as in the request; null if the request did not select a channel.
    - `time_points`: number of time points of a time series; null for other results.
    - `has_table`: whether a result has a table, and its objects are therefore in the table of the project.
    - `job`: id of the job whose labels were corrected, for an annotated stack.
    - `bytes`: size of the result or of the annotated stack.
    - `expires`: when the result would be deleted if it were in no project.
    """

    kind: MemberKind
    id: str
    name: str
    group: str
    added: datetime
    available: bool
    objects: int | None = None
    model: str | None = None
    confidence: float | None = None
    channel: str | None = None
    time_points: int | None = None
    has_table: bool | None = None
    job: str | None = None
    bytes: int | None = None
    expires: datetime | None = None


class ProjectSummary(BaseModel):
    """A project without its members. `members` is the number of members, by kind."""

    id: str
    name: str
    notes: str
    created: datetime
    changed: datetime
    members: dict[MemberKind, int]


class ProjectReport(BaseModel):
    """A project with its members, in the order in which they were added."""

    id: str
    name: str
    notes: str
    created: datetime
    changed: datetime
    members: list[MemberReport]


class ProjectList(BaseModel):
    """The caller's projects. The project that was changed last is the first."""

    projects: list[ProjectSummary]


class ReleasedResult(BaseModel):
    """A result that is no longer in a project. The service deletes it at the time `expires`, which may have passed."""

    job: str
    name: str
    expires: datetime


class ProjectDeletion(BaseModel):
    """What deleting a project means for its members.

    - `released`: results that are in no other project and will therefore be deleted.
    - `kept`: number of members that are not deleted, by kind.
    - `message`: the same for the user.
    """

    released: list[ReleasedResult]
    kept: dict[MemberKind, int]
    message: str


def report_member(member: Member, *, is_available: bool = True, **properties: Any) -> MemberReport:
    """Report a member with the properties of its job, annotated stack or model."""
    return MemberReport(
        kind=member.key.kind,
        id=member.key.id,
        name=member.name,
        group=member.group,
        added=to_utc(member.added),
        available=is_available,
        **properties,
    )


def report_project(project: Project, members: list[MemberReport]) -> ProjectReport:
    """Report a project with the reports of its members."""
    return ProjectReport(**_describe_project(project), members=members)


def summarize_project(project: Project) -> ProjectSummary:
    """Report a project without its members."""
    return ProjectSummary(**_describe_project(project), members=Counter(member.key.kind for member in project.members))


def report_deletion(project: ProjectReport, released_jobs: Collection[str]) -> ProjectDeletion:
    """Report a deleted project. `released_jobs` are the ids of its jobs that are in no other project."""
    released, kept = list[ReleasedResult](), list[MemberKind]()
    for member in project.members:
        if member.id in released_jobs and member.expires is not None:
            released.append(ReleasedResult(job=member.id, name=member.name, expires=member.expires))
        elif member.available:
            kept.append(member.kind)
    expired_count = sum(result.expires <= datetime.now(UTC) for result in released)
    message = (
        f"Deleted the project {project.name}. Results that are in no other project: {len(released)}. Of these,"
        f" {expired_count} have expired and are being deleted, and the others are deleted when they expire. Annotated"
        f" stacks ({kept.count('annotation')}) and models ({kept.count('model')}) are not deleted."
    )
    return ProjectDeletion(released=released, kept=Counter(kept), message=message)


def _describe_project(project: Project) -> dict[str, Any]:
    return {
        "id": project.id,
        "name": project.name,
        "notes": project.notes,
        "created": to_utc(project.created),
        "changed": to_utc(project.changed),
    }


def to_utc(timestamp: float) -> datetime:
    """Convert a POSIX timestamp to a datetime in UTC."""
    return datetime.fromtimestamp(timestamp, UTC)
