"""Fit the `confidence` of the bundled model `nuclei` to good and bad results, and print how well it tells them apart.

    python -m scripts.recipes.confidence [FOLDER]

Stacks are synthetic (nuclei sharp and blurred, at their width and at wrong ones, membranes, noise) and those recorded
ones that lie in FOLDER, each in a subfolder with `image.tif` and, where objects are known, `mask.tif`. A result is good
where its F1 at an IoU of 0.5 is above `GOOD`, bad below `BAD`, and left out between; without a mask the eye has judged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from scripts.recipes.synthetic_nuclei import Scene, synthesise
from scripts.recipes.synthetic_tissue import Tissue, synthesise_tissue
from service.core.bundled import bundled_folder
from service.core.config import Settings
from service.core.volume import Diameter, DiameterSetting, Options, Selection, Size, Volume
from service.formats import tiff_reader
from service.inference.confidence import Features
from service.inference.segmenter import Segmenter
from service.models.repository import read_spec
from service.training.evaluate import score

GOOD, BAD = 0.6, 0.45
# Of recorded stacks without a mask: whether labels of the default request look right.
JUDGED = {
    "arabidopsis_lateral_root_nuclei": True,
    "drosophila_nuclear_envelope": False,
    "fluorescent_beads_imagexpress": True,
    "mesospim_brain_nuclei_c5": False,
    "mouse_brain_s2p_large": False,
    "single_nucleus_confocal_vs_widefield": True,
}
# What their files leave open.
SELECTIONS = {
    "mesospim_brain_nuclei_c5": Selection(axes="ZYX"),
    "single_nucleus_confocal_vs_widefield": Selection(channel=0),
    "synthetic_nuclei_stardist": Selection(axes="ZYX"),
}
SCENES, TISSUES, NOISES = 40, 20, 12
LARGEST_BYTES = 2**31
RIDGE = 1.0

Array = NDArray[Any]
Floats = NDArray[np.float64]


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


def nuclei(seed: int) -> Iterator[Case]:
    """Yield one synthetic stack of nuclei, segmented in several ways."""
    rng = np.random.default_rng(9000 + seed)
    scene = Scene.draw(rng)
    side = int(np.clip(2.6 * scene.diameter, 52, 76))
    image, truth = synthesise(rng, (max(16, int(side / max(1, scene.anisotropy / 1.3))), side, side), scene)
    yield from variants(f"nuclei {seed}", _volume(image), truth, scene.diameter, seed)


def variants(stack: str, volume: Volume, truth: Array, width: float, seed: int) -> Iterator[Case]:
    """Yield a stack as it is, and blurred, in noise or with a width that is not that of its objects by turns."""
    yield Case(stack, "default", volume, truth)
    image = volume.array()[0].astype(np.float32)
    match seed % 4:
        case 0:
            yield Case(stack, "blurred", _volume(gaussian_filter(image, width / 4)), truth)
        case 1:
            yield Case(stack, "too wide", volume, truth, Diameter((3 * width,), "px"))
        case 2:
            noise = np.random.default_rng(seed).normal(0, 2 * image.std(), image.shape)
            yield Case(stack, "in noise", _volume((image + noise).astype(np.float32)), truth)
        case _:
            yield Case(stack, "too narrow", volume, truth, Diameter((max(0.4 * width, 5.0),), "px"))
    yield Case(stack, "as sampled", volume, truth, "none")


def membranes(seed: int) -> Iterator[Case]:
    """Yield one synthetic stack of membranes."""
    rng = np.random.default_rng(7000 + seed)
    tissue = Tissue.draw(rng)
    side = int(np.clip(2.6 * tissue.diameter, 56, 80))
    image, truth = synthesise_tissue(rng, (max(20, int(side / tissue.flatness)), side, side), tissue)
    yield Case(f"membranes {seed}", "default", _volume(image), truth)


def noise(seed: int, shape: Size = (40, 72, 72)) -> Iterator[Case]:
    """Yield grain, as coarse as one of several kinds of texture, in which nothing is to be found."""
    rng = np.random.default_rng(5000 + seed)
    grain = gaussian_filter(rng.normal(0, 1, shape), (0.5, 0.8, 1.5, 3)[seed % 4])
    light = np.exp(1.2 * grain / grain.std()) if seed % 3 else grain - grain.min()
    image = rng.poisson(100 * light / light.max()).astype(np.uint16)
    yield Case(f"noise {seed}", "default", _volume(image), truth=False)


def recorded(folder: Path, scratch: Path) -> Iterator[Case]:
    """Yield the stacks of a folder, those with masks in several ways."""
    for seed, path in enumerate(sorted(folder.glob("*/image.tif"))):
        name = path.parent.name
        volume = tiff_reader.read(path, SELECTIONS.get(name, Selection()), LARGEST_BYTES, scratch)
        mask = path.with_name("mask.tif")
        if mask.exists():
            truth = tiff_reader.read(mask, Selection(axes="ZYX"), LARGEST_BYTES, scratch).array()[0]
            sizes = np.bincount(truth.ravel())[1:]
            yield from variants(name, volume, truth, float(np.cbrt(6 / np.pi * np.median(sizes[sizes > 0]))), seed)
        elif name in JUDGED:
            yield Case(name, "default", volume, JUDGED[name])


def collect(segmenter: Segmenter, cases: Iterator[Case]) -> Iterator[Sample]:
    """Segment the stacks; yield what is clearly good or bad and found anything."""
    wanted = segmenter.spec.input.diameter
    assert wanted is not None  # noqa: S101 - that of nuclei is
    for case in cases:
        found = segmenter.segment(case.volume, Options(diameter=case.diameter)).segmentation
        if not found.objects:
            continue
        if isinstance(case.truth, bool):
            good, f1 = case.truth, ""
        else:
            reached = score(case.truth, found.pixels).f1
            if BAD < reached < GOOD:
                continue
            good, f1 = reached >= GOOD, f" (F1 {reached:.2f})"
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
    yield "coefficients: " + ", ".join(
        f"{name} {value:.2f}" for name, value in zip(("intercept", *Features._fields), fit(samples), strict=True)
    )
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
    parser.add_argument("folder", type=Path, nargs="?", help="recorded stacks")
    folder = parser.parse_args().folder
    segmenter = Segmenter(read_spec(bundled_folder("models") / "nuclei"), Settings())
    segmenter.warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        cases: list[Iterator[Case]] = [
            *(nuclei(seed) for seed in range(SCENES)),
            *(membranes(seed) for seed in range(TISSUES)),
            *(noise(seed) for seed in range(NOISES)),
            *([recorded(folder, Path(scratch))] if folder else []),
        ]
        samples = [sample for case in cases for sample in collect(segmenter, case)]
    sys.stdout.writelines(f"{line}\n" for line in report(samples))


if __name__ == "__main__":
    main()
