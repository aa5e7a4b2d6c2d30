"""End-to-end tests of training from corrected labels, with a server and its training process."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import tifffile
from fakes import wait_until
from live import TIFF, LabelTiff, LiveServer, as_tiff, eager_settings, parse_problem, serve
from numpy.typing import NDArray

from scripts.recipes.synthetic_nuclei import synthesize
from service.__main__ import main
from service.api.access.keys import hash_key
from service.cli.model_packages import train_model
from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Segmentation
from service.formats.tiff import writer as tiff_writer
from service.models.spec import ModelSpec
from service.serving.learning.training_child import TrainingChild
from service.serving.learning.training_manager import SETTINGS_SECTIONS
from service.training import process
from service.training.evaluate import score
from service.training.fine_tune import FineTuningTask
from service.training.stacks.annotated_stack import AnnotatedStack

TRAINING = {"edge": 16, "batch_size": 1, "pool": 2, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def models(trainable_model: ModelSpec) -> Path:
    """A repository with a small trainable model."""
    return trainable_model.folder.parent


@pytest.fixture(scope="module")
def live(models: Path, folder: Path) -> Iterator[LiveServer]:
    with serve(
        eager_settings(
            models, jobs={"folder": folder}, training=TRAINING, trainings={"niceness": 0, "keep_worse": True}
        )
    ) as running:
        yield running


def annotate(live: LiveServer, **headers: str) -> str:
    """Upload a stack with labels and return the ID of the annotated stack."""
    image, labels = synthesize(np.random.default_rng(0), (16, 32, 48))
    stack = live.post("/stacks", as_tiff(image), TIFF | headers).json()["id"]
    np.save(array := io.BytesIO(), labels)
    npy = {"Content-Type": "application/x-npy"} | headers
    return str(live.post("/annotations", array.getvalue(), npy, stack=stack).json()["id"])


def test_training_runs_alongside_requests_and_its_model_can_be_used(live: LiveServer, folder: Path) -> None:
    annotation = annotate(live)
    assert live.client.get("/limits").json() == {
        "corrections": True,
        "annotations_bytes": 8 * 2**30,
        "training": True,
        "training_problem": None,
        "training_minutes": 120.0,
        "temporary_jobs": False,
        "inputs": [],
        "outputs": [],
    }
    request = {"model": "random-nuclei", "annotations": [annotation], "minutes": 0.03, "name": "mine"}
    answer = live.client.post("/trainings", json=request)
    assert answer.status_code == 202, answer.text
    address = answer.headers["location"]
    assert live.segment().status_code == 200
    wait_until(lambda: live.client.get(address).json()["state"] != "waiting")
    status_report = live.client.get("/status").json()
    (training,) = status_report["learning"]["trainings"]
    assert (training["name"], training["base_model"], training["state"]) == ("mine", "random-nuclei/1", "running")
    assert (
        status_report["learning"]["problem"],
        status_report["learning"]["annotations"],
        status_report["learning"]["models"],
    ) == (None, 1, 0)
    disk = {kind.pop("files"): kind for kind in status_report["disk"]}
    stored_bytes = live.client.get(f"/annotations/{annotation}").json()["bytes"]
    assert disk["annotations"] == disk["annotations"] | {"used": stored_bytes, "limit": None}
    assert disk["stacks"]["used"] > 0
    assert all(kind["used"] <= (kind["limit"] or kind["used"]) <= kind["total"] for kind in disk.values())
    metrics = live.client.get("/metrics").text.splitlines()
    assert {'stackseg_trainings{state="running"} 1.0', 'stackseg_trainings{state="waiting"} 0.0'} <= set(metrics)
    assert f'stackseg_disk_used_bytes{{files="annotations"}} {float(stored_bytes)}' in metrics
    report = wait(live, address)
    assert report["state"] == "done", report["message"]
    assert report["model"] == "mine"
    assert [step for step, _ in report["loss"]] == list(range(1, report["step"] + 1))
    assert report["validation"][0][0] == 0
    assert report["better"] == (report["after"] > report["before"]) == ("is better" in report["message"])
    assert str(folder) not in str(report)
    lineage = live.client.get("/models/mine").json()["lineage"]
    assert (lineage["parent"], lineage["annotations"]) == ("random-nuclei/1", 1)
    assert lineage["after"] == pytest.approx(report["after"])
    assert live.segment(model="mine").headers["x-stackseg-model"] == "mine/1"
    assert live.client.get("/trainings").json() == {"trainings": [live.client.get(address).json()]}
    status_report = live.client.get("/status").json()
    assert (status_report["learning"]["trainings"], status_report["learning"]["models"]) == ([], 1)
    assert next(kind for kind in status_report["disk"] if kind["files"] == "trained-models")["used"] > 0
    assert live.client.delete("/models/mine").status_code == 204
    assert live.client.get("/models/mine").status_code == 404
    assert live.client.get(address).json() == report | {"model": None}
    assert live.client.delete(address).status_code == 204
    assert live.client.get(address).json()["type"].endswith("unknown-training")


def test_model_for_boundaries_is_trained_and_served(live: LiveServer) -> None:
    request = {"annotations": [annotate(live)], "minutes": 0.02, "name": "walls", "target": "boundaries"}
    answer = live.client.post("/trainings", json=request)
    assert answer.status_code == 202, answer.text
    report = wait(live, answer.headers["location"])
    assert report["state"] == "done", report["message"]
    assert "variation of information" in report["message"]
    labels = tifffile.imread(io.BytesIO(live.segment(model="walls").content))
    assert (labels > 0).all()


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"annotations": []}, 422, "annotations"),
        ({"annotations": ["0" * 32]}, 404, "annotated stack"),
        ({"minutes": 0}, 422, "minutes"),
        ({"name": "random-nuclei"}, 422, "another name"),
        ({"name": "../mine"}, 422, "name"),
        ({"model": "nowhere"}, 404, "nowhere"),
        ({"steps": 3}, 422, "annotations, minutes, name"),
    ],
)
def test_invalid_trainings_are_refused_with_the_reason(
    live: LiveServer, change: dict[str, Any], status: int, word: str
) -> None:
    request: dict[str, Any] = {"annotations": [annotate(live)], "minutes": 1, "name": "other"} | change
    answer = live.client.post("/trainings", json=request)
    assert (answer.status_code, word in answer.json()["detail"]) == (status, True), answer.text


@pytest.mark.parametrize(("body", "status"), [(b"", 422), (b"[1]", 422), (b'"' + b"x" * 2**17, 413)])
def test_invalid_request_bodies_are_refused(live: LiveServer, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert live.client.post("/trainings", content=body, headers=headers).status_code == status
    assert live.client.post("/trainings", content=body, headers={"Content-Type": "text/plain"}).status_code == 415


def test_only_trainers_can_train_and_admins_see_all_trainings(models: Path, tmp_path: Path) -> None:
    names = ("ann", "bob", "eve")
    access = {"keys": {name: hash_key(name) for name in names}, "admins": ["eve"], "trainers": ["ann"]}
    with serve(eager_settings(models, access=access, jobs={"folder": tmp_path}), wait=False) as live:
        keys = {name: {"X-API-Key": name} for name in names}
        annotation = annotate(live, **keys["ann"])
        request = {"annotations": [annotation], "minutes": 1, "name": "mine"}
        limits_by_name = {name: live.client.get("/limits", headers=keys[name]).json() for name in names}
        assert {name: limits["training"] for name, limits in limits_by_name.items()} == {
            "ann": True,
            "bob": False,
            "eve": True,
        }
        assert "access.trainers" in limits_by_name["bob"]["training_problem"]
        assert live.client.post("/trainings", json=request, headers=keys["bob"]).status_code == 401
        address = live.client.post("/trainings", json=request, headers=keys["ann"]).headers["location"]
        training_counts = {
            name: len(live.client.get("/trainings", headers=keys[name]).json()["trainings"]) for name in names
        }
        assert training_counts == {"ann": 1, "bob": 0, "eve": 1}
        annotation_counts = {
            name: len(live.client.get("/annotations", headers=keys[name]).json()["annotations"]) for name in names
        }
        assert annotation_counts == {"ann": 1, "bob": 0, "eve": 1}
        assert live.client.get(address, headers=keys["bob"]).status_code == 404
        assert live.client.delete(address, headers=keys["bob"]).status_code == 404
        assert live.client.delete(address, headers=keys["eve"]).status_code == 204
        assert live.client.get(address, headers=keys["ann"]).json()["state"] == "cancelled"


def test_operators_can_disable_training(models: Path, tmp_path: Path) -> None:
    settings = eager_settings(models, jobs={"folder": tmp_path}, trainings={"enabled": False})
    with serve(settings, wait=False) as live:
        limits = live.client.get("/limits").json()
        assert (limits["training"], "trainings.enabled" in limits["training_problem"]) == (False, True)
        assert live.client.get("/status").json()["learning"]["problem"] == limits["training_problem"]
        answer = live.client.post("/trainings", json={"annotations": ["0" * 32], "minutes": 1, "name": "mine"})
        assert parse_problem(answer) == (403, "switched-off")


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount a disk of this size until the context exits."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def wait(live: LiveServer, address: str) -> Any:
    """Wait until a training has ended and return its report."""
    wait_until(lambda: live.client.get(address).json()["state"] not in {"waiting", "running"}, 1000)
    return live.client.get(address).json()


@pytest.mark.thorough
def test_full_disks_are_reported_and_the_service_recovers(models: Path, tmp_path: Path) -> None:
    annotations, trained = tmp_path / "annotations", tmp_path / "trained-models"
    settings = eager_settings(
        models, jobs={"folder": tmp_path}, training=TRAINING, trainings={"niceness": 0, "keep_worse": True}
    )
    with small_disk(annotations, 400), small_disk(trained, 2_000), serve(settings) as live:

        def assert_healthy() -> None:
            assert live.client.get("/health/ready").json() == {"status": "ready"}
            assert live.segment().status_code == 200

        annotation, before = annotate(live), set(annotations.iterdir())
        noise = as_tiff(np.random.default_rng(0).integers(0, 2**16, (16, 128, 128), np.uint16))
        labels = as_tiff(np.ones((16, 128, 128), np.uint8))
        full = live.client.post("/annotations", files={"file": ("a.tif", noise), "labels": ("b.tif", labels)})
        assert (full.status_code, "disk" in full.json()["detail"]) == (507, True), full.text
        assert set(annotations.iterdir()) == before
        assert_healthy()
        request = {"annotations": [annotation], "minutes": 0.5, "name": "mine"}
        address = live.client.post("/trainings", json=request).headers["location"]
        wait_until(lambda: live.client.get(address).json()["step"] > 0, 300)
        with suppress(OSError), (trained / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(2**12)):
                pass
        report = wait(live, address)
        assert (report["state"], "models.trained_folder" in report["message"]) == ("failed", True), report["message"]
        assert [path.name for path in trained.iterdir()] == ["filler"]
        assert_healthy()
        # A full disk is also detected before the training reads its data.
        again = wait(live, live.client.post("/trainings", json=request).headers["location"])
        assert (again["state"], again["message"], again["step"]) == ("failed", report["message"], 0)
        (trained / "filler").unlink()
        done = wait(live, live.client.post("/trainings", json=request | {"minutes": 0.03}).headers["location"])
        assert done["state"] == "done", done["message"]
        assert_healthy()


def draw_balls(seed: int, shape: tuple[int, int, int]) -> NDArray[np.uint16]:
    """Draw labels [Z, Y, X] of balls with radii of 3 to 5 voxels that do not touch."""
    rng, labels, places = np.random.default_rng(seed), np.zeros(shape, np.uint16), np.indices(shape)
    for _ in range(300):
        radius, centre = rng.uniform(3, 5), rng.uniform(2, np.array(shape) - 2)
        distances = np.sqrt(sum((axis - center) ** 2 for axis, center in zip(places, centre, strict=True)))
        if not labels[distances <= radius + 1].any():
            labels[distances <= radius] = labels.max() + 1
    return labels


@pytest.mark.thorough
def test_training_on_part_of_a_stack_improves_the_rest(models: Path, tmp_path: Path) -> None:
    """A model for bright objects learns dark objects from a part of the stack. Scores are from the rest of it."""
    training = {"edge": 16, "batch_size": 4, "pool": 4, "learning_rate": 0.01}
    shape, corrected = (24, 64, 160), 96
    labels, noise = draw_balls(5, shape), np.random.default_rng(6).normal(0, 15, shape)
    images = {
        "bright": (np.where(labels > 0, 200, 60) + noise).astype(np.uint16),
        "dark": (np.where(labels > 0, 60, 200) + noise).astype(np.uint16),
    }
    np.save(array := io.BytesIO(), labels)
    with serve(
        eager_settings(
            models, jobs={"folder": tmp_path}, training=training, trainings={"niceness": 0, "keep_worse": True}
        )
    ) as live:

        def f1(model: str, contrast: str) -> float:
            found = LabelTiff(live.segment(as_tiff(images[contrast]), model=model).content).pixels
            return score(labels[..., corrected:], found[..., corrected:]).f1

        def learn(contrast: str, base: str) -> Any:
            files = {"file": ("a.tif", as_tiff(images[contrast])), "labels": ("b.npy", array.getvalue())}
            region = f"0:24,0:64,0:{corrected}"
            annotation = live.client.post("/annotations", files=files, params={"region": region}).json()["id"]
            request = {"model": base, "annotations": [annotation], "minutes": 2, "name": contrast}
            return wait(live, live.client.post("/trainings", json=request).headers["location"])

        assert learn("bright", "random-nuclei")["state"] == "done"
        before = f1("bright", "dark")
        report = learn("dark", "bright")
        after = f1("dark", "dark")
        scored = {key: report[key] for key in ("before", "after", "step", "message")}
        print(f"bright {f1('bright', 'bright'):.2f}, dark {before:.2f} before, {after:.2f} after; {scored}")
        assert f1("bright", "bright") > 0.8
        assert report["better"], report["message"]
        assert report["after"] > report["before"] + 0.5
        assert after > before + 0.5


class RecordedTraining(NamedTuple):
    """The arguments of `fine_tune`."""

    stacks: Sequence[AnnotatedStack]
    task: FineTuningTask


def test_command_line_and_service_train_alike(
    models: Path, tmp_path: Path, write_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The web UI sends the same requests as this test; see `tests/page/test_training.py`."""
    image, labels = synthesize(np.random.default_rng(0), (16, 32, 48))
    labels[[0, 1, 2, 12, 13, 14, 15]] = 0
    for name, pixels in (("image", image), ("labels", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VoxelSize(0.5, 0.25, 0.25)), tmp_path / f"{name}.tif")
    runs: list[RecordedTraining] = []

    def record_arguments(stacks: Sequence[AnnotatedStack], task: FineTuningTask) -> NoReturn:
        runs.append(RecordedTraining(stacks, task))
        raise BadParameter("recorded")

    monkeypatch.setattr(train_model, "fine_tune", record_arguments)
    monkeypatch.setattr(process, "fine_tune", record_arguments)
    for name in ("_lower_priority", "_limit_memory"):
        monkeypatch.setattr(process, name, lambda *_: None)

    def run_in_this_process(child: TrainingChild, request: dict[str, Any], *_: object) -> str:
        child.kill()
        child.process.communicate()
        with pytest.raises(BadParameter, match="recorded"):
            process.train(request, lambda _progress: None)
        return "recorded"

    monkeypatch.setattr(TrainingChild, "run", run_in_this_process)
    config = write_config(models, training=TRAINING, limits={"cache_bytes": 0})
    options = ["--images", tmp_path / "image.tif", "--labels", tmp_path / "labels.tif", "--from", "random-nuclei"]
    options += ["--partial-planes", "--minutes", "5", "--out", tmp_path / "mine", "--config", config]
    assert main(["train", *map(str, options)]) == 1
    with serve(eager_settings(models, jobs={"folder": tmp_path / "jobs"}, training=TRAINING)) as live:
        stack = live.post("/stacks", (tmp_path / "image.tif").read_bytes()).json()["id"]
        annotation = live.post("/annotations", (tmp_path / "labels.tif").read_bytes(), stack=stack).json()["id"]
        request = {"model": "random-nuclei", "annotations": [annotation], "minutes": 5, "name": "mine"}
        address = live.client.post("/trainings", json=request | {"partial_planes": True}).headers["location"]
        wait_until(lambda: live.client.get(address).json()["state"] == "failed")
        assert live.client.get(address).json()["message"] == "recorded"
    (local_stacks, local_task), (uploaded_stacks, uploaded_task) = runs
    for local_stack, uploaded_stack in zip(local_stacks, uploaded_stacks, strict=True):
        assert np.array_equal(local_stack.volume.read_all(), uploaded_stack.volume.read_all())
        assert np.array_equal(local_stack.labels, uploaded_stack.labels)
        assert local_stack.unknown is not None
        assert np.array_equal(local_stack.unknown, uploaded_stack.unknown)
        assert local_stack.volume.voxel_size == uploaded_stack.volume.voxel_size
        assert local_stack.extents == uploaded_stack.extents
    assert local_task.base == uploaded_task.base
    for section in SETTINGS_SECTIONS:
        assert getattr(local_task.settings, section) == getattr(uploaded_task.settings, section)
