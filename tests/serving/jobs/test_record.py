"""Tests of idempotency keys in the job store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.core.errors import BadParameter
from service.serving.jobs.record import IdempotencyKey, JobRequest
from service.serving.jobs.store import INPUT_NAME, JobStore

REQUEST = JobRequest("nuclei", {"overlap": 0.5}, "embryo.tif", window_count=8)
KEY = IdempotencyKey("ada", "key-1", "digest")


def open_store(folder: Path) -> JobStore:
    return JobStore(folder, quota_bytes=1000, keep_seconds=3600, max_attempts=2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    job_store = open_store(tmp_path / "jobs")
    yield job_store
    job_store.close()


def accept(store: JobStore, key: IdempotencyKey | None = KEY) -> tuple[str, str]:
    """Store a job with a key. Return the ID of its folder and the ID of the job that has the key."""
    upload = store.make_incoming_folder() / INPUT_NAME
    upload.write_bytes(bytes(10))
    return upload.parent.name, store.accept(upload, "ada", REQUEST, key)


def test_job_is_stored_once_per_key(store: JobStore) -> None:
    assert store.keys.find_job(KEY) is None
    folder, job_id = accept(store)
    assert job_id == folder
    assert store.keys.find_job(KEY) == job_id
    assert accept(store)[1] == job_id
    assert len(store.list_newest("ada", 10)) == 1
    assert accept(store, None)[1] != job_id


def test_clients_have_their_own_keys(store: JobStore) -> None:
    job_id = accept(store)[1]
    assert store.keys.contains("ada", "key-1")
    assert not store.keys.contains("bob", "key-1")
    assert accept(store, IdempotencyKey("bob", "key-1", "other"))[1] != job_id


def test_key_of_another_request_is_refused(store: JobStore) -> None:
    accept(store)
    other = IdempotencyKey("ada", "key-1", "other")
    for refuse in (lambda: store.keys.find_job(other), lambda: accept(store, other)):
        with pytest.raises(BadParameter, match="different file or different parameters"):
            refuse()
    assert len(store.list_newest("ada", 10)) == 1


def test_key_survives_a_restart_but_not_the_deletion_of_its_job(tmp_path: Path, store: JobStore) -> None:
    job_id = accept(store)[1]
    store.close()
    reopened = open_store(tmp_path / "jobs")
    assert reopened.keys.find_job(KEY) == job_id
    reopened.cancel(job_id)
    assert reopened.keys.find_job(KEY) == job_id
    reopened.delete(job_id)
    assert reopened.keys.find_job(KEY) is None
    assert count_keys(tmp_path) == 1
    reopened.clean_up()
    assert count_keys(tmp_path) == 0
    assert accept(reopened, IdempotencyKey("ada", "key-1", "other"))[1] != job_id
    reopened.close()


def count_keys(folder: Path) -> int:
    connection = sqlite3.connect(folder / "jobs" / "jobs.sqlite3")
    (count,) = connection.execute("SELECT COUNT(*) FROM idempotency_keys").fetchone()
    connection.close()
    return int(count)


def test_key_without_a_job_has_no_effect(store: JobStore) -> None:
    """The process was killed after it had stored the key, and before it stored the job."""
    store.keys.add(IdempotencyKey("ada", "key-1", "other"), "0" * 32)
    assert store.keys.find_job(KEY) is None
    folder, job_id = accept(store)
    assert job_id == folder
    assert store.keys.find_job(KEY) == job_id
