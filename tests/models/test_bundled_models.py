"""Tests of the bundled models: their samples, and their scores on real stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import live
import numpy as np
import pytest
import torch
from paths import ROOT, SHARED_DATA
from torch import nn

from scripts.recipes.class_targets import compute_dice, labels_to_classes
from scripts.recipes.synthetic_nuclei import TYPICAL_NUCLEI, synthesize
from scripts.recipes.synthetic_tissue import TYPICAL_TISSUE, synthesize_tissue
from service.core.config import read_settings
from service.core.quantities import Diameter, parse_diameter
from service.core.types import Options, Selection, Volume
from service.engine.prepare import prepare
from service.formats import stack_reader
from service.inference.runner.label_agreement import LabelAgreement
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.types import Result
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow
from service.models.loader import load_network
from service.models.network import Network
from service.models.repository import read_repository, select_model
from service.models.spec import ModelSpec
from service.training.evaluate import score

CPU = torch.device("cpu")
REAL_STACKS = SHARED_DATA / "real"
SELECTIONS = {
    "single_nucleus_confocal_vs_widefield": Selection(channel=0),
    "mesospim_brain_nuclei_c5": Selection(axes="ZYX"),
}
# The nuclei of this stack have a diameter of four voxels, so the stack is segmented at five times its size.
CROPS = {"mesospim_brain_nuclei_c5": np.s_[30:66, 20:56, 20:56]}
MAX_READ_BYTES = 2**30

# Nuclei with a diameter of 10 voxels.
SMALL_NUCLEI = replace(TYPICAL_NUCLEI, diameter=10, fill=0.3)

BUNDLED_NAMES = ("embryos", "membranes", "nuclei", "tissue")


# Parameters of the samples of the models membranes and tissue; see models/membranes/README.md.
TISSUE_PARAMETERS = replace(TYPICAL_TISSUE, diameter=32, nucleus=0.22)
SEED = 12


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    return read_repository(ROOT / "models")


@pytest.fixture(scope="module")
def nuclei(specs: dict[str, ModelSpec]) -> ModelSpec:
    return specs["nuclei"]


GetRunner = Callable[[str], ModelRunner]


@pytest.fixture(scope="module")
def get_runner(specs: dict[str, ModelSpec]) -> GetRunner:
    """get_runner(name) -> the eager runner of a bundled model. Each model is loaded once."""

    @cache
    def make_runner(name: str) -> ModelRunner:
        settings = {"engine": {"precision": "fp32"}, "windows": {"sw_batch_size": 1}}
        runner = ModelRunner(specs[name], live.eager_settings(ROOT / "models", **settings))
        runner.warm_up()
        return runner

    return make_runner


SegmentRealStack = Callable[[str, str | None], Result]


@pytest.fixture(scope="module")
def segment_real_stack(get_runner: GetRunner) -> SegmentRealStack:
    """segment_real_stack(name, diameter) -> result of the model nuclei. Each stack is segmented once per diameter."""

    @cache
    def segment_stack(name: str, diameter: str | None) -> Result:
        volume = stack_reader.read(REAL_STACKS / name / "image.tif", SELECTIONS.get(name, Selection()), MAX_READ_BYTES)
        if name in CROPS:
            volume = Volume.from_array(volume.read_all()[:, *CROPS[name]], volume.voxel_size)
        option = None if diameter is None else Diameter.parse(diameter)
        return segment(get_runner("nuclei"), volume, Options(diameter=option))

    return segment_stack


def read(path: Path) -> Volume:
    return stack_reader.read(path, Selection(), MAX_READ_BYTES)


def test_nuclei_is_the_default_of_the_bundled_models(specs: dict[str, ModelSpec]) -> None:
    assert tuple(specs) == BUNDLED_NAMES
    assert select_model(specs, None, None) == specs["nuclei"]
    assert specs["nuclei"].input.voxel_size is None


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_bundled_model_is_small_and_documents_its_scores(specs: dict[str, ModelSpec], name: str) -> None:
    spec = specs[name]
    assert spec.decoding.kind == ("classes" if name == "tissue" else "instances")
    assert spec.weights_path.stat().st_size < (4 if name == "tissue" else 10) * 2**20
    assert "classical" in (spec.folder / "README.md").read_text(encoding="utf-8")


def test_expected_labels_of_tissue_samples_agree_with_the_ground_truth(specs: dict[str, ModelSpec]) -> None:
    """The expected labels are the output of the models for these synthetic samples."""
    _, truth = synthesize_tissue(np.random.default_rng(SEED), (64, 128, 128), TISSUE_PARAMETERS)
    expected = {name: read(specs[name].folder / "expected.tif").read_all()[0] for name in ("membranes", "tissue")}
    scores = score(truth, expected["membranes"])
    assert scores.f1 > 0.8
    assert np.mean(expected["membranes"][truth == 0] > 0) < 0.02
    assert min(compute_dice(labels_to_classes(truth), expected["tissue"])) > 0.7


@pytest.mark.skipif(not REAL_STACKS.is_dir(), reason=f"there are no real stacks in {REAL_STACKS}")
def test_membranes_finds_the_cells_of_an_embryo(get_runner: GetRunner) -> None:
    """The test uses half of a stack in which the classical method finds no cells."""
    folder = REAL_STACKS / "celegans_membrane_t046"
    image, truth = (read(folder / name).read_all()[..., 178:] for name in ("image.tif", "mask.tif"))
    result = segment(get_runner("membranes"), Volume.from_array(image), Options(diameter=Diameter.parse("28,69,64px")))
    labels = result.segmentation.pixels
    assert score(truth[0], labels).f1 > 0.7
    assert np.mean(labels[truth[0] == 0] > 0) < 0.08


@pytest.mark.skipif(not REAL_STACKS.is_dir(), reason=f"there are no real stacks in {REAL_STACKS}")
def test_embryos_finds_the_nuclei_of_an_unseen_embryo(get_runner: GetRunner) -> None:
    folder = REAL_STACKS / "mouse_embryo_8cell"
    segmentation = segment(get_runner("embryos"), read(folder / "image.tif"), Options()).segmentation
    scores = score(read(folder / "mask.tif").read_all()[0], segmentation.pixels)
    assert (scores.found, scores.splits, scores.merges) == (8, 0, 0)
    assert scores.f1 > 0.85


@pytest.mark.parametrize("name", ["embryos", "membranes", "nuclei"])
@pytest.mark.parametrize(
    "size",
    [
        (16, 16, 16),
        (64, 20, 20),
        pytest.param((32, 32, 32), marks=pytest.mark.thorough),
        pytest.param((17, 46, 9), marks=pytest.mark.thorough),
    ],
)
def test_small_stacks_without_objects_cause_a_warning(
    get_runner: GetRunner, name: str, size: tuple[int, int, int]
) -> None:
    """Within zeros, a stack that is smaller than a window would look like one object."""
    rng = np.random.default_rng(17)
    ramp = np.linspace(0, 1000, size[2]) + rng.normal(0, 30, size)
    for image in (rng.poisson(20, size), ramp):
        result = segment(get_runner(name), Volume.from_array(image[None].astype(np.float32)), Options())
        assert result.quality_warning is not None, result.confidence
        assert (result.confidence or 0.0) <= 0.5


@pytest.mark.parametrize("name", ["embryos", "membranes", "nuclei"])
def test_calibrated_confidence_is_low_for_other_objects(get_runner: GetRunner, name: str) -> None:
    """The expected F1 of a stack that the model is made for is close to F1. Other objects cause a warning."""
    runner = get_runner(name)
    assert runner.spec.confidence is not None
    assert runner.spec.confidence.objects is not None
    rng, shape = np.random.default_rng(8), (48, 64, 64)
    stacks = {
        "nuclei": synthesize(rng, shape, TYPICAL_NUCLEI),
        "membranes": synthesize_tissue(rng, shape, replace(TYPICAL_TISSUE, diameter=24)),
    }
    image, truth = stacks.pop("membranes" if name == "membranes" else "nuclei")
    ((other, _),) = stacks.values()
    good, bad = (segment(runner, Volume.from_array(stack[None]), Options()) for stack in (image, other))
    assert good.confidence == pytest.approx(score(truth, good.segmentation.pixels).f1, abs=0.25)
    assert good.quality_warning is None
    assert bad.quality_warning is not None


def test_bfloat16_is_within_the_tuning_tolerance(nuclei: ModelSpec) -> None:
    """Emulate BF16 units: weights, inputs and outputs of convolutions are rounded, and sums are in float32."""
    network = prepare(load_network(nuclei), CPU, torch.float32, torch.channels_last_3d)
    for layer in network.modules():
        if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
            layer.weight.data = round_to_bfloat16(layer.weight.data)
            layer.register_forward_pre_hook(lambda _layer, inputs: round_to_bfloat16(inputs[0]))
            layer.register_forward_hook(lambda _layer, _inputs, output: round_to_bfloat16(output))
    agreement = LabelAgreement(nuclei, CPU, lambda: make_sliding_window(nuclei, load_network(nuclei)))
    assert (
        0
        < agreement.compute_difference(make_sliding_window(nuclei, network))
        <= read_settings(None, {}).engine.tolerance
    )


def round_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round values to BF16 precision, and return them as float32."""
    return values.bfloat16().float()


def make_sliding_window(spec: ModelSpec, network: Network) -> SlidingWindow:
    return SlidingWindow(
        network,
        spec.input.channels,
        spec.input.roi_size,
        2,
        blending=Blending("gaussian", 0.125),
        device=CPU,
        dtype=torch.float32,
        memory_format=torch.channels_last_3d,
    )


@pytest.mark.skipif(not REAL_STACKS.is_dir(), reason=f"there are no real stacks in {REAL_STACKS}")
@pytest.mark.parametrize(
    ("stack", "diameter", "min_f1"),
    [
        ("mouse_embryo_8cell", None, 0.75),
        pytest.param("mouse_embryo_8cell", "15.6px", 0.75, marks=pytest.mark.thorough),
        pytest.param("arabidopsis_ovule_nuclei_1135", "17.7px", 0.75, marks=pytest.mark.thorough),
        pytest.param("synthetic_nuclei_stardist", "11.1px", 0.9, marks=pytest.mark.thorough),
        ("synthetic_nuclei_stardist", None, 0.85),
        ("synthetic_nuclei_stardist", "7,15,14px", 0.9),
    ],
)
def test_nuclei_is_better_than_the_classical_method(
    segment_real_stack: SegmentRealStack, stack: str, diameter: str | None, min_f1: float
) -> None:
    """With the true diameter and settings tuned for each stack, the classical method scores 0.75, 0.64 and 0.74."""
    truth, labels = read(REAL_STACKS / stack / "mask.tif"), segment_real_stack(stack, diameter).segmentation.pixels
    assert labels.shape == truth.shape[1:]
    assert score(truth.read_all()[0], labels).f1 >= min_f1


@pytest.mark.skipif(not REAL_STACKS.is_dir(), reason=f"there are no real stacks in {REAL_STACKS}")
@pytest.mark.parametrize(
    "stack", ["synthetic_nuclei_stardist", "mouse_embryo_8cell", "drosophila_nuclear_envelope", *SELECTIONS]
)
def test_good_results_of_real_stacks_have_no_warning(segment_real_stack: SegmentRealStack, stack: str) -> None:
    """A manual review of the labels found no reason for a warning."""
    assert segment_real_stack(stack, None).quality_warning is None


def test_diameter_of_small_nuclei_is_estimated(get_runner: GetRunner) -> None:
    """At ten voxels, half of the model's diameter, fewer nuclei are found without resampling, and less accurately."""
    image, truth = synthesize(np.random.default_rng(3), (32, 64, 64), SMALL_NUCLEI)
    volume = Volume.from_array(image[None])
    scores = {}
    for diameter in (None, "none", "10px"):
        result = segment(
            get_runner("nuclei"), volume, Options(diameter=None if diameter is None else parse_diameter(diameter))
        )
        scores[diameter] = score(truth, result.segmentation.pixels)
        assert result.is_diameter_estimated == (diameter is None)
    assert scores[None].found == pytest.approx(scores["10px"].found, rel=0.05)
    assert scores[None].f1 >= scores["10px"].f1 - 0.05
    assert scores[None].found > scores["none"].found
    assert scores[None].f1_strict >= scores["none"].f1_strict + 0.04
