"""Training runs with a fake child process. The name of the new model selects the behavior of that process."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import fake_training
import numpy as np
import pytest
from fakes import FakeSegmenter, wait_until
from full_disk import full_disk
from runtimes import get_loaded_segmenter, run_runtime, settings, submit_segmentation

from service.api.access.keys import hash_key
from service.core.config import Settings
from service.core.errors import (
    BadParameter,
    FeatureDisabled,
    ModelNotDeletable,
    NotReady,
    OutOfStorage,
    QueueFull,
    Unauthorized,
    UnknownModel,
    UnknownTraining,
)
from service.core.types import Options, Volume
from service.models.spec import ModelSpec
from service.serving.learning import training_manager, training_queue
from service.serving.learning.annotation import NewAnnotation, Region
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_child import TRAINING_MODULE
from service.serving.learning.training_manager import NewTraining, TrainingManager
from service.serving.learning.training_queue import TrainingQueue
from service.serving.learning.training_record import INTERRUPTED_MESSAGE, TrainingRecord
from service.serving.runtime import Runtime
from service.serving.storage.scratch import make_locked_folder

TESTS_FOLDER = str(Path(fake_training.__file__).parent)


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    return write_model(random_nuclei_content | {"name": "base", "activation": "sigmoid"})


class Service:
    """A runtime, a store with an annotated stack of `ann`, and the manager of training runs."""

    def __init__(self, runtime: Runtime, service_settings: Settings, module: str = fake_training.__name__) -> None:
        self.runtime, self.settings = runtime, service_settings
        self.store = AnnotationStore(service_settings.annotations_folder, quota_bytes=2**20)
        self.trainings = self.make_trainings(service_settings, module)
        self.trainings.start()
        labels = np.zeros((1, 4, 8, 8), np.uint16)
        labels[:, 1:3, 1:3, 1:3] = 1
        volume = Volume.from_array(labels)
        self.annotation = self.store.add(volume, volume, NewAnnotation(name="a", owner="ann")).id

    def make_trainings(self, service_settings: Settings, module: str = TRAINING_MODULE) -> TrainingManager:
        return TrainingManager(
            service_settings, self.store, self.runtime.models, lambda: self.runtime.is_draining, module
        )

    def load_queue(self) -> TrainingQueue:
        """Return the training queue that the next process would load."""
        trainings = self.make_trainings(self.settings)
        trainings.start()
        trainings.stop()
        return trainings.queue

    def set_limits(self, **limits: Any) -> None:
        """Restart the manager of training runs with different limits."""
        trainings = self.settings.trainings.model_copy(update=limits)
        self.trainings.stop()
        self.trainings = self.make_trainings(
            self.settings.model_copy(update={"trainings": trainings}), fake_training.__name__
        )
        self.trainings.start()

    def submit(self, name: str, owner: str = "ann", **changes: Any) -> TrainingRecord:
        request: dict[str, Any] = {"model": "base", "annotations": [self.annotation], "minutes": 1.0, "name": name}
        return self.trainings.submit(NewTraining(**request | changes), owner, is_admin=owner != "ann")

    def wait(self, record: TrainingRecord, *states: str) -> TrainingRecord:
        wait_until(lambda: record.state in states, 60)
        return record

    def train(self, name: str) -> TrainingRecord:
        return self.wait(self.submit(name), "done", "failed")

    def remove(
        self, name: str, owner: str | None = "ann", has_jobs: Any = lambda _model: False, **options: Any
    ) -> None:
        self.trainings.trained_models.delete(name, owner, has_jobs=has_jobs, **options)

    def hang(self, name: str = "hangs", **options: Any) -> TrainingRecord:
        record = self.submit(name, **options)
        wait_until(lambda: record.stage == "evaluating", 60)
        return record


@pytest.fixture
def service_settings(base: ModelSpec, tmp_path: Path) -> Settings:
    (tmp_path / "scratch").mkdir()
    return settings(base.folder.parent, tmp_path / "scratch", jobs={"folder": tmp_path / "jobs"})


@pytest.fixture
def service(service_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("PYTHONPATH", TESTS_FOLDER)
    with run_runtime(service_settings, FakeSegmenter) as runtime:
        new_service = Service(runtime, service_settings)
        try:
            yield new_service
        finally:
            new_service.trainings.stop()


def list_leftovers(service: Service) -> list[str]:
    return [path.name for path in service.settings.trained_folder.glob(".*")]


def test_new_model_is_served_with_its_lineage(service: Service) -> None:
    record = service.train("mine")
    assert (record.state, record.message) == ("done", "The new model is better.")
    assert (record.step, record.steps, record.before, record.after, record.better) == (2000, 2000, 0.5, 0.75, True)
    spec = service.runtime.models.get_servable_spec("mine")
    assert spec.folder == service.settings.trained_folder / "mine"
    assert (spec.lineage and spec.lineage.parent) == "base/1"
    assert list_leftovers(service) == []
    with pytest.raises(BadParameter, match="another name"):
        service.submit("mine")
    reloaded = service.load_queue().find(record.id, "ann")
    assert (reloaded.state, vars(reloaded).keys()) == ("done", vars(record).keys())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "The annotated stacks in stacks have too few objects."),
        ("crashes", "An internal error occurred during training."),
        ("broken", "cannot be used"),
    ],
)
def test_failed_child_leaves_no_files_and_reports_the_reason(service: Service, name: str, message: str) -> None:
    record = service.train(name)
    assert record.state == "failed"
    assert message in record.message
    assert (list_leftovers(service), name in service.runtime.models.specs) == ([], False)
    assert service.train("mine").state == "done"


def test_model_that_is_not_better_is_neither_served_nor_kept(service: Service) -> None:
    record = service.wait(service.submit("worse-model"), "unimproved", "done", "failed")
    assert (record.state, record.message) == ("unimproved", "The new model is not better.")
    assert (record.before, record.after, record.better) == (0.5, 0.5, False)
    assert service.trainings.trained_models.find_trained_model(record) is None
    assert not list(service.settings.trained_folder.iterdir())
    assert service.load_queue().find(record.id, "ann").state == "unimproved"
    # The name can be used again.
    assert service.wait(service.submit("worse-model"), "unimproved").id != record.id


def test_waiting_and_running_training_runs_can_be_cancelled(service: Service) -> None:
    first = service.hang()
    second = service.submit("second")
    assert (service.trainings.queue.get_position(first), service.trainings.queue.get_position(second)) == (None, 1)
    seconds_left = first.seconds_left
    assert seconds_left is not None
    assert 0 < seconds_left <= 60
    for record in (second, first):
        service.trainings.cancel(record.id, "ann")
        assert record.state == "cancelled"
    assert service.train("third").state == "done"
    assert (first.state, second.state, list_leftovers(service)) == ("cancelled", "cancelled", [])
    service.trainings.cancel(first.id, "ann")
    with pytest.raises(UnknownTraining):
        service.trainings.queue.find(first.id, "ann")


def test_training_runs_end_when_an_annotated_stack_is_deleted(service: Service) -> None:
    running, waiting = service.hang(), service.submit("waits")
    service.trainings.withdraw_annotation(service.store.delete(service.annotation, "ann"))
    for record in (running, waiting):
        assert (record.state, "The annotated stack a was deleted" in record.message) == ("failed", True)
    wait_until(lambda: service.trainings.queue.running_record is None, 60)
    assert list_leftovers(service) == []
    assert [service.load_queue().find(record.id, "ann").state for record in (running, waiting)] == ["failed"] * 2


def test_model_of_a_training_run_cancelled_before_serving_is_deleted(service: Service) -> None:
    model_folder = service.settings.trained_folder / "mine"
    # Block the reload of models.
    with service.runtime.models._reload_lock:
        record = service.submit("mine")
        wait_until(model_folder.exists, 60)
        service.trainings.cancel(record.id, "ann")
    wait_until(lambda: not model_folder.exists(), 60)
    assert service.train("other").state == "done"
    assert [state.name for state in service.runtime.models.list_states()] == ["base", "other"]
    assert record.state == "cancelled"


def test_one_of_several_keys_cannot_use_up_the_maximum_number_of_models(service: Service) -> None:
    keys = {name: hash_key(name) for name in ("ann", "bob")}
    access = service.settings.access.model_copy(update={"keys": keys})
    service.settings = service.settings.model_copy(update={"access": access})
    service.set_limits(models=3)
    for name in ("first", "second"):
        assert service.train(name).state == "done"
    with pytest.raises(OutOfStorage, match="2 trained models, 2 of which are yours"):
        service.submit("third")
    assert service.wait(service.submit("third", "bob"), "done", "failed").state == "done"
    with pytest.raises(OutOfStorage, match="3 trained models, 1 of which"):
        service.submit("fourth", "bob")


def get_child_process(service: Service) -> subprocess.Popen[bytes]:
    child = service.trainings._child
    assert child is not None
    return child.process


def test_unfinished_training_runs_are_interrupted_by_a_stop(service: Service) -> None:
    records = [service.hang(), service.submit("waits")]
    process = get_child_process(service)
    service.trainings.stop()
    assert process.poll() is not None
    assert [(record.state, record.message) for record in records] == 2 * [("interrupted", INTERRUPTED_MESSAGE)]
    assert list_leftovers(service) == []
    reloaded = service.load_queue()
    assert [reloaded.find(record.id, "ann").state for record in records] == ["interrupted", "interrupted"]
    with pytest.raises(NotReady):
        service.submit("late")


def test_killed_child_is_reported_as_out_of_memory(service: Service) -> None:
    # The training run exceeds the requested time.
    record = service.hang(minutes=0.001)
    wait_until(lambda: record.seconds_left is None, 10)
    assert (record.state, record.stage) == ("running", "evaluating")
    process = get_child_process(service)
    # Ctrl+C at the terminal of the service does not reach the child.
    assert (os.getpgid(process.pid), os.getsid(process.pid)) == (process.pid, os.getsid(0))
    process.kill()
    assert "memory" in service.wait(record, "failed").message


def test_training_run_that_takes_too_long_is_killed_and_the_next_one_begins(service: Service) -> None:
    service.set_limits(minutes=0.02)
    record = service.wait(service.submit("hangs", minutes=0.01), "failed")
    assert "too long" in record.message
    # On a busy machine, the next child may also be too slow, but its run must begin.
    service.wait(service.submit("mine", minutes=0.01), "done", "failed")
    assert list_leftovers(service) == []


def test_owners_take_turns_and_waiting_training_runs_per_owner_are_limited(service: Service) -> None:
    service.hang()
    anns_records = [service.submit(f"mine{number}") for number in range(4)]
    with pytest.raises(QueueFull, match="of your training runs"):
        service.submit("mine4")
    bobs_records = [service.submit(f"other{number}", "bob") for number in range(4)]
    with pytest.raises(QueueFull):
        service.submit("another", "eve")
    order = [record.name for record in service.trainings.queue.waiting_records]
    assert order[:4] == ["other0", "mine0", "other1", "mine1"]
    assert [service.trainings.queue.get_position(record) for record in (bobs_records[0], anns_records[0])] == [1, 2]
    assert [record.owner for record in service.trainings.queue.list_newest_first("bob")] == ["bob"] * 4
    assert len(service.trainings.queue.list_newest_first("bob", is_admin=True)) == 9
    with pytest.raises(UnknownTraining):
        service.trainings.cancel(anns_records[0].id, "bob")


def test_number_of_trained_models_is_limited(service: Service) -> None:
    service.set_limits(models=2)
    service.train("mine")
    waiting = service.hang()
    with pytest.raises(OutOfStorage, match=r"maximum for all users is 2 \(trainings\.models\)"):
        service.submit("third")
    service.trainings.cancel(waiting.id, "ann")


def test_trained_model_is_deleted_by_its_owner_and_its_name_can_be_reused(service: Service) -> None:
    first = service.train("mine")
    trainings, models = service.trainings, service.runtime.models
    spec = models.get_servable_spec("mine")
    volume = Volume.from_array(np.zeros((1, 2, 4, 4), np.uint8))
    submit_segmentation(service.runtime, spec, volume, Options()).future.result(60)
    segmenter: Any = get_loaded_segmenter(models, "mine")
    segmenter.gate.clear()
    running_job = submit_segmentation(service.runtime, spec, volume, Options())
    wait_until(lambda: running_job.state == "running", 60)
    for name, owner, error in (
        ("base", "ann", ModelNotDeletable),
        ("mine", "bob", Unauthorized),
        ("x", "ann", UnknownModel),
    ):
        with pytest.raises(error):
            service.remove(name, owner)
    service.remove("mine")
    assert (not spec.folder.exists(), list_leftovers(service), list(models.specs)) == (True, [], ["base"])
    with pytest.raises(UnknownModel):
        service.remove("mine")
    segmenter.gate.set()
    assert running_job.future.result(60).segmentation is not None
    assert trainings.trained_models.find_trained_model(first) is None
    second = service.train("mine")
    assert (
        trainings.trained_models.find_trained_model(first),
        trainings.trained_models.find_trained_model(second),
    ) == (None, "mine")
    service.remove("mine", "eve", is_admin=True)


def test_base_model_of_an_unfinished_training_run_cannot_be_deleted(service: Service) -> None:
    service.train("mine")
    child = service.submit("hangs", model="mine")
    with pytest.raises(ModelNotDeletable, match="training"):
        service.remove("mine")
    service.trainings.cancel(child.id, "ann")
    service.remove("mine")


def test_default_model_by_name_cannot_be_deleted(service: Service, base: ModelSpec) -> None:
    model_folder = shutil.copytree(base.folder, service.settings.trained_folder / "nuclei")
    (model_folder / "model.yaml").write_text(
        (base.folder / "model.yaml").read_text().replace("name: base", "name: nuclei")
    )
    models = service.runtime.models
    assert models.reload().added == ["nuclei"]
    # The default is chosen at startup. After a restart, it would be `nuclei`.
    assert models.default_name == "base"
    models.default_name = "nuclei"
    with pytest.raises(ModelNotDeletable, match="default"):
        service.remove("nuclei", None, is_admin=True)
    assert models.get_servable_spec(None).folder == model_folder


def test_model_is_not_deleted_if_a_job_is_accepted_at_the_same_time(service: Service) -> None:
    service.train("mine")
    models, accepted_jobs = service.runtime.models, list[str]()

    def has_jobs(model: str) -> bool:
        if model in models.specs:
            return False
        for accept in (models.get_spec, lambda name: service.submit("child", model=name)):
            with pytest.raises(UnknownModel):
                accept(model)
        return bool(accepted_jobs)

    # The model must be served without interruption to jobs that have already been accepted.
    with pytest.raises(ModelNotDeletable, match="Unfinished jobs use"):
        service.remove("mine", has_jobs=lambda model: model in models.specs)
    accepted_jobs.append("a job")
    with pytest.raises(ModelNotDeletable, match="Unfinished jobs use"):
        service.remove("mine", has_jobs=has_jobs)
    assert models.get_spec("mine").folder.is_dir()
    accepted_jobs.clear()
    service.remove("mine", has_jobs=has_jobs)
    assert list(models.specs) == ["base"]


def test_invalid_training_requests_are_rejected_on_submission(service: Service, bands_repository: Path) -> None:
    # A model called nuclei would become the default model.
    names = [({"name": name}, "another name") for name in ("base", "nuclei")]
    for changes, message in (({"minutes": 121.0}, "the maximum is 120"), *names):
        with pytest.raises(BadParameter, match=message):
            service.submit(**{"name": "x"} | changes)
    disabled_settings = Settings.model_validate({**service.settings.model_dump(), "trainings": {"enabled": False}})
    with pytest.raises(FeatureDisabled):
        service.make_trainings(disabled_settings).check_enabled()


def test_overlapping_annotated_stacks_are_rejected_on_submission(service: Service) -> None:
    labels = np.ones((1, 4, 8, 8), np.uint8)

    def add_stack(pixels: Any, region: str | None, owner: str = "ann") -> str:
        part = None if region is None else Region.parse(region, (4, 8, 8))
        image, label_volume = (Volume.from_array(array) for array in (pixels, labels))
        return service.store.add(image, label_volume, NewAnnotation(name=str(region), owner=owner, region=part)).id

    first, adjacent, overlapping = (add_stack(labels, f"0:4,0:8,{columns}") for columns in ("0:5", "5:8", "4:6"))
    different_image, bobs_stack, converted_stack = (
        add_stack(labels + 1, None),
        add_stack(labels, None, "bob"),
        add_stack(labels.astype(np.uint16), None),
    )
    for stack_ids in (
        [first, adjacent, different_image, converted_stack],
        [first, first],
        [overlapping, different_image],
    ):
        service.trainings.cancel(service.submit("mine", annotations=stack_ids).id, "ann")
    for stack_ids in ([overlapping, different_image, first], [adjacent, overlapping]):
        older = next(stack_id for stack_id in (first, adjacent) if stack_id in stack_ids)
        with pytest.raises(BadParameter, match=rf"{older} .* and the newer {overlapping} .* Omit one of them"):
            service.submit("mine", annotations=stack_ids)
    with pytest.raises(BadParameter, match="Omit one of them"):
        service.submit("mine", "eve", annotations=[first, bobs_stack])


def test_training_run_fails_if_the_model_folder_cannot_be_written(service: Service) -> None:
    folder = service.settings.trained_folder
    folder.write_text("not a folder")
    record = service.train("mine")
    assert record.state == "failed"
    assert str(folder) not in record.message
    folder.unlink()
    assert service.train("mine").state == "done"


def test_training_run_that_cannot_be_recorded_is_rejected(service: Service) -> None:
    records_folder = service.settings.annotations_folder / "trainings"
    with full_disk(100), pytest.raises(OutOfStorage, match="disk"):
        service.submit("mine")
    assert (list(records_folder.iterdir()), service.trainings.queue.list_newest_first("ann")) == ([], [])


def test_result_of_a_training_run_is_recorded_as_soon_as_possible(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_queue, "SAVE_INTERVAL_SECONDS", 0.1)
    records_folder = service.settings.annotations_folder / "trainings"
    record = service.submit("mine")
    moved_folder = records_folder.rename(records_folder.with_name("moved"))
    records_folder.write_text("not a folder")
    assert service.wait(record, "done", "failed").state == "done"
    records_folder.unlink()
    moved_folder.rename(records_folder)
    wait_until(lambda: '"done"' in (records_folder / f"{record.id}.json").read_text())
    assert service.load_queue().find(record.id, "ann").state == "done"


def test_record_that_was_deleted_before_it_could_be_written_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "trainings").write_text("not a folder")
    queue, stopped = TrainingQueue(tmp_path / "trainings"), threading.Event()
    stopped.set()
    queue.save(TrainingRecord("0" * 32, "ann", "mine", "base/1", [], 1.0, 0.0, state="cancelled"))
    assert queue.wait_for_next_run(stopped) is None


def test_full_disk_after_training_is_reported(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_full_disk(*_arguments: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training_manager, "write_owner", raise_full_disk)
    record = service.train("mine")
    assert (record.state, "disk" in record.message, "file" in record.message) == ("failed", True, False)
    assert list(service.settings.trained_folder.iterdir()) == []


def test_start_deletes_only_leftover_files_of_killed_processes(service: Service) -> None:
    record, records_folder = service.train("mine"), service.settings.annotations_folder / "trainings"
    (records_folder / ".killed.part").write_text("{")
    abandoned_folder, locked_folder = (service.settings.trained_folder / f".training-{number}" for number in (1, 2))
    os.close(make_locked_folder(abandoned_folder))
    lock_fd = make_locked_folder(locked_folder)
    service.load_queue()
    os.close(lock_fd)
    assert list_leftovers(service) == [locked_folder.name]
    assert [path.name for path in records_folder.iterdir()] == [f"{record.id}.json"]


def test_training_on_a_deleted_annotated_stack_fails_with_the_reason(service: Service) -> None:
    hanging, record = service.hang(), service.submit("mine")
    service.store.delete(service.annotation, "ann")
    service.trainings.cancel(hanging.id, "ann")
    assert "annotated stack" in service.wait(record, "failed").message
