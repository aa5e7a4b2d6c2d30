"""The trainings of the service, in memory and on disk, and the order in which they run."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from service.core.errors import StackSegError, UnknownTraining
from service.serving.learning.training_record import (
    INTERRUPTED,
    TrainingRecord,
    TrainingState,
    delete_partial,
    read_records,
)
from service.serving.storage.disk import translate_disk_faults

# Records that an owner's list keeps.
MOST_RECORDS = 100

log = logging.getLogger(__name__)


class TrainingQueue:
    """The trainings by their id, one of which runs at a time. Safe to use from threads.

    changed  held while trainings change, and notified of new ones
    running  the training that runs
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[str, TrainingRecord] = {}
        self.changed = threading.Condition()
        self.running: TrainingRecord | None = None

    def load(self) -> None:
        """Read the trainings of earlier processes."""
        delete_partial(self._folder)
        self._records = {record.id: record for record in read_records(self._folder)}

    def add(self, record: TrainingRecord) -> None:
        """Add a training that waits. Raises OutOfStorage and StorageUnavailable."""
        with self.changed:
            with translate_disk_faults():
                record.save(self._folder)
            self._records[record.id] = record
            self.changed.notify_all()

    def find(self, training: str, owner: str | None, *, everyone: bool = False) -> TrainingRecord:
        """Return a training of this owner, or with `everyone` of any. Raises UnknownTraining."""
        record = self._records.get(training)
        if record is None or not (everyone or record.owner == owner):
            raise UnknownTraining("There is no such training: its id is wrong, or it was deleted.")
        return record

    def newest(self, owner: str | None, *, everyone: bool = False) -> list[TrainingRecord]:
        """Return the trainings of this owner, or with `everyone` of all, newest first."""
        with self.changed:
            records = list(self._records.values())
        return [record for record in reversed(records) if everyone or record.owner == owner]

    @property
    def unfinished(self) -> list[TrainingRecord]:
        """The trainings that wait or run, oldest first."""
        with self.changed:
            return [record for record in self._records.values() if not record.over]

    @property
    def waiting(self) -> list[TrainingRecord]:
        """The trainings that wait, in their order: owners take turns, the one served longest ago comes first."""
        with self.changed:
            records = list(self._records.values())
        served = {record.owner: record.started for record in records if record.started is not None}
        turns: dict[str | None, int] = {}
        keyed = []
        for record in records:
            if record.state == "waiting":
                turns[record.owner] = turns.get(record.owner, 0) + 1
                keyed.append((turns[record.owner], served.get(record.owner) or 0.0, record.created, record))
        return [record for *_, record in sorted(keyed, key=lambda key: key[:3])]

    def running_and_waiting(self) -> tuple[TrainingRecord | None, list[TrainingRecord]]:
        """Return the training that runs, and those that wait, in their order."""
        with self.changed:
            return self.running, self.waiting

    def count(self) -> dict[str, float]:
        """Return how many trainings run and wait, by these states."""
        running, waiting = self.running_and_waiting()
        return {"running": float(running is not None), "waiting": float(len(waiting))}

    def position(self, record: TrainingRecord) -> int | None:
        """Return how many trainings come before one that waits, and it itself; None for any other."""
        order = self.waiting
        return order.index(record) + 1 if record in order else None

    def newest_done(self, name: str) -> TrainingRecord | None:
        """Return the latest training that has made a model of this name; None if there is none."""
        with self.changed:
            made = [record for record in self._records.values() if record.state == "done" and record.name == name]
        return max(made, key=lambda record: record.ended or 0.0, default=None)

    def begin_next(self) -> TrainingRecord | None:
        """Count the next training as running, and return it; None if none waits."""
        with self.changed:
            record = next(iter(self.waiting), None)
            if record is not None:
                record.state, record.started = "running", time.time()
                self.running = record
            return record

    def end_running(self) -> None:
        """Let another training run."""
        with self.changed:
            self.running = None

    def cancel(self, record: TrainingRecord) -> None:
        """Cancel a training that waits or runs, in memory: its record is saved once nothing is left of it."""
        with self.changed:
            record.state, record.ended = "cancelled", time.time()

    def interrupt(self, record: TrainingRecord) -> None:
        """Count a training that is not over as interrupted, in memory."""
        with self.changed:
            if not record.over:
                record.state, record.message, record.ended = "interrupted", INTERRUPTED, time.time()

    def end(self, record: TrainingRecord, state: TrainingState, message: str) -> None:
        """Record how a training has ended, on disk first."""
        now = time.time()
        self.save(record if record.over else replace(record, state=state, message=message, ended=now))
        with self.changed:
            if not record.over:
                record.state, record.message, record.ended = state, message, now

    def save(self, record: TrainingRecord) -> None:
        """Write a record; one that cannot be written is known until the service ends."""
        try:
            record.save(self._folder)
        except OSError as error:
            log.warning("training %s cannot be recorded: %s", record.id, error)

    def forget(self, record: TrainingRecord) -> None:
        """Delete the record of a training that is over. Raises StorageUnavailable."""
        with self.changed:
            self._records.pop(record.id, None)
            with translate_disk_faults():
                (self._folder / f"{record.id}.json").unlink(missing_ok=True)

    def forget_oldest(self, owner: str | None) -> None:
        """Delete the oldest records of an owner who has too many."""
        over = [record for record in self.newest(owner) if record.over]
        for record in over[MOST_RECORDS:]:
            with suppress(StackSegError):
                self.forget(record)
