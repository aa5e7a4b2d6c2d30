"""The trainings of the service in memory and on disk, and the order in which they run."""

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
    delete_partial,
    read_records,
)
from service.serving.storage.disk import translate_disk_errors

# Maximum number of finished trainings per owner. Older records are deleted.
MAX_RECORDS_PER_OWNER = 100

log = logging.getLogger(__name__)


class TrainingQueue:
    """All trainings, of which one runs at a time. Thread-safe.

    changed  condition that is held during changes and notified of new trainings
    running  the running training, if any
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[str, TrainingRecord] = {}
        self.changed = threading.Condition()
        self.running: TrainingRecord | None = None

    def load(self) -> None:
        """Read the trainings of earlier processes from disk."""
        delete_partial(self._folder)
        self._records = {record.id: record for record in read_records(self._folder)}

    def add(self, record: TrainingRecord) -> None:
        """Add a waiting training. Raises OutOfStorage and StorageUnavailable."""
        with self.changed:
            with translate_disk_errors():
                record.save(self._folder)
            self._records[record.id] = record
            self.changed.notify_all()

    def find(self, training: str, owner: str | None, *, everyone: bool = False) -> TrainingRecord:
        """Return a training of this owner, or with `everyone` of any owner. Raises UnknownTraining."""
        record = self._records.get(training)
        if record is None or not (everyone or record.owner == owner):
            raise UnknownTraining("There is no such training: its ID is wrong, or it was deleted.")
        return record

    def list_newest(self, owner: str | None, *, everyone: bool = False) -> list[TrainingRecord]:
        """Return the trainings of this owner, or with `everyone` of all owners, newest first."""
        with self.changed:
            records = list(self._records.values())
        return [record for record in reversed(records) if everyone or record.owner == owner]

    @property
    def unfinished(self) -> list[TrainingRecord]:
        """The waiting and running trainings, oldest first."""
        with self.changed:
            return [record for record in self._records.values() if not record.has_ended]

    @property
    def waiting(self) -> list[TrainingRecord]:
        """The waiting trainings in the order in which they will run. Owners take turns, least recently served first."""
        with self.changed:
            records = list(self._records.values())
        last_started = {record.owner: record.started for record in records if record.started is not None}
        counts: dict[str | None, int] = {}
        sortable = []
        for record in records:
            if record.state == "waiting":
                counts[record.owner] = counts.get(record.owner, 0) + 1
                sortable.append((counts[record.owner], last_started.get(record.owner) or 0.0, record.created, record))
        return [record for *_, record in sorted(sortable, key=lambda key: key[:3])]

    def running_and_waiting(self) -> tuple[TrainingRecord | None, list[TrainingRecord]]:
        """Return the running training and the waiting trainings in their order."""
        with self.changed:
            return self.running, self.waiting

    def count(self) -> dict[str, float]:
        """Return the number of running and of waiting trainings, by state."""
        running, waiting = self.running_and_waiting()
        return {"running": float(running is not None), "waiting": float(len(waiting))}

    def position(self, record: TrainingRecord) -> int | None:
        """Return the position of a waiting training in the queue, from 1; None for any other training."""
        order = self.waiting
        return order.index(record) + 1 if record in order else None

    def find_latest_done(self, name: str) -> TrainingRecord | None:
        """Return the latest training that created a model with this name, or None."""
        with self.changed:
            candidates = [record for record in self._records.values() if record.state == "done" and record.name == name]
        return max(candidates, key=lambda record: record.ended or 0.0, default=None)

    def begin_next(self) -> TrainingRecord | None:
        """Mark the next training as running and return it, or return None if no training is waiting."""
        with self.changed:
            record = next(iter(self.waiting), None)
            if record is not None:
                record.state, record.started = "running", time.time()
                self.running = record
            return record

    def end_running(self) -> None:
        """Clear the running training, so that the next one can begin."""
        with self.changed:
            self.running = None

    def cancel(self, record: TrainingRecord) -> None:
        """Cancel an unfinished training in memory. Its record is saved after its files were deleted."""
        with self.changed:
            record.state, record.ended = "cancelled", time.time()

    def interrupt(self, record: TrainingRecord) -> None:
        """Mark an unfinished training as interrupted, in memory."""
        with self.changed:
            if not record.has_ended:
                record.state, record.message, record.ended = "interrupted", INTERRUPTED_MESSAGE, time.time()

    def end(self, record: TrainingRecord, state: TrainingState, message: str) -> None:
        """Record the outcome of a training, first on disk and then in memory."""
        now = time.time()
        self.save(record if record.has_ended else replace(record, state=state, message=message, ended=now))
        with self.changed:
            if not record.has_ended:
                record.state, record.message, record.ended = state, message, now

    def save(self, record: TrainingRecord) -> None:
        """Write a record to disk. If that fails, log it; the training is then known until the service stops."""
        try:
            record.save(self._folder)
        except OSError as error:
            log.warning("training %s cannot be recorded: %s", record.id, error)

    def delete(self, record: TrainingRecord) -> None:
        """Delete the record of a finished training. Raises StorageUnavailable."""
        with self.changed:
            self._records.pop(record.id, None)
            with translate_disk_errors():
                (self._folder / f"{record.id}.json").unlink(missing_ok=True)

    def delete_oldest(self, owner: str | None) -> None:
        """Delete the oldest records of finished trainings beyond `MAX_RECORDS_PER_OWNER`."""
        finished = [record for record in self.list_newest(owner) if record.has_ended]
        for record in finished[MAX_RECORDS_PER_OWNER:]:
            with suppress(StackSegError):
                self.delete(record)
