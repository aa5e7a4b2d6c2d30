"""Fit the `confidence` of the bundled model `nuclei` or `membranes` to good and bad results, and print what to paste.

    python -m scripts.recipes.confidence nuclei [FOLDER]

prints the section `confidence` of the model's file, and for its README how well that tells good results from bad ones.
Stacks are synthetic (what the model is for, sharp and blurred, at its width and at wrong ones, what the other model is
for, and noise) and those recorded ones that lie in FOLDER, each in a subfolder with `image.tif` and, where objects are
known, `mask.tif`. A result is good where its F1 at an IoU of 0.5 is above `GOOD`, bad below `BAD`, and left out
between; without a mask, and where the mask is of what the model is not for, the eye has judged.
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

from scripts.recipes.synthetic_nuclei import Scene, synthesise
from scripts.recipes.synthetic_tissue import Tissue, synthesise_tissue
from service.core.config import Settings
from service.core.files.bundled import bundled_folder
from service.core.quantities import Diameter, DiameterSetting, Size
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.diameter.confidence import Features
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import read_spec
from service.training.evaluate import score

GOOD, BAD = 0.6, 0.45
# Of recorded stacks by the model: whether labels of the default request look right; None where a mask tells.
JUDGED: dict[str, dict[str, bool | None]] = {
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
# What their files leave open.
SELECTIONS = {
    "mesospim_brain_nuclei_c5": Selection(axes="ZYX"),
    "single_nucleus_confocal_vs_widefield": Selection(channel=0),
    "synthetic_nuclei_stardist": Selection(axes="ZYX"),
}
SCENES, FOREIGN, NOISES = 28, 14, 10
# Narrower objects are not stated: it takes long to look at a stack that is enlarged so much.
LEAST_WIDTH = {"nuclei": 8.0, "embryos": 8.0, "membranes": 12.8}
LARGEST_BYTES = 2**31
RIDGE = 1.0

Array = NDArray[Any]
Floats = NDArray[np.float64]
# Along (z, y, x), in voxels.
Widths = tuple[float, float, float]


class Case(NamedTuple):
    """A stack [1, Z, Y, X] as it is segmented; `truth` [Z, Y, X], or whether the result is good. `stack` names it."""

    stack: str
    how: str
    volume: Volume
    truth: Array | bool
    diameter: DiameterSetting | None = None


class Sample(NamedTuple):
    """Features of a result, and whether it is good."""

    stack: str
    how: str
    features: Features
    good: bool


def nuclei(seed: int) -> tuple[Case, Widths]:
    """Return one synthetic stack of nuclei, and how wide these are."""
    rng = np.random.default_rng(9000 + seed)
    scene = Scene.draw(rng)
    side = int(np.clip(2.6 * scene.diameter, 52, 76))
    image, truth = synthesise(rng, (max(16, int(side / max(1, scene.anisotropy / 1.3))), side, side), scene)
    return Case(f"nuclei {seed}", "default", _volume(image), truth), (scene.diameter,) * 3


def membranes(seed: int) -> tuple[Case, Widths]:
    """Return one synthetic stack of membranes, and how wide its cells are."""
    rng = np.random.default_rng(7000 + seed)
    tissue = Tissue.draw(rng)
    side = int(np.clip(2.6 * tissue.diameter, 56, 80))
    image, truth = synthesise_tissue(rng, (max(20, int(side / tissue.flatness)), side, side), tissue)
    return Case(f"membranes {seed}", "default", _volume(image), truth), (
        tissue.diameter / tissue.flatness,
        tissue.diameter,
        tissue.diameter,
    )


def variants(case: Case, widths: Widths, seed: int, model: str) -> Iterator[Case]:
    """Yield a stack as it is, with a diameter that is not the default, and blurred, in noise or told a wrong width."""
    estimated = model != "membranes"
    yield case
    yield (
        case._replace(how="as sampled", diameter="none")
        if estimated
        else case._replace(how="told", diameter=Diameter(widths, "px"))
    )
    image = case.volume.array()[0].astype(np.float32)
    match seed % 4:
        case 0:
            yield case._replace(how="blurred", volume=_volume(gaussian_filter(image, widths[1] / 4)))
        case 1:
            yield case._replace(how="too wide", diameter=_scaled(widths, 3.0))
        case 2:
            noise = np.random.default_rng(seed).normal(0, 2 * image.std(), image.shape)
            yield case._replace(how="in noise", volume=_volume((image + noise).astype(np.float32)))
        case _:
            yield case._replace(how="too narrow", diameter=_scaled(widths, max(0.4, LEAST_WIDTH[model] / min(widths))))


def synthetic(model: str) -> Iterator[Case]:
    """Yield the synthetic stacks for a model: in several ways what it is for, and what it is not for as it is."""
    known, foreign = (membranes, nuclei) if model == "membranes" else (nuclei, membranes)
    for seed in range(SCENES):
        yield from variants(*known(seed), seed, model)
    for seed in range(FOREIGN):
        # Its objects are not those that the model is for, so that none of its labels are right.
        yield foreign(seed)[0]._replace(truth=False)
    for seed in range(NOISES):
        yield noise(seed)


def noise(seed: int, shape: Size = (40, 72, 72)) -> Case:
    """Return grain, as coarse as one of several kinds of texture, in which nothing is to be found."""
    rng = np.random.default_rng(5000 + seed)
    grain = gaussian_filter(rng.normal(0, 1, shape), (0.5, 0.8, 1.5, 3)[seed % 4])
    light = np.exp(1.2 * grain / grain.std()) if seed % 3 else grain - grain.min()
    image = rng.poisson(100 * light / light.max()).astype(np.uint16)
    return Case(f"noise {seed}", "default", _volume(image), truth=False)


def recorded(folder: Path, model: str, scratch: Path) -> Iterator[Case]:
    """Yield the stacks of a folder, those with masks of what the model is for in several ways."""
    for seed, (name, judged) in enumerate(sorted(JUDGED[model].items())):
        path = folder / name / "image.tif"
        if not path.exists():
            continue
        volume = stack_reader.read(path, SELECTIONS.get(name, Selection()), LARGEST_BYTES, scratch)
        if judged is not None:
            yield Case(name, "default", volume, judged)
            continue
        truth = stack_reader.read(path.with_name("mask.tif"), Selection(axes="ZYX"), LARGEST_BYTES, scratch).array()[0]
        yield from variants(Case(name, "default", volume, truth), _extents(truth), seed, model)


def _scaled(widths: Widths, factor: float) -> Diameter:
    z, y, x = (factor * width for width in widths)
    return Diameter((z, y, x), "px")


def _extents(truth: Array) -> Widths:
    """Return the median extents (z, y, x) of labelled objects."""
    boxes = [box for box in find_objects(truth) if box is not None]
    z, y, x = (float(np.median([box[axis].stop - box[axis].start for box in boxes])) for axis in range(3))
    return z, y, x


def kind_of(f1: float) -> str:
    """Return what a result with this F1 at an IoU of 0.5 is called: good, bad or fair."""
    return "good" if f1 >= GOOD else "bad" if f1 <= BAD else "fair"


def collect(runner: ModelRunner, cases: Iterator[Case]) -> Iterator[Sample]:
    """Segment the stacks; yield what is clearly good or bad and found anything."""
    wanted = runner.spec.input.diameter
    assert wanted is not None  # noqa: S101 - that of nuclei is
    for case in cases:
        found = segment(runner, case.volume, Options(diameter=case.diameter)).segmentation
        if not found.objects:
            continue
        if isinstance(case.truth, bool):
            good, f1 = case.truth, ""
        else:
            reached = score(case.truth, found.pixels).f1
            kind = kind_of(reached)
            if kind == "fair":
                continue
            good, f1 = kind == "good", f" (F1 {reached:.2f})"
        sample = Sample(case.stack, case.how, Features.measure(found.objects, wanted), good)
        sys.stderr.write(f"{case.stack}, {case.how}: {'good' if good else 'bad'}{f1} {sample.features}\n")
        yield sample


def fit(samples: list[Sample]) -> Floats:
    """Return the intercept and the weights of a logistic regression with a ridge; every stack counts the same."""
    features, good = _columns(samples)
    stacks = [sample.stack for sample in samples]
    weight = np.array([1 / stacks.count(stack) for stack in stacks]) * len(stacks) / len(set(stacks))
    mean, spread = features.mean(0), features.std(0) + 1e-9
    design = np.column_stack([np.ones(len(good)), (features - mean) / spread])
    ridge = RIDGE * np.diag([0.0] + [1.0] * features.shape[1])
    found = np.zeros(design.shape[1])
    for _ in range(50):
        probability = _logistic(design @ found)
        curvature = design.T * (weight * probability * (1 - probability)) @ design + ridge
        found += np.linalg.solve(curvature, design.T @ (weight * (good - probability)) - ridge @ found)
    slopes = found[1:] / spread
    return np.append(found[0] - slopes @ mean, slopes)


def confidences(samples: list[Sample], found: Floats) -> Floats:
    """Return the confidence in each sample by a regression that was fitted."""
    return _logistic(found[0] + _columns(samples)[0] @ found[1:])


def left_out(samples: list[Sample]) -> Floats:
    """Return the confidence in each sample by the fit to all other stacks."""
    judged = np.zeros(len(samples))
    for stack in {sample.stack for sample in samples}:
        inside = [index for index, sample in enumerate(samples) if sample.stack == stack]
        others = fit([sample for sample in samples if sample.stack != stack])
        judged[inside] = confidences([samples[index] for index in inside], others)
    return judged


def area_under_curve(judged: Floats, good: NDArray[np.bool_]) -> float:
    """Return the area under the ROC: how often a good result is judged better than a bad one."""
    above = np.subtract.outer(judged[good], judged[~good])
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def report(samples: list[Sample]) -> Iterator[str]:
    """Yield the coefficients, the areas under the ROC, and its points."""
    _, good = _columns(samples)
    judged = left_out(samples)
    yield "confidence:"
    for name, value in zip(("intercept", *Features._fields), fit(samples), strict=True):
        yield f"  {name}: {value:.2f}"
    groups = {"all": np.ones(len(good), bool)}
    groups["synthetic"] = np.array([sample.stack.split()[0] in {"nuclei", "membranes", "noise"} for sample in samples])
    groups["recorded"] = ~groups["synthetic"]
    for name, inside in groups.items():
        stacks = len({sample.stack for sample, each in zip(samples, inside, strict=True) if each})
        if good[inside].any() and not good[inside].all():
            area = area_under_curve(judged[inside], good[inside])
            counts = f"{good[inside].sum()} good and {(~good[inside]).sum()} bad results on {stacks} stacks"
            yield f"{name}: {counts}, area under the ROC {area:.3f}, each stack left out of the fit"
    yield "| threshold | bad results with a warning | good results with one |\n|---|---|---|"
    for threshold in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        warned = judged < threshold
        yield f"| {threshold} | {100 * warned[~good].mean():.0f} % | {100 * warned[good].mean():.0f} % |"


def _columns(samples: list[Sample]) -> tuple[Floats, NDArray[np.bool_]]:
    return np.array([sample.features for sample in samples]), np.array([sample.good for sample in samples])


def _logistic(values: Floats) -> Floats:
    squashed: Floats = 1 / (1 + np.exp(-np.clip(values, -50, 50)))
    return squashed


def _volume(image: Array) -> Volume:
    return Volume.from_array(image[None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(JUDGED))
    parser.add_argument("folder", type=Path, nargs="?", help="recorded stacks")
    options = parser.parse_args()
    runner = ModelRunner(read_spec(bundled_folder("models") / options.model), Settings())
    runner.warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        cases = [synthetic(options.model)]
        if options.folder is not None:
            cases.append(recorded(options.folder, options.model, Path(scratch)))
        samples = list(collect(runner, itertools.chain(*cases)))
    sys.stdout.writelines(f"{line}\n" for line in report(samples))


if __name__ == "__main__":
    main()
