from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import eager_settings
from numpy.typing import NDArray

from scripts.recipes.synthetic_nuclei import synthesize
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.models.repository import read_spec
from service.models.spec import ModelSpec, Sample
from service.training.examples import split_pairs
from service.training.fine_tune import (
    AnnotatedStack,
    FineTuningTask,
    StackFiles,
    _hold_out_parts,
    fine_tune,
    read_stack,
    resample_stack,
)

VOXEL_SIZE = VoxelSize(0.5, 0.25, 0.25)


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    return write_model(random_nuclei_content | {"activation": "sigmoid"})


def make_settings(base: ModelSpec) -> Settings:
    training_options = {"edge": 16, "batch_size": 1, "pool": 2, "learning_rate": 0.01}
    return eager_settings(base.folder.parent, training=training_options)


def write_stack(folder: Path, image: NDArray[Any], labels: NDArray[Any], **fields: Any) -> StackFiles:
    folder.mkdir(exist_ok=True)
    for name, pixels in (("image", image), ("labels", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VOXEL_SIZE), folder / f"{name}.tif")
    return StackFiles("secret.tif", folder / "image.tif", folder / "labels.tif", **fields)


def make_grid(shape: tuple[int, int, int], pitch: int = 6, edge: int = 4) -> NDArray[np.uint16]:
    """Return labels of cubes on a regular grid."""
    labels = np.zeros(shape, np.uint16)
    for number, corner in enumerate(np.ndindex(*(length // pitch for length in shape)), 1):
        labels[tuple(slice(pitch * position, pitch * position + edge) for position in corner)] = number
    return labels


@pytest.mark.parametrize("has_sample", [False, True])
def test_fine_tuning_creates_a_model_with_its_lineage_and_scores(
    base: ModelSpec, tmp_path: Path, has_sample: bool
) -> None:
    pixels = np.random.default_rng(1).integers(0, 999, (16, 16, 16), np.uint16)
    tiff_writer.write(Segmentation(pixels, "labels"), base.folder / "sample.tif")
    base = base.model_copy(update={"sample": Sample() if has_sample else None})
    stack = write_stack(tmp_path / "stack", *synthesize(np.random.default_rng(0), (16, 32, 64)))
    messages: list[dict[str, Any]] = []
    result = fine_tune(
        [stack], FineTuningTask(base, tmp_path / "mine", make_settings(base), messages.append), minutes=0.03
    )
    spec = read_spec(tmp_path / "mine")
    assert (spec, spec.lineage) == (result.spec, result.lineage)
    assert (result.lineage.parent, result.lineage.annotations) == ("random-nuclei/1", 1)
    assert result.lineage.better == ("is better" in result.message)
    assert result.lineage.better == (result.lineage.after > result.lineage.before)
    assert "secret" not in (tmp_path / "mine" / "model.yaml").read_text()
    stages = [message.get("stage") or "before" for message in messages if {"stage", "before"} & message.keys()]
    assert stages == ["scoring", "before", "learning", "finishing", "evaluating"]
    assert [message.get("stage") for message in messages[-2:]] == ["finishing", "evaluating"]
    losses = [message["step"] for message in messages if "loss" in message]
    assert losses == list(range(1, len(losses) + 1))
    validation_steps = [message["validation"][0] for message in messages if "validation" in message]
    assert validation_steps[0] == 0
    assert len(validation_steps) > 1
    assert "checkpoint.pt" not in {path.name for path in (tmp_path / "mine").iterdir()}
    # All users of the model can see the sample, so the new model must have the sample of the base model.
    assert (spec.sample is not None) == has_sample
    if spec.sample is not None:
        sample = stack_reader.read(spec.folder / spec.sample.input, Selection(), 2**20)
        assert np.array_equal(sample.read_all()[0], pixels)


def test_only_the_annotated_region_is_read(tmp_path: Path) -> None:
    labels = make_grid((12, 24, 24))
    region = (slice(1, 11), slice(0, 20), slice(3, 24))
    stack = write_stack(tmp_path / "stack", labels + np.uint16(7), labels, region=region)
    annotated_stack = read_stack(stack)
    assert np.array_equal(annotated_stack.pair[0], labels[region] + 7)
    assert np.array_equal(annotated_stack.pair[1], labels[region])
    assert annotated_stack.extents == (4, 4, 4)
    stack_with_diameter = read_stack(stack._replace(diameter="2um"))
    assert stack_with_diameter.extents == (4, 8, 8)


def test_held_out_parts_are_not_used_for_training(tmp_path: Path) -> None:
    labels = make_grid((12, 24, 60))
    large_stack, small_stack = (AnnotatedStack("a", (part, part), None) for part in (labels, labels[:6, :6]))
    parts, held_out, has_held_out_data = _hold_out_parts([large_stack], 0.2, None)
    assert has_held_out_data
    assert (parts[0].pair[1].shape, held_out[0].pair[1].shape) == ((12, 24, 48), (12, 24, 12))
    parts, held_out, has_held_out_data = _hold_out_parts([small_stack], 0.2, None)
    assert not has_held_out_data
    assert parts == [small_stack]
    assert held_out[0].object_count == 2
    empty_stack = AnnotatedStack("b", (labels * 0, labels * 0), None)
    assert _hold_out_parts([empty_stack, large_stack], 0.2, None)[0][0].pair[1].shape == (12, 24, 48)
    with pytest.raises(BadParameter, match="too few objects"):
        _hold_out_parts([empty_stack], 0.2, None)


def test_validation_part_is_scored_if_there_are_few_objects() -> None:
    labels = make_grid((12, 12, 16))
    # After resampling, z is the longest axis.
    stack = AnnotatedStack("a", (labels, labels), (2.0, 4.0, 4.0))
    parts, scored_parts, has_held_out_data = _hold_out_parts([stack], 0.5, 4.0)
    assert not has_held_out_data
    training, validation = split_pairs([resample_stack(parts[0], 4.0)], 0.5)
    trained_labels, validated_labels, scored_labels = (
        set(np.unique(labels)) - {0} for labels in (training[0][1], validation[0][1], scored_parts[0].pair[1])
    )
    assert scored_labels == validated_labels
    assert not scored_labels & trained_labels


def test_objects_are_resampled_to_the_diameter_of_the_model() -> None:
    labels = make_grid((12, 24, 24))
    stack = AnnotatedStack("a", (labels, labels), (4.0, 4.0, 4.0))
    assert resample_stack(stack, None)[1] is labels
    assert resample_stack(stack, 4.4)[1] is labels
    image, resampled_labels = resample_stack(stack, 8.0)
    assert image.shape == resampled_labels.shape == (24, 48, 48)
    assert set(np.unique(resampled_labels)) == set(np.unique(labels))
    with pytest.raises(BadParameter, match="smaller region"):
        resample_stack(
            AnnotatedStack("a", (np.broadcast_to(labels[0, 0, 0], (999, 999, 99)), labels), (1.0, 1.0, 1.0)), 8.0
        )
