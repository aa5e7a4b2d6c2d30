"""The training runs of the service in memory and on disk, and their order."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from service.core.errors import StackSegError, UnknownTraining
from service.serving.learning.training_record import (
    INTERRUPTED_MESSAGE,
    TrainingRecord,
    TrainingState,
    delete_partial_records,
    read_records,
)
from service.serving.storage.disk import translate_disk_errors

# Maximum number of finished training runs per owner. The records of older runs are deleted.
MAX_RECORDS_PER_OWNER = 100
# Interval at which records are written again after an error.
SAVE_INTERVAL_SECONDS = 10.0

log = logging.getLogger(__name__)


class TrainingQueue:
    """All training runs. One of them runs at a time. Thread-safe.

    condition       held during changes, and notified of new training runs
    running_record  record of the current training run; None if there is none
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[str, TrainingRecord] = {}
        # IDs of records that could not be written to disk yet.
        self._unsaved_ids: set[str] = set()
        self.condition = threading.Condition()
        self.running_record: TrainingRecord | None = None

    def load(self) -> None:
        """Read the records of earlier processes from disk."""
        delete_partial_records(self._folder)
        self._records = {record.id: record for record in read_records(self._folder)}

    def add(self, record: TrainingRecord) -> None:
        """Add a waiting training run. Raises OutOfStorage and StorageUnavailable."""
        with self.condition:
            with translate_disk_errors():
                record.save(self._folder)
            self._records[record.id] = record
            self.condition.notify_all()

    def find(self, training_id: str, owner: str | None, *, is_admin: bool = False) -> TrainingRecord:
        """Return a training run of this owner, or of any owner if `is_admin` is set. Raises UnknownTraining."""
        record = self._records.get(training_id)
        if record is None or not (is_admin or record.owner == owner):
            raise UnknownTraining("There is no such training run: the ID is wrong, or the run was deleted.")
        return record

    def list_newest_first(self, owner: str | None, *, is_admin: bool = False) -> list[TrainingRecord]:
        """Return the training runs of this owner, or of all owners if `is_admin` is set, newest first."""
        with self.condition:
            records = list(self._records.values())
        return [record for record in reversed(records) if is_admin or record.owner == owner]

    @property
    def unfinished_records(self) -> list[TrainingRecord]:
        """The waiting and running training runs, oldest first."""
        with self.condition:
            return [record for record in self._records.values() if not record.has_ended]

    @property
    def waiting_records(self) -> list[TrainingRecord]:
        """The waiting training runs in round-robin order of their owners, starting with the least recently served."""
        with self.condition:
            records = list(self._records.values())
        last_start_times = {record.owner: record.started for record in records if record.started is not None}
        rounds: dict[str | None, int] = {}
        sortable_entries = []
        for record in records:
            if record.state == "waiting":
                rounds[record.owner] = rounds.get(record.owner, 0) + 1
                sortable_entries.append((rounds[record.owner], last_start_times.get(record.owner) or 0.0, record))
        # Sorting is stable, and the records are in the order of their creation.
        return [record for *_, record in sorted(sortable_entries, key=lambda entry: entry[:2])]

    def get_running_and_waiting(self) -> tuple[TrainingRecord | None, list[TrainingRecord]]:
        """Return the current training run, and the waiting training runs in queue order."""
        with self.condition:
            return self.running_record, self.waiting_records

    def count_by_state(self) -> dict[str, float]:
        """Return the number of running and of waiting training runs, by state."""
        running_record, waiting_records = self.get_running_and_waiting()
        return {"running": float(running_record is not None), "waiting": float(len(waiting_records))}

    def get_position(self, record: TrainingRecord) -> int | None:
        """Return the position of a waiting training run in the queue, from 1; None for any other run."""
        waiting_records = self.waiting_records
        return waiting_records.index(record) + 1 if record in waiting_records else None

    def find_latest_completed_record(self, name: str) -> TrainingRecord | None:
        """Return the latest training run that created a model with this name, or None."""
        with self.condition:
            records = list(self._records.values())
        # The records are in the order of their creation. Unfinished runs cannot have the name of another one.
        return next((record for record in reversed(records) if record.state == "done" and record.name == name), None)

    def wait_for_next_run(self, stopped: threading.Event) -> TrainingRecord | None:
        """Wait for a training run, mark it as running, and return it. Return None if `stopped` is set.

        Records that could not be written to disk before are written again in the meantime.
        """
        while True:
            with self.condition:
                timeout_seconds = SAVE_INTERVAL_SECONDS if self._unsaved_ids else None
                self.condition.wait_for(lambda: stopped.is_set() or self.waiting_records, timeout_seconds)
                self._save_again()
                record = next(iter(self.waiting_records), None)
                if stopped.is_set():
                    return None
                if record is not None:
                    record.state, record.started, record.start_clock = "running", time.time(), time.monotonic()
                    self.running_record = record
                    return record

    def clear_running_record(self) -> None:
        """Clear `running_record`, so that the next training run can begin."""
        with self.condition:
            self.running_record = None

    def cancel(self, record: TrainingRecord) -> None:
        """Mark an unfinished training run as canceled in memory. `save` writes the record to disk."""
        with self.condition:
            record.state, record.ended = "cancelled", time.time()

    def interrupt(self, record: TrainingRecord) -> None:
        """Mark an unfinished training run as interrupted in memory."""
        with self.condition:
            if not record.has_ended:
                record.state, record.message, record.ended = "interrupted", INTERRUPTED_MESSAGE, time.time()

    def end(self, record: TrainingRecord, state: TrainingState, message: str) -> None:
        """Record the outcome of a training run, first on disk and then in memory."""
        now = time.time()
        self.save(record if record.has_ended else replace(record, state=state, message=message, ended=now))
        with self.condition:
            if not record.has_ended:
                record.state, record.message, record.ended = state, message, now

    def save(self, record: TrainingRecord) -> None:
        """Write a record to disk. If writing fails, log the error; `wait_for_next_run` retries."""
        try:
            record.save(self._folder)
            self._unsaved_ids.discard(record.id)
        except OSError as error:
            self._unsaved_ids.add(record.id)
            log.warning("training run %s cannot be recorded: %s", record.id, error)

    def _save_again(self) -> None:
        """Write the records to disk that could not be written before."""
        with self.condition:
            # A run may have been deleted before its end.
            self._unsaved_ids &= self._records.keys()
            for training_id in list(self._unsaved_ids):
                self.save(self._records[training_id])

    def delete(self, record: TrainingRecord) -> None:
        """Delete the record of a finished training run. Raises StorageUnavailable."""
        with self.condition:
            self._records.pop(record.id, None)
            self._unsaved_ids.discard(record.id)
            with translate_disk_errors():
                (self._folder / f"{record.id}.json").unlink(missing_ok=True)

    def delete_oldest(self, owner: str | None) -> None:
        """Delete the owner's oldest finished training runs. Retain the latest `MAX_RECORDS_PER_OWNER` of them."""
        finished_records = [record for record in self.list_newest_first(owner) if record.has_ended]
        for record in finished_records[MAX_RECORDS_PER_OWNER:]:
            with suppress(StackSegError):
                self.delete(record)
