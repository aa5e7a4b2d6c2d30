"""Projects on disk, in the database of the jobs. The service does not delete jobs that are in a project."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from service.core.errors import BadParameter, JobNotFinished, OutOfStorage, ResultUnavailable, UnknownProject
from service.serving.jobs.record import JobRecord

if TYPE_CHECKING:
    import sqlite3

    from service.serving.jobs.store import JobStore

MemberKind = Literal["job", "annotation", "model"]
MAX_PROJECTS_PER_OWNER = 100
MAX_MEMBERS_PER_PROJECT = 2000
MAX_MEMBERS_PER_OWNER = 10_000
# Results in projects may use this fraction of the disk quota of jobs. The rest remains for new jobs.
MAX_KEPT_FRACTION = 0.5

INSERT_PROJECT = "INSERT INTO projects (id, owner, name, notes, created, changed) VALUES (?, ?, ?, ?, ?, ?)"
UPDATE_PROJECT = "UPDATE projects SET name = ?, notes = ?, changed = ? WHERE id = ?"
# Adds a member, or replaces the name and the group of an existing one.
UPSERT_MEMBER = (
    "INSERT INTO project_members (project, kind, id, name, group_name, added) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT DO UPDATE SET name = excluded.name, group_name = excluded.group_name"
)
DELETE_MEMBER = "DELETE FROM project_members WHERE project = ? AND kind = ? AND id = ?"
SELECT_MEMBERS = (
    "SELECT project, kind, id, name, group_name, added FROM project_members"
    " WHERE project IN (SELECT id FROM projects WHERE owner IS ?) ORDER BY rowid"
)
SELECT_MEMBERS_OF_PROJECT = (
    "SELECT project, kind, id, name, group_name, added FROM project_members WHERE project = ? ORDER BY rowid"
)
SELECT_JOBS_OF_PROJECT = (
    "SELECT *, TRUE AS is_kept FROM jobs"
    " WHERE id IN (SELECT id FROM project_members WHERE project = ? AND kind = 'job')"
)


class MemberKey(NamedTuple):
    """The kind and the id of a member of a project. The id of a model is its name."""

    kind: MemberKind
    id: str


class NewMember(NamedTuple):
    """A member to add to a project, or whose name and group change."""

    key: MemberKey
    name: str
    group: str


@dataclass(frozen=True)
class Member:
    """A member of a project, which may have been deleted.

    name   name of the stack or of the model when the member was added
    group  label chosen by the user, such as "control"; empty if there is none
    added  seconds since the Unix epoch
    """

    key: MemberKey
    name: str
    group: str
    added: float


@dataclass(frozen=True)
class Project:
    """A project. Times are in seconds since the Unix epoch; members are in the order in which they were added."""

    id: str
    name: str
    notes: str
    created: float
    changed: float
    members: tuple[Member, ...]


class ProjectChanges(NamedTuple):
    """Changes to a project. Members are removed before others are added. None: the name or the notes do not change."""

    name: str | None = None
    notes: str | None = None
    removed: Iterable[MemberKey] = ()
    added: Iterable[NewMember] = ()


class ProjectStore:
    """The projects of all owners, who see only their own ones. Thread-safe.

    get_jobs     returns the store of the jobs, which is available when the service has started
    quota_bytes  disk quota of the jobs
    is_shared    whether owners share the quota; an owner's results in projects may then use as much space as they leave

    Methods raise UnknownProject, and OutOfStorage and StorageUnavailable like the methods of `JobStore`.
    """

    def __init__(self, get_jobs: Callable[[], JobStore], *, quota_bytes: int, is_shared: bool) -> None:
        self._get_jobs, self._max_kept_bytes = get_jobs, int(MAX_KEPT_FRACTION * quota_bytes)
        self._is_shared = is_shared

    def create(self, owner: str | None, changes: ProjectChanges) -> Project:
        """Create a project. Raises the errors of `change`."""
        project_id, now = uuid.uuid4().hex, time.time()
        with self._get_jobs().database.transaction() as connection:
            count = connection.execute("SELECT COUNT(*) FROM projects WHERE owner IS ?", (owner,)).fetchone()[0]
            if count >= MAX_PROJECTS_PER_OWNER:
                raise OutOfStorage(f"You have {count} projects, which is the maximum. Delete one of them.")
            self._check_name(connection, owner, changes.name or "")
            values = (project_id, owner, changes.name or "", changes.notes or "", now, now)
            connection.execute(INSERT_PROJECT, values)
            self._add_members(connection, project_id, owner, changes.added)
        return self.find(project_id, owner)

    def list_newest_first(self, owner: str | None) -> list[Project]:
        """Return the projects of an owner, the one that was changed last first."""
        database = self._get_jobs().database
        with database.lock:
            rows = database.query("SELECT * FROM projects WHERE owner IS ? ORDER BY changed DESC, number DESC", owner)
            members: dict[str, list[Member]] = {}
            for row in database.query(SELECT_MEMBERS, owner):
                members.setdefault(row["project"], []).append(_decode_member(row))
        return [_decode_project(row, members.get(row["id"], ())) for row in rows]

    def find(self, project_id: str, owner: str | None) -> Project:
        """Return a project of this owner."""
        database = self._get_jobs().database
        with database.lock:
            rows = database.query("SELECT * FROM projects WHERE id = ? AND owner IS ?", project_id, owner)
            if not rows:
                raise UnknownProject("There is no such project: the ID is wrong, or the project was deleted.")
            members = map(_decode_member, database.query(SELECT_MEMBERS_OF_PROJECT, project_id))
            return _decode_project(rows[0], members)

    def change(self, project_id: str, owner: str | None, changes: ProjectChanges) -> Project:
        """Make all changes or none. The caller checks that the annotated stacks and the models to add exist.

        Raises UnknownJob, JobNotFinished and ResultUnavailable for jobs without a result, BadParameter for a name that
        another project has, and OutOfStorage if a limit would be exceeded.
        """
        with self._get_jobs().database.transaction() as connection:
            project = self.find(project_id, owner)
            name = project.name if changes.name is None else changes.name
            if name != project.name:
                self._check_name(connection, owner, name)
            notes = project.notes if changes.notes is None else changes.notes
            connection.execute(UPDATE_PROJECT, (name, notes, time.time(), project_id))
            connection.executemany(DELETE_MEMBER, [(project_id, *key) for key in changes.removed])
            self._add_members(connection, project_id, owner, changes.added)
        return self.find(project_id, owner)

    def delete(self, project_id: str, owner: str | None) -> list[JobRecord]:
        """Delete a project but not its members. Return its jobs that are in no other project."""
        jobs = self._get_jobs()
        with jobs.database.transaction() as connection:
            self.find(project_id, owner)
            records = self.list_jobs(project_id)
            connection.execute("DELETE FROM project_members WHERE project = ?", (project_id,))
            connection.execute("DELETE FROM projects WHERE id = ?", (project_id,))
            return [record for record in records if not jobs.find(record.id, owner).is_kept]

    def list_jobs(self, project_id: str) -> list[JobRecord]:
        """Return the jobs of a project that have not been deleted."""
        return [JobRecord.from_row(row) for row in self._get_jobs().database.query(SELECT_JOBS_OF_PROJECT, project_id)]

    def _check_name(self, connection: sqlite3.Connection, owner: str | None, name: str) -> None:
        statement = "SELECT 1 FROM projects WHERE owner IS ? AND name = ?"
        if connection.execute(statement, (owner, name)).fetchone():
            raise BadParameter.for_parameter("name", f"you already have a project {name!r}. Choose another name.")

    def _add_members(
        self, connection: sqlite3.Connection, project_id: str, owner: str | None, added: Iterable[NewMember]
    ) -> None:
        """Add members, and check the limits. If one is exceeded, the caller rolls the transaction back."""
        kept_bytes, now = self._get_jobs().sum_kept_bytes(), time.time()
        for (kind, member_id), name, group in added:
            if kind == "job":
                self._check_result(member_id, owner)
            connection.execute(UPSERT_MEMBER, (project_id, kind, member_id, name, group, now))
        counts = Counter(row["project"] for row in connection.execute(SELECT_MEMBERS, (owner,)))
        if counts[project_id] > MAX_MEMBERS_PER_PROJECT or counts.total() > MAX_MEMBERS_PER_OWNER:
            raise OutOfStorage(
                f"A project can have up to {MAX_MEMBERS_PER_PROJECT:,} members, and all of your projects together"
                f" {MAX_MEMBERS_PER_OWNER:,}. Remove some of them.",
                parameter="add",
            )
        self._check_kept_bytes(owner, kept_bytes)

    def _check_result(self, job_id: str, owner: str | None) -> None:
        """Raise UnknownJob, JobNotFinished or ResultUnavailable unless a job has a result."""
        record = self._get_jobs().find(job_id, owner)
        if not record.has_ended:
            raise JobNotFinished(f"The job {job_id} is {record.state}. Add it when it is done.", parameter="add")
        if record.state != "done":
            raise ResultUnavailable(f"The job {job_id} is {record.state} and has no result.", parameter="add")

    def _check_kept_bytes(self, owner: str | None, earlier_bytes: Counter[str | None]) -> None:
        """Raise OutOfStorage if results were added and the results in projects exceed the owner's share."""
        kept_bytes = self._get_jobs().sum_kept_bytes()
        free_bytes = self._max_kept_bytes - kept_bytes.total()
        if kept_bytes[owner] > earlier_bytes[owner] and free_bytes < (kept_bytes[owner] if self._is_shared else 0):
            raise OutOfStorage(
                f"Your results in projects would use {kept_bytes[owner]:,} bytes, which exceeds your share of the space"
                f" for such results ({self._max_kept_bytes:,} bytes, half of jobs.quota_bytes). Remove results from"
                " projects, or download the archive of a project and delete the project.",
                parameter="add",
            )


def _decode_member(row: sqlite3.Row) -> Member:
    return Member(MemberKey(row["kind"], row["id"]), row["name"], row["group_name"], row["added"])


def _decode_project(row: sqlite3.Row, members: Iterable[Member]) -> Project:
    return Project(row["id"], row["name"], row["notes"], row["created"], row["changed"], tuple(members))
