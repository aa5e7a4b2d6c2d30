from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import eager
from numpy.typing import NDArray

from scripts.recipes.synthetic_nuclei import synthesise
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.models.repository import read_spec
from service.models.spec import ModelSpec, Sample
from service.training.examples import split_pairs
from service.training.fine_tune import Annotated, FineTuning, Stack, _hold_out, fine_tune, read_stack, resample

SIZE = VoxelSize(0.5, 0.25, 0.25)


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    return write_model(random_nuclei_content | {"activation": "sigmoid"})


def settings(base: ModelSpec) -> Settings:
    quick = {"edge": 16, "batch_size": 1, "pool": 2, "learning_rate": 0.01}
    return eager(base.folder.parent, training=quick)


def write_stack(folder: Path, image: NDArray[Any], labels: NDArray[Any], **facts: Any) -> Stack:
    folder.mkdir(exist_ok=True)
    for name, pixels in (("image", image), ("labels", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", SIZE), folder / f"{name}.tif")
    return Stack("secret.tif", folder / "image.tif", folder / "labels.tif", **facts)


def grid(shape: tuple[int, int, int], pitch: int = 6, edge: int = 4) -> NDArray[np.uint16]:
    """Cubes in a grid."""
    labels = np.zeros(shape, np.uint16)
    for number, corner in enumerate(np.ndindex(*(length // pitch for length in shape)), 1):
        labels[tuple(slice(pitch * place, pitch * place + edge) for place in corner)] = number
    return labels


@pytest.mark.parametrize("has_sample", [False, True])
def test_a_model_is_made_and_says_what_came_of_it(base: ModelSpec, tmp_path: Path, has_sample: bool) -> None:
    pixels = np.random.default_rng(1).integers(0, 999, (16, 16, 16), np.uint16)
    tiff_writer.write(Segmentation(pixels, "labels"), base.folder / "sample.tif")
    base = base.model_copy(update={"sample": Sample() if has_sample else None})
    stack = write_stack(tmp_path / "stack", *synthesise(np.random.default_rng(0), (16, 32, 64)))
    news: list[dict[str, Any]] = []
    outcome = fine_tune([stack], FineTuning(base, tmp_path / "mine", settings(base), news.append), minutes=0.03)
    spec = read_spec(tmp_path / "mine")
    assert (spec, spec.lineage) == (outcome.spec, outcome.lineage)
    assert (outcome.lineage.parent, outcome.lineage.annotations) == ("random-nuclei/1", 1)
    assert outcome.lineage.better == ("is better" in outcome.message)
    assert outcome.lineage.better == (outcome.lineage.after > outcome.lineage.before)
    assert "secret" not in (tmp_path / "mine" / "model.yaml").read_text()
    stages = [line.get("stage") or "before" for line in news if {"stage", "before"} & line.keys()]
    assert stages == ["scoring", "before", "learning", "finishing", "evaluating"]
    assert [line.get("stage") for line in news[-2:]] == ["finishing", "evaluating"]
    losses = [line["step"] for line in news if "loss" in line]
    assert losses == list(range(1, len(losses) + 1))
    rounds = [line["validation"][0] for line in news if "validation" in line]
    assert rounds[0] == 0
    assert len(rounds) > 1
    assert "checkpoint.pt" not in {path.name for path in (tmp_path / "mine").iterdir()}
    # Others may use the model, and would see a part of the stack: the sample is the parent's.
    assert (spec.sample is not None) == has_sample
    if spec.sample is not None:
        sample = stack_reader.read(spec.folder / spec.sample.input, Selection(), 2**20)
        assert np.array_equal(sample.array()[0], pixels)


def test_only_the_annotated_part_is_read(tmp_path: Path) -> None:
    labels = grid((12, 24, 24))
    region = (slice(1, 11), slice(0, 20), slice(3, 24))
    stack = write_stack(tmp_path / "stack", labels + np.uint16(7), labels, region=region)
    read = read_stack(stack)
    assert np.array_equal(read.pair[0], labels[region] + 7)
    assert np.array_equal(read.pair[1], labels[region])
    assert read.widths == (4, 4, 4)
    stated = read_stack(stack._replace(diameter="2um"))
    assert stated.widths == (4, 8, 8)


def test_what_is_held_out_is_not_trained_on_where_there_is_enough(tmp_path: Path) -> None:
    labels = grid((12, 24, 60))
    large, small = (Annotated("a", (part, part), None) for part in (labels, labels[:6, :6]))
    parts, held_out, unseen = _hold_out([large], 0.2, None)
    assert unseen
    assert (parts[0].pair[1].shape, held_out[0].pair[1].shape) == ((12, 24, 48), (12, 24, 12))
    parts, held_out, unseen = _hold_out([small], 0.2, None)
    assert not unseen
    assert parts == [small]
    assert held_out[0].objects == 2
    empty = Annotated("b", (labels * 0, labels * 0), None)
    assert _hold_out([empty, large], 0.2, None)[0][0].pair[1].shape == (12, 24, 48)
    with pytest.raises(BadParameter, match="too few objects"):
        _hold_out([empty], 0.2, None)


def test_what_is_scored_of_few_objects_is_what_the_training_validates_on_and_does_not_learn() -> None:
    labels = grid((12, 12, 16))
    # Resampled it is longest along z.
    stack = Annotated("a", (labels, labels), (2.0, 4.0, 4.0))
    parts, scored, unseen = _hold_out([stack], 0.5, 4.0)
    assert not unseen
    training, validation = split_pairs([resample(parts[0], 4.0)], 0.5)
    learned, validated, judged = (
        set(np.unique(labels)) - {0} for labels in (training[0][1], validation[0][1], scored[0].pair[1])
    )
    assert judged == validated
    assert not judged & learned


def test_objects_get_the_width_that_the_model_works_at() -> None:
    labels = grid((12, 24, 24))
    stack = Annotated("a", (labels, labels), (4.0, 4.0, 4.0))
    assert resample(stack, None)[1] is labels
    assert resample(stack, 4.4)[1] is labels
    image, numbers = resample(stack, 8.0)
    assert image.shape == numbers.shape == (24, 48, 48)
    assert set(np.unique(numbers)) == set(np.unique(labels))
    with pytest.raises(BadParameter, match="smaller part"):
        resample(Annotated("a", (np.broadcast_to(labels[0, 0, 0], (999, 999, 99)), labels), (1.0, 1.0, 1.0)), 8.0)
