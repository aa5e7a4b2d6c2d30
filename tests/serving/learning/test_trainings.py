"""Trainings with a child process that is done at once, or never, as the name of the new model says."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_training
import numpy as np
import pytest
from fakes import FakeSegmenter, until
from full_disk import full_disk
from runtimes import loaded_segmenter, running, settings, submitted

from service.core.config import Settings
from service.core.errors import (
    BadParameter,
    ModelKept,
    NotReady,
    OutOfStorage,
    QueueFull,
    SwitchedOff,
    Unauthorized,
    UnknownModel,
    UnknownTraining,
)
from service.core.types import Options, Volume
from service.models.spec import ModelSpec
from service.serving.learning.annotation import NewAnnotation, Region
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_child import MODULE
from service.serving.learning.training_queue import TrainingQueue
from service.serving.learning.training_record import INTERRUPTED, TrainingRecord
from service.serving.learning.trainings import NewTraining, Trainings
from service.serving.runtime import Runtime
from service.serving.storage.scratch import make_locked_folder

TESTS = str(Path(fake_training.__file__).parent)


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    return write_model(random_nuclei_content | {"name": "base", "activation": "sigmoid"})


class Service:
    """A runtime, annotated stacks of `ann`, and trainings."""

    def __init__(self, runtime: Runtime, chosen: Settings, module: str = fake_training.__name__) -> None:
        self.runtime, self.settings = runtime, chosen
        self.store = AnnotationStore(chosen.annotations_folder, quota_bytes=2**20)
        self.trainings = self.make(chosen, module)
        self.trainings.start()
        labels = np.zeros((1, 4, 8, 8), np.uint16)
        labels[:, 1:3, 1:3, 1:3] = 1
        volume = Volume.from_array(labels)
        self.annotation = self.store.keep(volume, volume, NewAnnotation(name="a", owner="ann")).id

    def make(self, chosen: Settings, module: str = MODULE) -> Trainings:
        return Trainings(chosen, self.store, self.runtime.models, lambda: self.runtime.draining, module)

    def next_queue(self) -> TrainingQueue:
        """The trainings as the next process finds them."""
        again = self.make(self.settings)
        again.start()
        again.stop()
        return again.queue

    def limit(self, **limits: Any) -> None:
        """Begin anew with other limits."""
        trainings = self.settings.trainings.model_copy(update=limits)
        self.trainings.stop()
        self.trainings = self.make(self.settings.model_copy(update={"trainings": trainings}), fake_training.__name__)
        self.trainings.start()

    def submit(self, name: str, owner: str = "ann", **changes: Any) -> TrainingRecord:
        asked: dict[str, Any] = {"model": "base", "annotations": [self.annotation], "minutes": 1.0, "name": name}
        return self.trainings.submit(NewTraining(**asked | changes), owner, admin=owner != "ann")

    def wait(self, record: TrainingRecord, *states: str) -> TrainingRecord:
        until(lambda: record.state in states, 60)
        return record

    def train(self, name: str) -> TrainingRecord:
        return self.wait(self.submit(name), "done", "failed")

    def remove(self, name: str, owner: str | None = "ann", has_jobs: Any = lambda _model: False, **who: Any) -> None:
        self.trainings.trained_models.remove(name, owner, has_jobs=has_jobs, **who)

    def hang(self, name: str = "hangs", **given: Any) -> TrainingRecord:
        record = self.submit(name, **given)
        until(lambda: record.stage == "evaluating", 60)
        return record


@pytest.fixture
def chosen(base: ModelSpec, tmp_path: Path) -> Settings:
    (tmp_path / "scratch").mkdir()
    return settings(base.folder.parent, tmp_path / "scratch", jobs={"folder": tmp_path / "jobs"})


@pytest.fixture
def service(chosen: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("PYTHONPATH", TESTS)
    with running(chosen, FakeSegmenter) as runtime:
        made = Service(runtime, chosen)
        try:
            yield made
        finally:
            made.trainings.stop()


def leftovers(service: Service) -> list[str]:
    return [path.name for path in service.settings.trained_folder.glob(".*")]


def test_a_new_model_is_served_with_its_lineage(service: Service) -> None:
    record = service.train("mine")
    assert (record.state, record.message) == ("done", "The new model is better.")
    assert (record.step, record.steps, record.before, record.after, record.better) == (2000, 2000, 0.5, 0.75, True)
    spec = service.runtime.models.servable_spec("mine")
    assert spec.folder == service.settings.trained_folder / "mine"
    assert (spec.lineage and spec.lineage.parent) == "base/1"
    assert leftovers(service) == []
    with pytest.raises(BadParameter, match="another name"):
        service.submit("mine")
    again = service.next_queue().find(record.id, "ann")
    assert (again.state, vars(again).keys()) == ("done", vars(record).keys())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "The annotated stacks in stacks have too few objects."),
        ("crashes", "Something went wrong while the model was trained; the service's log tells more."),
        ("broken", "cannot be used"),
    ],
)
def test_a_child_that_fails_leaves_nothing_and_says_why(service: Service, name: str, message: str) -> None:
    record = service.train(name)
    assert record.state == "failed"
    assert message in record.message
    assert (leftovers(service), name in service.runtime.models.specs) == ([], False)
    assert service.train("mine").state == "done"


def test_a_training_is_cancelled_while_it_waits_and_while_it_runs(service: Service) -> None:
    first = service.hang()
    second = service.submit("second")
    assert (service.trainings.queue.position(first), service.trainings.queue.position(second)) == (None, 1)
    left = first.seconds_left
    assert left is not None
    assert 0 < left <= 60
    for record in (second, first):
        service.trainings.cancel(record.id, "ann")
        assert record.state == "cancelled"
    assert service.train("third").state == "done"
    assert (first.state, second.state, leftovers(service)) == ("cancelled", "cancelled", [])
    service.trainings.cancel(first.id, "ann")
    with pytest.raises(UnknownTraining):
        service.trainings.queue.find(first.id, "ann")


def test_nothing_is_left_of_a_model_that_is_cancelled_before_it_is_served(service: Service) -> None:
    made = service.settings.trained_folder / "mine"
    # Somebody else reloads the models.
    with service.runtime.models._reloading:
        record = service.submit("mine")
        until(made.exists, 60)
        service.trainings.cancel(record.id, "ann")
    until(lambda: not made.exists(), 60)
    assert service.train("other").state == "done"
    assert [state.name for state in service.runtime.models.states()] == ["base", "other"]
    assert record.state == "cancelled"


def child_of(service: Service) -> subprocess.Popen[bytes]:
    child = service.trainings._child
    assert child is not None
    return child.process


def test_what_the_service_does_not_finish_is_interrupted(service: Service) -> None:
    records = [service.hang(), service.submit("waits")]
    process = child_of(service)
    service.trainings.stop()
    assert process.poll() is not None
    assert [(record.state, record.message) for record in records] == 2 * [("interrupted", INTERRUPTED)]
    assert leftovers(service) == []
    again = service.next_queue()
    assert [again.find(record.id, "ann").state for record in records] == ["interrupted", "interrupted"]
    with pytest.raises(NotReady):
        service.submit("late")


def test_a_killed_child_is_told_from_a_failure(service: Service) -> None:
    # It takes longer than was asked for.
    record = service.hang(minutes=0.001)
    until(lambda: record.seconds_left is None, 10)
    assert (record.state, record.stage) == ("running", "evaluating")
    process = child_of(service)
    # What interrupts the service at a terminal does not reach it.
    assert (os.getpgid(process.pid), os.getsid(process.pid)) == (process.pid, os.getsid(0))
    process.kill()
    assert "memory" in service.wait(record, "failed").message


def test_a_training_that_does_not_end_is_ended_and_the_next_begins(service: Service) -> None:
    service.limit(minutes=0.02)
    record = service.wait(service.submit("hangs", minutes=0.01), "failed")
    assert "too long" in record.message
    # A busy machine may be too slow to start the child in time, but it has its turn.
    service.wait(service.submit("mine", minutes=0.01), "done", "failed")
    assert leftovers(service) == []


def test_owners_take_turns_and_leave_places_to_others(service: Service) -> None:
    service.hang()
    mine = [service.submit(f"mine{number}") for number in range(4)]
    with pytest.raises(QueueFull, match="of yours"):
        service.submit("mine4")
    others = [service.submit(f"other{number}", "bob") for number in range(4)]
    with pytest.raises(QueueFull):
        service.submit("another", "eve")
    order = [record.name for record in service.trainings.queue.waiting]
    assert order[:4] == ["other0", "mine0", "other1", "mine1"]
    assert [service.trainings.queue.position(record) for record in (others[0], mine[0])] == [1, 2]
    assert [record.owner for record in service.trainings.queue.newest("bob")] == ["bob"] * 4
    assert len(service.trainings.queue.newest("bob", everyone=True)) == 9
    with pytest.raises(UnknownTraining):
        service.trainings.cancel(mine[0].id, "bob")


def test_trained_models_do_not_fill_the_disk(service: Service) -> None:
    service.limit(models=2)
    service.train("mine")
    waiting = service.hang()
    with pytest.raises(OutOfStorage, match=r"2 trained models \(trainings\.models\)"):
        service.submit("third")
    service.trainings.cancel(waiting.id, "ann")


def test_a_trained_model_is_deleted_by_who_has_trained_it_and_its_name_is_free(service: Service) -> None:
    first = service.train("mine")
    trainings, models = service.trainings, service.runtime.models
    spec = models.servable_spec("mine")
    volume = Volume.from_array(np.zeros((1, 2, 4, 4), np.uint8))
    submitted(service.runtime, spec, volume, Options()).future.result(60)
    loaded: Any = loaded_segmenter(models, "mine")
    loaded.gate.clear()
    runs = submitted(service.runtime, spec, volume, Options())
    until(lambda: runs.state == "running", 60)
    for name, owner, error in (("base", "ann", ModelKept), ("mine", "bob", Unauthorized), ("x", "ann", UnknownModel)):
        with pytest.raises(error):
            service.remove(name, owner)
    service.remove("mine")
    assert (not spec.folder.exists(), leftovers(service), list(models.specs)) == (True, [], ["base"])
    with pytest.raises(UnknownModel):
        service.remove("mine")
    loaded.gate.set()
    assert runs.future.result(60).segmentation is not None
    assert trainings.trained_models.made_by(first) is None
    second = service.train("mine")
    assert (trainings.trained_models.made_by(first), trainings.trained_models.made_by(second)) == (None, "mine")
    service.remove("mine", "eve", everyone=True)


def test_a_model_that_a_training_goes_on_from_is_kept(service: Service) -> None:
    service.train("mine")
    child = service.submit("hangs", model="mine")
    with pytest.raises(ModelKept, match="training"):
        service.remove("mine")
    service.trainings.cancel(child.id, "ann")
    service.remove("mine")


def test_a_model_that_is_the_default_by_its_name_alone_is_kept(service: Service, base: ModelSpec) -> None:
    made = shutil.copytree(base.folder, service.settings.trained_folder / "nuclei")
    (made / "model.yaml").write_text((base.folder / "model.yaml").read_text().replace("name: base", "name: nuclei"))
    models = service.runtime.models
    assert models.reload().added == ["nuclei"]
    assert models.servable_spec(None).name == "nuclei"
    with pytest.raises(ModelKept, match="default"):
        service.remove("nuclei", None, everyone=True)
    assert models.servable_spec(None).folder == made


def test_a_model_is_kept_for_what_was_accepted_while_it_was_to_be_deleted(service: Service) -> None:
    service.train("mine")
    models, accepted = service.runtime.models, list[str]()

    def has_jobs(model: str) -> bool:
        if model in models.specs:
            return False
        for accept in (models.spec, lambda name: service.submit("child", model=name)):
            with pytest.raises(UnknownModel):
                accept(model)
        return bool(accepted)

    # One that was accepted before goes on, for which the model is served all the time.
    with pytest.raises(ModelKept, match="Jobs wait or run"):
        service.remove("mine", has_jobs=lambda model: model in models.specs)
    accepted.append("a job")
    with pytest.raises(ModelKept, match="Jobs wait or run"):
        service.remove("mine", has_jobs=has_jobs)
    assert models.spec("mine").folder.is_dir()
    accepted.clear()
    service.remove("mine", has_jobs=has_jobs)
    assert list(models.specs) == ["base"]


def test_what_cannot_be_trained_is_refused_at_once(service: Service, bands_repository: Path) -> None:
    # A model called nuclei would become the default one.
    names = [({"name": name}, "another name") for name in ("base", "nuclei")]
    for changes, text in (({"minutes": 121.0}, "no more than 120"), *names):
        with pytest.raises(BadParameter, match=text):
            service.submit(**{"name": "x"} | changes)
    off = Settings.model_validate({**service.settings.model_dump(), "trainings": {"enabled": False}})
    with pytest.raises(SwitchedOff):
        service.make(off).check_enabled()


def test_annotated_stacks_that_overlap_are_refused_at_once(service: Service) -> None:
    labels = np.ones((1, 4, 8, 8), np.uint8)

    def keep(pixels: Any, region: str | None, owner: str = "ann") -> str:
        part = None if region is None else Region.parse(region, (4, 8, 8))
        image, numbers = (Volume.from_array(array) for array in (pixels, labels))
        return service.store.keep(image, numbers, NewAnnotation(name=str(region), owner=owner, region=part)).id

    first, beside, over = (keep(labels, f"0:4,0:8,{columns}") for columns in ("0:5", "5:8", "4:6"))
    other, theirs, whole = keep(labels + 1, None), keep(labels, None, "bob"), keep(labels.astype(np.uint16), None)
    for chosen in ([first, beside, other, whole], [first, first], [over, other]):
        service.trainings.cancel(service.submit("mine", annotations=chosen).id, "ann")
    for chosen in ([over, other, first], [beside, over]):
        older = next(each for each in (first, beside) if each in chosen)
        with pytest.raises(BadParameter, match=rf"{older} .* and the newer {over} .* leave one of them out"):
            service.submit("mine", annotations=chosen)
    with pytest.raises(BadParameter, match="leave one of them out"):
        service.submit("mine", "eve", annotations=[first, theirs])


def test_a_full_disk_is_a_failure_that_leaves_nothing(service: Service) -> None:
    folder = service.settings.trained_folder
    folder.write_text("no folder")
    record = service.train("mine")
    assert record.state == "failed"
    assert str(folder) not in record.message
    folder.unlink()
    assert service.train("mine").state == "done"


def test_a_training_that_cannot_be_recorded_is_refused_and_leaves_nothing(service: Service) -> None:
    records = service.settings.annotations_folder / "trainings"
    with full_disk(100), pytest.raises(OutOfStorage, match="disk"):
        service.submit("mine")
    assert (list(records.iterdir()), service.trainings.queue.newest("ann")) == ([], [])


def test_what_a_killed_process_has_left_by_half_goes_and_the_work_of_others_stays(service: Service) -> None:
    record, records = service.train("mine"), service.settings.annotations_folder / "trainings"
    (records / ".killed.part").write_text("{")
    killed, other = (service.settings.trained_folder / f".training-{number}" for number in (1, 2))
    os.close(make_locked_folder(killed))
    lock = make_locked_folder(other)
    service.next_queue()
    os.close(lock)
    assert leftovers(service) == [other.name]
    assert [path.name for path in records.iterdir()] == [f"{record.id}.json"]


def test_an_annotated_stack_that_is_gone_meanwhile_is_named(service: Service) -> None:
    hanging, record = service.hang(), service.submit("mine")
    service.store.delete(service.annotation, "ann")
    service.trainings.cancel(hanging.id, "ann")
    assert "annotated stack" in service.wait(record, "failed").message
