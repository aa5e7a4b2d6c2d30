"""Fit the confidence of a bundled model to good and bad segmentations.

    python -m scripts.recipes.confidence nuclei [FOLDER]

The command prints the section `confidence` for the `model.yaml` of the model, and how well the fitted confidence
separates good results from bad ones.

The fit uses synthetic stacks: objects of the model (also blurred, with noise, or segmented with a wrong diameter),
objects of the other model, and noise. It also uses the recorded stacks in FOLDER. Each one is in a subfolder with
`image.tif` and, if the objects are known, `mask.tif`.

A result is good if its F1 at an IoU of 0.5 is at least `GOOD_F1`, and bad if it is at most `BAD_F1`. Results in between
are not used. Results without a mask of the objects of the model were assessed visually (`VISUAL_ASSESSMENTS`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import find_objects, gaussian_filter

from scripts.recipes.synthetic_nuclei import Scene, synthesize
from scripts.recipes.synthetic_tissue import Tissue, synthesize_tissue
from service.core.config import Settings
from service.core.files.bundled import get_bundled_folder
from service.core.quantities import Diameter, DiameterSetting, Size
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.diameter.confidence import Features
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import read_spec
from service.training.evaluate import score

GOOD_F1 = 0.6
BAD_F1 = 0.45
# For each model and recorded stack: whether the labels of a request without options look right. None: compare with the
# mask.
VISUAL_ASSESSMENTS: dict[str, dict[str, bool | None]] = {
    "embryos": {
        "arabidopsis_ovule_nuclei_1135": None,
        "mouse_embryo_8cell": None,
        "synthetic_nuclei_stardist": None,
    },
    "nuclei": {
        "arabidopsis_lateral_root_nuclei": True,
        "arabidopsis_ovule_nuclei_1135": None,
        "celegans_membrane_t046": False,
        "drosophila_nuclear_envelope": False,
        "fluorescent_beads_imagexpress": True,
        "mesospim_brain_nuclei_c5": False,
        "mouse_brain_s2p_large": False,
        "mouse_embryo_8cell": None,
        "single_nucleus_confocal_vs_widefield": True,
        "synthetic_nuclei_stardist": None,
    },
    "membranes": {
        "arabidopsis_lateral_root_nuclei": False,
        "arabidopsis_ovule_nuclei_1135": False,
        "celegans_membrane_t046": None,
        "fluorescent_beads_imagexpress": False,
        "mesospim_brain_nuclei_c5": False,
        "mouse_embryo_8cell": False,
        "single_nucleus_confocal_vs_widefield": False,
        "synthetic_nuclei_stardist": False,
    },
}
# Parameters for files with ambiguous axes or several channels.
SELECTIONS = {
    "mesospim_brain_nuclei_c5": Selection(axes="ZYX"),
    "single_nucleus_confocal_vs_widefield": Selection(channel=0),
    "synthetic_nuclei_stardist": Selection(axes="ZYX"),
}
# Numbers of synthetic stacks: with objects of the model, with objects of another model, and with noise only.
OWN_STACKS = 28
FOREIGN_STACKS = 14
NOISE_STACKS = 10
# Minimum object diameter in requests with a diameter that is too small. Smaller diameters would enlarge the stack so
# much that segmentation takes too long.
MIN_DIAMETER_VOXELS = {"nuclei": 8.0, "embryos": 8.0, "membranes": 12.8}
MAX_PIXEL_BYTES = 2**31
# Strength of the L2 regularization in the fit.
RIDGE_PENALTY = 1.0

Array = NDArray[Any]
Floats = NDArray[np.float64]
# Object diameters along (z, y, x), in voxels.
Diameters = tuple[float, float, float]


class Case(NamedTuple):
    """One segmentation to run.

    stack       name of the stack
    condition   how the stack or the request was modified
    volume      pixels [1, Z, Y, X]
    truth       true labels [Z, Y, X], or a visual assessment: whether the result is good
    diameter    object diameter in the request; None for the default of the model
    """

    stack: str
    condition: str
    volume: Volume
    truth: Array | bool
    diameter: DiameterSetting | None = None


class Sample(NamedTuple):
    """A result for the fit: its features, and whether it is good."""

    stack: str
    condition: str
    features: Features
    good: bool


def make_nuclei(seed: int) -> tuple[Case, Diameters]:
    """Return a synthetic stack of nuclei and their diameters."""
    rng = np.random.default_rng(9000 + seed)
    scene = Scene.draw(rng)
    side = int(np.clip(2.6 * scene.diameter, 52, 76))
    image, truth = synthesize(rng, (max(16, int(side / max(1, scene.anisotropy / 1.3))), side, side), scene)
    return Case(f"nuclei {seed}", "default", _to_volume(image), truth), (scene.diameter,) * 3


def make_membranes(seed: int) -> tuple[Case, Diameters]:
    """Return a synthetic stack of cells with stained membranes and their diameters."""
    rng = np.random.default_rng(7000 + seed)
    tissue = Tissue.draw(rng)
    side = int(np.clip(2.6 * tissue.diameter, 56, 80))
    image, truth = synthesize_tissue(rng, (max(20, int(side / tissue.flatness)), side, side), tissue)
    return Case(f"membranes {seed}", "default", _to_volume(image), truth), (
        tissue.diameter / tissue.flatness,
        tissue.diameter,
        tissue.diameter,
    )


def make_variants(case: Case, diameters: Diameters, seed: int, model: str) -> Iterator[Case]:
    """Yield three variants of a case: unchanged, with another diameter setting, and with one kind of degradation.

    The degradation depends on `seed`: blur, noise, or a wrong object diameter in the request.
    """
    has_estimate = model != "membranes"
    yield case
    yield (
        case._replace(condition="original resolution", diameter="none")
        if has_estimate
        else case._replace(condition="known diameter", diameter=Diameter(diameters, "px"))
    )
    image = case.volume.read_all()[0].astype(np.float32)
    match seed % 4:
        case 0:
            yield case._replace(condition="blurred", volume=_to_volume(gaussian_filter(image, diameters[1] / 4)))
        case 1:
            yield case._replace(condition="diameter too large", diameter=_scale_diameters(diameters, 3.0))
        case 2:
            noise = np.random.default_rng(seed).normal(0, 2 * image.std(), image.shape)
            yield case._replace(condition="noisy", volume=_to_volume((image + noise).astype(np.float32)))
        case _:
            factor = max(0.4, MIN_DIAMETER_VOXELS[model] / min(diameters))
            yield case._replace(condition="diameter too small", diameter=_scale_diameters(diameters, factor))


def make_synthetic_cases(model: str) -> Iterator[Case]:
    """Yield the synthetic cases for a model: variants of its own objects, objects of the other model, and noise."""
    own, foreign = (make_membranes, make_nuclei) if model == "membranes" else (make_nuclei, make_membranes)
    for seed in range(OWN_STACKS):
        yield from make_variants(*own(seed), seed, model)
    for seed in range(FOREIGN_STACKS):
        # The model was not trained for these objects, so every segmentation of them counts as bad.
        yield foreign(seed)[0]._replace(truth=False)
    for seed in range(NOISE_STACKS):
        yield make_noise(seed)


def make_noise(seed: int, shape: Size = (40, 72, 72)) -> Case:
    """Return a stack of random texture without objects. The seed selects one of four grain sizes."""
    rng = np.random.default_rng(5000 + seed)
    grain = gaussian_filter(rng.normal(0, 1, shape), (0.5, 0.8, 1.5, 3)[seed % 4])
    light = np.exp(1.2 * grain / grain.std()) if seed % 3 else grain - grain.min()
    image = rng.poisson(100 * light / light.max()).astype(np.uint16)
    return Case(f"noise {seed}", "default", _to_volume(image), truth=False)


def read_recorded_cases(folder: Path, model: str, scratch: Path) -> Iterator[Case]:
    """Yield the recorded stacks in a folder, and variants of those that have a mask of the objects of the model."""
    for seed, (name, is_good) in enumerate(sorted(VISUAL_ASSESSMENTS[model].items())):
        path = folder / name / "image.tif"
        if not path.exists():
            continue
        volume = stack_reader.read(path, SELECTIONS.get(name, Selection()), MAX_PIXEL_BYTES, scratch)
        if is_good is not None:
            yield Case(name, "default", volume, is_good)
            continue
        mask = path.with_name("mask.tif")
        truth = stack_reader.read(mask, Selection(axes="ZYX"), MAX_PIXEL_BYTES, scratch).read_all()[0]
        yield from make_variants(Case(name, "default", volume, truth), _median_extents(truth), seed, model)


def _scale_diameters(diameters: Diameters, factor: float) -> Diameter:
    z, y, x = (factor * diameter for diameter in diameters)
    return Diameter((z, y, x), "px")


def _median_extents(truth: Array) -> Diameters:
    """Return the median extents (z, y, x) of the labeled objects, in voxels."""
    boxes = [box for box in find_objects(truth) if box is not None]
    z, y, x = (float(np.median([box[axis].stop - box[axis].start for box in boxes])) for axis in range(3))
    return z, y, x


def classify_f1(f1: float) -> str:
    """Return the quality of a result with this F1 at an IoU of 0.5: good, fair or bad."""
    return "good" if f1 >= GOOD_F1 else "bad" if f1 <= BAD_F1 else "fair"


def collect_samples(runner: ModelRunner, cases: Iterator[Case]) -> Iterator[Sample]:
    """Segment the stacks; yield the results that contain objects and are clearly good or bad."""
    model_diameter = runner.spec.input.diameter
    assert model_diameter is not None  # noqa: S101 - all models with a confidence have a diameter
    for case in cases:
        segmentation = segment(runner, case.volume, Options(diameter=case.diameter)).segmentation
        if not segmentation.objects:
            continue
        if isinstance(case.truth, bool):
            good, note = case.truth, ""
        else:
            f1 = score(case.truth, segmentation.pixels).f1
            quality = classify_f1(f1)
            if quality == "fair":
                continue
            good, note = quality == "good", f" (F1 {f1:.2f})"
        sample = Sample(case.stack, case.condition, Features.measure(segmentation.objects, model_diameter), good)
        sys.stderr.write(f"{case.stack}, {case.condition}: {'good' if good else 'bad'}{note} {sample.features}\n")
        yield sample


def fit_confidence(samples: list[Sample]) -> Floats:
    """Return the intercept and the weights of a ridge-regularized logistic regression.

    All stacks have the same total weight, regardless of their number of samples.
    """
    features, good = _columns(samples)
    stacks = [sample.stack for sample in samples]
    weight = np.array([1 / stacks.count(stack) for stack in stacks]) * len(stacks) / len(set(stacks))
    mean, spread = features.mean(0), features.std(0) + 1e-9
    design = np.column_stack([np.ones(len(good)), (features - mean) / spread])
    penalty = RIDGE_PENALTY * np.diag([0.0] + [1.0] * features.shape[1])
    coefficients = np.zeros(design.shape[1])
    for _ in range(50):
        probability = _logistic(design @ coefficients)
        hessian = design.T * (weight * probability * (1 - probability)) @ design + penalty
        coefficients += np.linalg.solve(hessian, design.T @ (weight * (good - probability)) - penalty @ coefficients)
    slopes = coefficients[1:] / spread
    return np.append(coefficients[0] - slopes @ mean, slopes)


def predict(samples: list[Sample], coefficients: Floats) -> Floats:
    """Return the confidence in each sample according to the fitted coefficients (intercept first)."""
    return _logistic(coefficients[0] + _columns(samples)[0] @ coefficients[1:])


def cross_validate(samples: list[Sample]) -> Floats:
    """Return the confidence in each sample, predicted by a fit to all other stacks."""
    confidences = np.zeros(len(samples))
    for stack in {sample.stack for sample in samples}:
        inside = [index for index, sample in enumerate(samples) if sample.stack == stack]
        coefficients = fit_confidence([sample for sample in samples if sample.stack != stack])
        confidences[inside] = predict([samples[index] for index in inside], coefficients)
    return confidences


def area_under_curve(confidences: Floats, good: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: how often a good result has a higher confidence than a bad one."""
    difference = np.subtract.outer(confidences[good], confidences[~good])
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))


def report(samples: list[Sample]) -> Iterator[str]:
    """Yield the coefficients, the areas under the ROC curve, and a table of warnings by threshold."""
    _, good = _columns(samples)
    confidences = cross_validate(samples)
    yield "confidence:"
    for name, value in zip(("intercept", *Features._fields), fit_confidence(samples), strict=True):
        yield f"  {name}: {value:.2f}"
    groups = {"all": np.ones(len(good), bool)}
    groups["synthetic"] = np.array([sample.stack.split()[0] in {"nuclei", "membranes", "noise"} for sample in samples])
    groups["recorded"] = ~groups["synthetic"]
    for name, inside in groups.items():
        stacks = len({sample.stack for sample, is_member in zip(samples, inside, strict=True) if is_member})
        if good[inside].any() and not good[inside].all():
            area = area_under_curve(confidences[inside], good[inside])
            counts = f"{good[inside].sum()} good and {(~good[inside]).sum()} bad results on {stacks} stacks"
            yield f"{name}: {counts}, area under the ROC curve {area:.3f} in leave-one-stack-out cross-validation"
    yield "| threshold | bad results with a warning | good results with a warning |\n|---|---|---|"
    for threshold in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        has_warning = confidences < threshold
        yield f"| {threshold} | {100 * has_warning[~good].mean():.0f} % | {100 * has_warning[good].mean():.0f} % |"


def _columns(samples: list[Sample]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the features [samples, features] and whether each sample is good [samples]."""
    return np.array([sample.features for sample in samples]), np.array([sample.good for sample in samples])


def _logistic(values: Floats) -> Floats:
    probabilities: Floats = 1 / (1 + np.exp(-np.clip(values, -50, 50)))
    return probabilities


def _to_volume(image: Array) -> Volume:
    return Volume.from_array(image[None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(VISUAL_ASSESSMENTS))
    parser.add_argument("folder", type=Path, nargs="?", help="folder of recorded stacks")
    options = parser.parse_args()
    runner = ModelRunner(read_spec(get_bundled_folder("models") / options.model), Settings())
    runner.warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        cases = [make_synthetic_cases(options.model)]
        if options.folder is not None:
            cases.append(read_recorded_cases(options.folder, options.model, Path(scratch)))
        samples = list(collect_samples(runner, itertools.chain(*cases)))
    sys.stdout.writelines(f"{line}\n" for line in report(samples))


if __name__ == "__main__":
    main()
