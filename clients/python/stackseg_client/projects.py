"""Projects: the results, annotated stacks and models of one experiment under a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import quote

from stackseg_client.operations import Operation, receive_json, send_json
from stackseg_client.reports import ContentReceiver
from stackseg_client.result_files import SavePath, check_path, open_part
from stackseg_client.results import Table, parse_table

T = TypeVar("T")

Kind = Literal["job", "annotation", "model"]


class HasId(Protocol):
    """An object with an id, such as a job."""

    id: str


Member = HasId | str


@dataclass(frozen=True)
class ProjectMember:
    """A member of a project.

    kind       `job` for the result of a job, `annotation` for an annotated stack, or `model`
    id         id of the job or annotation, or name of the model
    name       name of the stack, or of the model
    group      label of the members that belong together, such as `control`; "" without one
    available  whether the member still exists
    objects    number of objects; None if unknown
    """

    kind: str
    id: str
    name: str
    group: str
    available: bool
    objects: int | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ProjectReport:
    """Description of a project.

    counts   number of members by kind
    members  the members; None in a list of projects
    """

    id: str
    name: str
    notes: str
    counts: dict[str, int]
    members: list[ProjectMember] | None
    raw: dict[str, Any] = field(repr=False)


class ClientWithRun(Protocol):
    """A synchronous client, as far as projects use it."""

    def run(self, operation: Operation[T], /) -> T:
        """Perform an operation."""


class AsyncClientWithRun(Protocol):
    """An asynchronous client, as far as projects use it."""

    async def run(self, operation: Operation[T], /) -> T:
        """Perform an operation."""


class FileReceiver:
    """Receives a response in a file, which appears only when it is complete."""

    def __init__(self, _headers: Mapping[str, str], path: Path) -> None:
        self._path = path
        self._part, self._file = open_part(path)

    def write(self, block: bytes) -> None:
        """Add a block of the response."""
        self._file.write(block)

    def finish(self) -> Path:
        """Return the path of the complete file."""
        self._file.close()
        return self._part.replace(self._path)

    def close(self) -> None:
        """Delete an incomplete file."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def create(name: str, notes: str) -> Operation[ProjectReport]:
    """`POST /projects`. Not repeatable, because the name of the second project would be taken."""
    return send_json("POST", "/projects", {"name": name, "notes": notes}, parse_project, is_repeatable=False)


def list_all() -> Operation[list[ProjectReport]]:
    """`GET /projects`."""
    return Operation("GET", "/projects", receive_json(lambda raw: [parse_project(each) for each in raw["projects"]]))


def get(project_id: str) -> Operation[ProjectReport]:
    """`GET /projects/{project}`."""
    return Operation("GET", _path(project_id), receive_json(parse_project))


def change(project_id: str, **changes: Any) -> Operation[ProjectReport]:
    """`PATCH /projects/{project}`, with the changes that are not None."""
    document = {name: value for name, value in changes.items() if value is not None}
    return send_json("PATCH", _path(project_id), document, parse_project)


def add(project_id: str, members: tuple[Member, ...], kind: Kind, group: str, name: str) -> Operation[ProjectReport]:
    """`PATCH /projects/{project}` that adds members of one kind."""
    return change(project_id, add=[{**each, "group": group, "name": name} for each in _refer_to(members, kind)])


def remove(project_id: str, members: tuple[Member, ...], kind: Kind) -> Operation[ProjectReport]:
    """`PATCH /projects/{project}` that removes members of one kind."""
    return change(project_id, remove=_refer_to(members, kind))


def delete(project_id: str) -> Operation[str]:
    """`DELETE /projects/{project}`."""
    return Operation("DELETE", _path(project_id), receive_json(lambda raw: str(raw["message"])), is_repeatable=False)


def download_table(project_id: str, columns: str) -> Operation[Table]:
    """`GET /projects/{project}/table`."""
    parameters = {"columns": columns} if columns else {}
    return Operation("GET", f"{_path(project_id)}/table", lambda _headers: ContentReceiver(parse_table), parameters)


def download_archive(project_id: str, save_to: SavePath) -> Operation[Path]:
    """`GET /projects/{project}/archive`. Raises the errors of `check_path`."""
    path = Path(save_to).expanduser()
    check_path(path)
    receive = partial(FileReceiver, path=path)
    return Operation("GET", f"{_path(project_id)}/archive", receive)


def parse_project(raw: dict[str, Any]) -> ProjectReport:
    """Parse the report of a project, or its summary in a list."""
    members, counts = raw["members"], {}
    if isinstance(members, dict):
        counts, parsed = members, None
    else:
        parsed = [_parse_member(member) for member in members]
        for member in parsed:
            counts[member.kind] = counts.get(member.kind, 0) + 1
    return ProjectReport(raw["id"], raw["name"], raw.get("notes", ""), counts, parsed, raw)


class Project:
    """A project. Results in a project do not expire. `report` has its last known state; see `ProjectReport`.

    >>> project = client.create_project("Dose response")
    >>> job = client.submit("sample.tif", table=True)
    >>> job.result().objects
    16
    >>> project.add(job, group="control").counts
    {'job': 1}
    >>> project.table("area")["group"][:2]
    array(['control', 'control'], dtype='<U7')
    >>> project.archive("trial.zip").name
    'trial.zip'
    """

    def __init__(self, client: ClientWithRun, report: ProjectReport) -> None:
        self._client, self.id, self.report = client, report.id, report

    def __repr__(self) -> str:
        return f"<Project {self.report.name!r}: {self.report.counts}>"

    def refresh(self) -> ProjectReport:
        """Return the current state with all members."""
        self.report = self._client.run(get(self.id))
        return self.report

    def add(self, *members: Member, kind: Kind = "job", group: str = "", name: str = "") -> ProjectReport:
        """Add finished jobs; or annotated stacks by their ids, or models by their names.

        Args:
            members: jobs, ids or names; those that the project contains already get the new group and name
            kind: kind of all these members
            group: label of the members that belong together, such as `control`
            name: replaces the name of the stack

        Raises ProblemError if one of them cannot be added. In this case, none is added.
        """
        self.report = self._client.run(add(self.id, members, kind, group, name))
        return self.report

    def remove(self, *members: Member, kind: Kind = "job") -> ProjectReport:
        """Remove members. Their results are deleted when they expire, unless they are in another project."""
        self.report = self._client.run(remove(self.id, members, kind))
        return self.report

    def change(self, *, name: str | None = None, notes: str | None = None) -> ProjectReport:
        """Change the name or the notes."""
        self.report = self._client.run(change(self.id, name=name, notes=notes))
        return self.report

    def table(self, columns: str = "") -> Table:
        """Return one table with the objects of all results with tables. `columns` selects some: `area,intensity_mean`.

        The first columns are `stack`, `group`, `job` and `model`.
        """
        return self._client.run(download_table(self.id, columns))

    def archive(self, save_to: SavePath) -> Path:
        """Save labels, tables, annotated stacks and models as a ZIP file, and return its path."""
        return self._client.run(download_archive(self.id, save_to))

    def delete(self) -> str:
        """Delete the project, but no annotated stacks and models. Return what happens to the results."""
        return self._client.run(delete(self.id))


class AsyncProject:
    """A project, with the methods of `Project` for asyncio."""

    def __init__(self, client: AsyncClientWithRun, report: ProjectReport) -> None:
        self._client, self.id, self.report = client, report.id, report

    def __repr__(self) -> str:
        return f"<AsyncProject {self.report.name!r}: {self.report.counts}>"

    async def refresh(self) -> ProjectReport:
        """Return the current state with all members."""
        self.report = await self._client.run(get(self.id))
        return self.report

    async def add(self, *members: Member, kind: Kind = "job", group: str = "", name: str = "") -> ProjectReport:
        """Add members of one kind, as `Project.add` does."""
        self.report = await self._client.run(add(self.id, members, kind, group, name))
        return self.report

    async def remove(self, *members: Member, kind: Kind = "job") -> ProjectReport:
        """Remove members. Their results are deleted when they expire, unless they are in another project."""
        self.report = await self._client.run(remove(self.id, members, kind))
        return self.report

    async def change(self, *, name: str | None = None, notes: str | None = None) -> ProjectReport:
        """Change the name or the notes."""
        self.report = await self._client.run(change(self.id, name=name, notes=notes))
        return self.report

    async def table(self, columns: str = "") -> Table:
        """Return one table with the objects of all results with tables."""
        return await self._client.run(download_table(self.id, columns))

    async def archive(self, save_to: SavePath) -> Path:
        """Save labels, tables, annotated stacks and models as a ZIP file, and return its path."""
        return await self._client.run(download_archive(self.id, save_to))

    async def delete(self) -> str:
        """Delete the project, but no annotated stacks and models. Return what happens to the results."""
        return await self._client.run(delete(self.id))


def _refer_to(members: tuple[Member, ...], kind: Kind) -> list[dict[str, str]]:
    return [{"kind": kind, "id": member if isinstance(member, str) else member.id} for member in members]


def _parse_member(raw: dict[str, Any]) -> ProjectMember:
    return ProjectMember(
        kind=raw["kind"],
        id=raw["id"],
        name=raw.get("name", ""),
        group=raw.get("group", ""),
        available=raw.get("available", True),
        objects=raw.get("objects"),
        raw=raw,
    )


def _path(project_id: str) -> str:
    return f"/projects/{quote(project_id, safe='')}"
