"""Members of projects: find the jobs, annotated stacks and models, report them, and collect their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from service.api.access.authentication import get_identity
from service.api.dependencies import get_annotations, get_caller, get_trainings
from service.api.messages.jobs import report_job
from service.api.messages.learning import AnnotationReport, describe_annotation
from service.api.messages.models import report_model
from service.api.messages.projects import (
    MemberReport,
    MemberRequest,
    ProjectReport,
    report_member,
    report_project,
    summarize_project,
    to_utc,
)
from service.core.errors import UnknownAnnotation, UnknownJob, UnknownModel
from service.core.files.bundled import get_software_version
from service.serving.devices.models.state import ModelState
from service.serving.jobs.active_job import view_job
from service.serving.jobs.job_manager import JobManager
from service.serving.jobs.projects.archive import ArchivedFile, UniquePaths, read_chunks
from service.serving.jobs.projects.results import (
    MeasuredResult,
    has_table,
    join_tables,
    limit_joined_bytes,
    list_result_files,
    split_name,
)
from service.serving.jobs.projects.store import Member, MemberKey, MemberKind, NewMember, Project, ProjectStore
from service.serving.jobs.record import JobRecord
from service.serving.learning.annotation import Annotation
from service.serving.learning.trained_models import OWNER_FILE
from service.serving.results.metadata import ResultMetadata
from service.serving.runtime import Runtime

# A job with its result, an annotated stack, or a model.
Resource = JobRecord | Annotation | ModelState


def get_projects(request: Request) -> ProjectStore:
    """Return the store of projects."""
    projects: ProjectStore = request.app.state.projects
    return projects


class ProjectMembers:
    """The jobs, annotated stacks and models of the client of a request, as members of projects. All methods block."""

    def __init__(self, request: Request, runtime: Runtime, async_jobs: JobManager) -> None:
        self._request, self._runtime, self._async_jobs = request, runtime, async_jobs
        self._caller = get_caller(request)

    def name_new_members(self, requests: Iterable[MemberRequest]) -> list[NewMember]:
        """Return the members to add. Raises UnknownJob, UnknownAnnotation and UnknownModel."""
        new_members = []
        for member in requests:
            try:
                name = self._find_name(MemberKey(member.kind, member.id))
            except (UnknownJob, UnknownAnnotation, UnknownModel) as error:
                raise type(error)(f"add: {member.kind} {member.id}: {error}", parameter="add") from error
            new_members.append(NewMember(MemberKey(member.kind, member.id), member.name or name, member.group))
        return new_members

    def report(self, project: Project) -> ProjectReport:
        """Report a project with its members."""
        members = [self._report(member, resource) for member, resource in self._find_resources(project)]
        return report_project(project, members)

    def list_measured_results(self, project: Project) -> list[MeasuredResult]:
        """Return the results of a project."""
        store = self._async_jobs.store
        return [
            MeasuredResult(
                store.get_result_path(resource.id), resource.result_metadata, member.name, member.group, resource.id
            )
            for member, resource in self._find_resources(project)
            if isinstance(resource, JobRecord) and resource.result_metadata is not None
        ]

    def list_archived_files(self, project: Project) -> Iterator[ArchivedFile]:
        """Yield the files of the archive of a project. Files that are deleted in the meantime are omitted.

        The last file, `project.json`, describes the members and lists their files.
        """
        paths, entries = UniquePaths(), list[dict[str, Any]]()
        results = self.list_measured_results(project)
        yield ArchivedFile("objects.csv", join_tables(results), limit_joined_bytes(results))
        for member, resource in self._find_resources(project):
            names: list[str] = []
            for file in self._list_files(member, resource, paths):
                names.append(file.path)
                yield file
            report = self._report(member, resource).model_dump(mode="json")
            entries.append(report | {"files": names, "details": self._describe(resource)})
        content = {
            "software": f"StackSeg {get_software_version()}",
            "exported": datetime.now(UTC).isoformat(timespec="seconds"),
            **summarize_project(project).model_dump(mode="json"),
            "members": entries,
        }
        document = json.dumps(content, indent=2, ensure_ascii=False).encode()
        yield ArchivedFile("project.json", [document], len(document))

    def _find_name(self, key: MemberKey) -> str:
        match key.kind:
            case "job":
                return self._async_jobs.store.find(key.id, self._caller).request.name
            case "annotation":
                return get_annotations(self._request).find(key.id, self._caller).name
            case "model":
                return self._runtime.models.get_state(key.id).name

    def _find_resources(self, project: Project) -> list[tuple[Member, Resource | None]]:
        """Return each member with its job, annotated stack or model; None if it was deleted."""
        records = get_projects(self._request).list_jobs(project.id)
        annotations = get_annotations(self._request).list_newest_first(self._caller)
        resources: dict[MemberKind, Mapping[str, Resource]] = {
            "job": {record.id: record for record in records if record.state == "done"},
            "annotation": {annotation.id: annotation for annotation in annotations},
            "model": {model.name: model for model in self._runtime.models.list_states()},
        }
        return [(member, resources[member.key.kind].get(member.key.id)) for member in project.members]

    def _report(self, member: Member, resource: Resource | None) -> MemberReport:
        match resource:
            case JobRecord(result_metadata=ResultMetadata() as metadata):
                channel = resource.request.parameters.get("channel")
                return report_member(
                    member,
                    objects=metadata.objects,
                    model=metadata.model,
                    confidence=metadata.confidence,
                    channel=None if channel is None else str(channel),
                    time_points=None if metadata.time_points is None else metadata.time_points[0],
                    has_table=has_table(metadata),
                    bytes=resource.result_bytes,
                    expires=to_utc((resource.ended or 0.0) + self._async_jobs.keep_seconds),
                )
            case Annotation():
                return report_member(
                    member,
                    objects=resource.objects,
                    model=resource.provenance.model,
                    job=resource.provenance.job,
                    bytes=resource.nbytes,
                )
            case ModelState():
                return report_member(member, model=None if resource.spec is None else resource.spec.identifier)
        return report_member(member, is_available=False)

    def _describe(self, resource: Resource | None) -> dict[str, Any] | None:
        """Return the same report as `GET /jobs/{job}`, `GET /annotations/{annotation}` or `GET /models/{name}`."""
        match resource:
            case JobRecord():
                view = view_job(resource, None)
                return report_job(view, self._async_jobs.keep_seconds, self._request.scope).model_dump(mode="json")
            case Annotation():
                return AnnotationReport(**describe_annotation(resource, ())).model_dump(mode="json")
            case ModelState():
                return report_model(resource, removable=self._can_export(resource)).model_dump(mode="json")
        return None

    def _can_export(self, model: ModelState) -> bool:
        """Return whether the caller may download a model: a trained one of the caller.

        The licenses of other models may not permit distribution.
        """
        access = self._runtime.settings.access
        owner, _ = get_identity(self._request, access)
        return get_trainings(self._request).trained_models.can_delete(model, owner, is_admin=not access.keys)

    def _list_files(self, member: Member, resource: Resource | None, paths: UniquePaths) -> Iterator[ArchivedFile]:
        match resource:
            case JobRecord(result_metadata=ResultMetadata() as metadata):
                path = self._async_jobs.store.get_result_path(resource.id)
                yield from list_result_files(path, metadata, member, paths)
            case Annotation():
                folders, stem = split_name(member)
                for path, suffix in ((resource.image, "_image.ome.tif"), (resource.labels, "_labels.ome.tif")):
                    with suppress(FileNotFoundError):
                        name = paths.make(["corrections", *folders], stem, suffix)
                        yield ArchivedFile(name, read_chunks(path.open("rb")), path.stat().st_size)
            case ModelState() if self._can_export(resource):
                folder = self._runtime.settings.trained_folder / resource.name
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and not path.is_symlink() and path.name != OWNER_FILE:
                        parts = path.relative_to(folder.parent).parent.parts
                        name = paths.make(["models", *parts], path.stem, path.suffix)
                        yield ArchivedFile(name, read_chunks(path.open("rb")), path.stat().st_size)
