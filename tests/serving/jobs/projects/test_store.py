"""Tests of the jobs that projects keep: they are not deleted automatically, and use a limited share of the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.core.errors import OutOfStorage, UnknownJob
from service.serving.jobs.projects.store import MemberKey, NewMember, Project, ProjectChanges, ProjectStore
from service.serving.jobs.record import JobRequest
from service.serving.jobs.store import INPUT_NAME, JobStore
from service.serving.results.metadata import ResultMetadata

REQUEST = JobRequest("nuclei", {}, "embryo.tif", window_count=8)
METADATA = ResultMetadata("nuclei/1", "image/tiff", "embryo_labels.ome.tif", "labels", {})
QUOTA_BYTES = 1000


def open_jobs(folder: Path) -> JobStore:
    return JobStore(folder, quota_bytes=QUOTA_BYTES, keep_seconds=3600.0, max_attempts=2)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStore]:
    with closing(open_jobs(tmp_path / "jobs")) as store:
        yield store


def open_projects(jobs: JobStore, *, is_shared: bool = False) -> ProjectStore:
    return ProjectStore(lambda: jobs, quota_bytes=QUOTA_BYTES, is_shared=is_shared)


def accept(jobs: JobStore, size: int = 10, owner: str | None = None) -> str:
    upload = jobs.make_incoming_folder() / INPUT_NAME
    upload.write_bytes(bytes(size))
    return jobs.accept(upload, owner, REQUEST)


def run(jobs: JobStore, size: int = 100, owner: str | None = None) -> str:
    """Return a job with a result of `size` bytes."""
    job_id = accept(jobs, owner=owner)
    jobs.begin(job_id)
    file = jobs.get_input_path(job_id).with_name("labels.ome.tif")
    file.write_bytes(bytes(size))
    jobs.finish(job_id, file, METADATA)
    return job_id


def create(projects: ProjectStore, *job_ids: str, owner: str | None = None) -> Project:
    return projects.create(owner, ProjectChanges(str(time.time_ns()), added=as_members(job_ids)))


def as_members(job_ids: tuple[str, ...]) -> list[NewMember]:
    return [NewMember(MemberKey("job", job_id), "embryo.tif", "") for job_id in job_ids]


def has_result(jobs: JobStore, job_id: str, owner: str | None = None) -> bool:
    try:
        return jobs.find(job_id, owner).state == "done" and jobs.get_result_path(job_id).exists()
    except UnknownJob:
        return False


def test_clean_up_keeps_jobs_that_are_in_a_project(jobs: JobStore) -> None:
    projects = open_projects(jobs)
    kept, shared, other = run(jobs), run(jobs), run(jobs)
    first, second = create(projects, kept, shared), create(projects, shared)
    jobs._keep_seconds = -1.0  # as if the retention time had passed
    jobs.clean_up()
    assert [has_result(jobs, job_id) for job_id in (kept, shared, other)] == [True, True, False]
    newest = [run(jobs) for _ in range(2)]
    jobs._keep_seconds = 3600.0
    jobs.clean_up(max_jobs_with_result=1)
    assert [has_result(jobs, job_id) for job_id in (kept, shared, *newest)] == [True, True, False, True]
    jobs._keep_seconds = -1.0
    assert [record.id for record in projects.delete(first.id, None)] == [kept]
    jobs.clean_up()
    assert [has_result(jobs, job_id) for job_id in (kept, shared)] == [False, True]
    projects.change(second.id, None, ProjectChanges(removed=[MemberKey("job", shared)]))
    jobs.clean_up()
    assert not has_result(jobs, shared)


def test_job_added_during_a_clean_up_is_kept(jobs: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    projects, job_id = open_projects(jobs), run(jobs)
    jobs._keep_seconds = -1.0
    delete_old = jobs._delete_old

    def add_before_deletion(old_id: str) -> None:
        create(projects, old_id)
        delete_old(old_id)

    monkeypatch.setattr(jobs, "_delete_old", add_before_deletion)
    jobs.clean_up()
    assert has_result(jobs, job_id)


def test_new_jobs_do_not_evict_results_in_projects(jobs: JobStore) -> None:
    kept, other = run(jobs, 400), run(jobs, 400)
    create(open_projects(jobs), kept)
    newest = run(jobs, 500)
    assert [has_result(jobs, job_id) for job_id in (kept, other, newest)] == [True, False, True]
    accept(jobs, 500)
    assert [has_result(jobs, job_id) for job_id in (kept, newest)] == [True, False]
    with pytest.raises(OutOfStorage, match="results in projects"):
        accept(jobs, 101)


def test_results_in_projects_use_up_to_half_of_the_quota(jobs: JobStore) -> None:
    projects = open_projects(jobs)
    small, large = run(jobs, 300), run(jobs, 201)
    project = create(projects, small)
    with pytest.raises(OutOfStorage, match="501 bytes"):
        projects.change(project.id, None, ProjectChanges("renamed", added=as_members((large,))))
    assert projects.find(project.id, None) == project
    projects.change(project.id, None, ProjectChanges(removed=[MemberKey("job", small)], added=as_members((large,))))
    # A result in two projects is counted once.
    create(projects, large)
    create(projects, run(jobs, 299))


def test_one_key_leaves_space_for_the_projects_of_other_keys(jobs: JobStore) -> None:
    projects = open_projects(jobs, is_shared=True)
    create(projects, run(jobs, 250, "ada"), owner="ada")
    with pytest.raises(OutOfStorage):
        create(projects, run(jobs, 1, "ada"), owner="ada")
    create(projects, run(jobs, 125, "bob"), owner="bob")


def test_database_of_an_earlier_version_gets_the_tables(jobs: JobStore, tmp_path: Path) -> None:
    job_id = run(jobs)
    with jobs.database.transaction() as connection:
        connection.execute("DROP VIEW kept_jobs")
        for table in ("projects", "project_members"):
            connection.execute(f"DROP TABLE {table}")
    jobs.close()
    with closing(open_jobs(tmp_path / "jobs")) as reopened:
        project = create(open_projects(reopened), job_id)
        assert [member.key.id for member in open_projects(reopened).find(project.id, None).members] == [job_id]


def test_projects_survive_the_deletion_of_the_database_file(jobs: JobStore, tmp_path: Path) -> None:
    project = create(open_projects(jobs), run(jobs))
    for path in (tmp_path / "jobs").glob("jobs.sqlite3*"):
        path.unlink()
    assert "has been recreated" in (jobs.repair() or "")
    assert open_projects(jobs).find(project.id, None) == project
