from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from live import eager_settings
from numpy.typing import NDArray

from scripts.recipes.synthetic_nuclei import synthesize
from service.core.config import Settings
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.models.repository import read_spec
from service.models.spec import ModelSpec, Sample
from service.training import fine_tune as fine_tune_module
from service.training.fine_tune import FineTuningTask, fine_tune
from service.training.loop.object_scores import ObjectCounts
from service.training.loop.plan import TrainerState
from service.training.loop.trainer import Trainer
from service.training.stacks.annotated_stack import AnnotatedStack, StackFiles, read_stack

VOXEL_SIZE = VoxelSize(0.5, 0.25, 0.25)


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    """A trainable model with an object diameter."""
    model_input = random_nuclei_content["input"] | {"diameter": 8.0, "estimate_diameter": True}
    return write_model(random_nuclei_content | {"activation": "sigmoid", "input": model_input})


@pytest.fixture
def stack(tmp_path: Path) -> AnnotatedStack:
    return read_stack(write_stack(tmp_path / "stack", *synthesize(np.random.default_rng(0), (16, 32, 64))))


def write_stack(folder: Path, image: NDArray[Any], labels: NDArray[Any]) -> StackFiles:
    folder.mkdir(exist_ok=True)
    for name, pixels in (("image", image), ("labels", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VOXEL_SIZE), folder / f"{name}.tif")
    return StackFiles("secret.tif", folder / "image.tif", folder / "labels.tif")


def make_settings(base: ModelSpec, **options: Any) -> Settings:
    training_options = {"edge": 16, "batch_size": 1, "pool": 2, "learning_rate": 0.01, "minutes": 0.03}
    return eager_settings(base.folder.parent, training=training_options | options)


@pytest.mark.parametrize("has_sample", [False, True])
def test_private_training_reveals_neither_names_nor_pixels(
    base: ModelSpec, stack: AnnotatedStack, tmp_path: Path, has_sample: bool
) -> None:
    pixels = np.random.default_rng(1).integers(0, 999, (16, 16, 16), np.uint16)
    tiff_writer.write(Segmentation(pixels, "labels"), base.folder / "sample.tif")
    base = base.model_copy(update={"sample": Sample() if has_sample else None})
    messages: list[dict[str, Any]] = []
    task = FineTuningTask(base, tmp_path / "mine", make_settings(base), messages.append, keeps_worse=True)
    result = fine_tune([stack], task)
    spec = read_spec(tmp_path / "mine")
    assert spec == result.spec
    assert spec.lineage is not None
    assert (spec.lineage.parent, spec.lineage.annotations) == ("random-nuclei/1", 1)
    assert spec.lineage.better == result.is_better == ("is better" in result.message)
    assert "secret" not in (tmp_path / "mine" / "model.yaml").read_text()
    # The new model uses the diameter of the annotated objects, in micrometers, unless a request specifies another one
    # or, if the confidence is calibrated, an estimate is clearly better.
    assert spec.input.estimate_diameter
    diameter = spec.input.usual_diameter
    assert diameter is not None
    assert diameter.unit == "um"
    assert diameter.to_voxels(VOXEL_SIZE) == pytest.approx(stack.extents, rel=0.01)
    stages = [message.get("stage") or "before" for message in messages if {"stage", "before"} & message.keys()]
    assert stages == ["scoring", "before", "learning", "finishing", "evaluating"]
    losses = [message["step"] for message in messages if "loss" in message]
    assert losses == list(range(1, len(losses) + 1))
    validation_steps = [message["validation"][0] for message in messages if "validation" in message]
    assert validation_steps[0] == 0
    assert len(validation_steps) > 1
    assert [message["f1"][0] for message in messages if "f1" in message] == validation_steps
    assert "checkpoint.pt" not in {path.name for path in (tmp_path / "mine").iterdir()}
    # All users of the model can see the sample, so the new model must have the sample of the base model.
    assert (spec.sample is not None) == has_sample
    if spec.sample is not None:
        sample = stack_reader.read(spec.folder / spec.sample.input, Selection(), 2**20)
        assert np.array_equal(sample.read_all()[0], pixels)


@pytest.mark.parametrize("scores", [(5, 5), (4, 6)])
def test_model_that_is_not_better_is_not_kept(
    base: ModelSpec, stack: AnnotatedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: tuple[int, int]
) -> None:
    matched = iter(scores[::-1])
    monkeypatch.setattr(fine_tune_module, "score_parts", lambda *_: (ObjectCounts(10, 10, next(matched), 0), []))
    settings = make_settings(base, minutes=None, steps=2)
    result = fine_tune([stack], FineTuningTask(base, tmp_path / "mine", settings, lambda _message: None))
    assert result.spec is None
    assert not (tmp_path / "mine").exists()
    assert result.message.startswith("The new model is not better than the base model on 10 held-out objects")
    for advice in ("diameter=", "annotate more objects", "train for longer", "another model"):
        assert advice in result.message
    assert "partial_planes" not in result.message


def test_planes_without_labels_are_mentioned(base: ModelSpec, stack: AnnotatedStack, tmp_path: Path) -> None:
    labels = stack.labels.copy()
    labels[4:13] = 0
    task = FineTuningTask(base, tmp_path / "mine", make_settings(base, minutes=None, steps=1), lambda _message: None)
    message = fine_tune([replace(stack, labels=labels)], task).message
    assert "9 of 16 planes of a stack have no labels and were used as background" in message


def test_expected_number_of_steps_is_reported_if_the_time_limits_it() -> None:
    messages: list[dict[str, Any]] = []
    report = fine_tune_module._ProgressReporter(messages.append, 100)
    for step, progress in ((1, 0.01), (2, 0.04), (25, 0.5), (50, 1.01)):
        state = TrainerState(step=step)
        report(cast(Trainer, SimpleNamespace(state=state, progress=progress, is_finishing=False, latest_loss=0.5)))
    assert [message["step"] for message in messages if "step" in message] == [1, 2, 25, 50]
    assert [message["steps"] for message in messages if "steps" in message] == [50]


def test_few_annotated_objects_limit_the_number_of_steps(
    base: ModelSpec, stack: AnnotatedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fine_tune_module, "STEPS_PER_OBJECT", 1)
    monkeypatch.setattr(fine_tune_module, "MIN_STEP_LIMIT", 2)
    messages: list[dict[str, Any]] = []
    result = fine_tune(
        [stack], FineTuningTask(base, tmp_path / "mine", make_settings(base, minutes=5), messages.append)
    )
    (step_count,) = (message["steps"] for message in messages if "steps" in message)
    assert 2 <= step_count < len(np.unique(stack.labels))
    assert result.summary.startswith(f"{step_count} steps")
    assert "train for longer" not in result.message
