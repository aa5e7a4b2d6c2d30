"""Fit the calibrated confidence of the objects of a model, and draw a reliability diagram.

    python -m scripts.recipes.calibration [FOLDER] [--model NAME] [--embryos FOLDER] [--tissues FOLDER]
        [--left-out FOLDER] [--samples FILE] [--diagram FILE]

The command segments stacks that the weights were not trained on, and determines which objects match a true object with
an intersection over union (IoU) above 0.5. It prints the section `confidence.objects` for the `model.yaml` of the
model, and the calibration error, computed by leave-one-stack-out cross-validation. All stacks of a group have the same
weight. Recorded stacks have the same total weight in the fit as synthetic ones.

FOLDER contains recorded stacks, each in a subfolder with `image.tif` and `mask.tif`. The synthetic stacks are those of
`scripts.recipes.trials` and others (see `scripts.recipes.calibration_cases`). Some stacks are also segmented with
diameters that are too small or too large.

--embryos   for models of nuclei: adds embryos in the test set of BBBC050 (see `scripts.recipes.held_out`), which are
            left out one by one with all of their stacks
--tissues   for `membranes`: adds the stacks of `scripts.recipes.tissues`
--left-out  for `nuclei`: adds the organoids `ORGANOIDS` in FOLDER. It names a folder with a model for each of them that
            was trained without it, under the name of the stack.
--samples   names a file for the objects. If it exists, it is read, and nothing is segmented.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scripts.recipes.calibration_cases import Case, Folders, make_cases, read_recorded_cases
from scripts.recipes.reliability import Reliability, bin_by_confidence, draw_diagram
from scripts.recipes.segmenters import start_segmenter
from service.core.types import Objects, Options
from service.inference.diameter.confidence import measure_object_features
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.spec import ModelSpec

# Recorded stacks that the weights of `nuclei` were trained on.
ORGANOIDS = ("cellos_organoid_egfp_d0_108", "cellos_organoid_hoechst_d4_120")
# Strength of the L2 regularization in the fit, and the number of Newton steps.
RIDGE_PENALTY = 1.0
NEWTON_STEPS = 50
# Mean number of objects of a stack that are independent of each other, which determines the weight of the data relative
# to the regularization.
EFFECTIVE_OBJECTS = 5.0
SIZE_COLUMN = 2

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


class Sample(NamedTuple):
    """The objects of a result [N], which of them match a true object, and the F1 of the result."""

    group: str
    stack: str
    condition: str
    objects: Objects
    matched: Booleans
    f1: float


def find_matches(truth: NDArray[Any], labels: NDArray[Any], count: int) -> Booleans:
    """Return which of the objects 1 to `count` of the labels match a true object with an IoU above 0.5 [count]."""
    values, true_indices = np.unique(truth, return_inverse=True)
    pairs = true_indices.ravel() * (count + 1) + labels.ravel().astype(np.int64)
    overlaps = np.bincount(pairs, minlength=len(values) * (count + 1)).reshape(len(values), count + 1)
    iou = overlaps / (overlaps.sum(1, keepdims=True) + overlaps.sum(0) - overlaps)
    return np.asarray((iou[values > 0, 1:] > 0.5).any(axis=0))


def collect_all_samples(runner: ModelRunner, options: argparse.Namespace) -> Iterator[Sample]:
    """Yield the samples of all stacks that the command line specifies."""
    folders = Folders(options.folder, options.embryos, options.tissues)
    yield from collect_samples(runner, make_cases(runner.spec.name, folders))
    for name in ORGANOIDS if options.left_out else ():
        left_out_runner = start_segmenter(str(options.left_out / name))
        yield from collect_samples(left_out_runner, read_recorded_cases(options.folder, [name]))


def collect_samples(runner: ModelRunner, cases: Iterable[Case]) -> Iterator[Sample]:
    """Segment the stacks; yield the results that contain objects. A stated diameter is used as stated."""
    for case in cases:
        options = Options(diameter=case.diameter, may_correct_diameter=False)
        segmentation = segment(runner, case.volume, options).segmentation
        if not segmentation.objects:
            continue
        count, num_true = len(segmentation.objects), 0
        matched = np.zeros(count, np.bool_)
        if case.truth is not None:
            matched = find_matches(case.truth, segmentation.pixels, count)
            num_true = len(np.unique(case.truth[case.truth > 0]))
        f1 = 2 * float(matched.sum()) / (count + num_true)
        sys.stderr.write(f"{case.stack}, {case.condition}: F1 {f1:.2f}, {matched.sum()} of {count} objects match\n")
        yield Sample(case.group, case.stack, case.condition, segmentation.objects, matched, f1)


class Design(NamedTuple):
    """Features of all objects [N, F], whether they match [N], their stacks and groups [N], and their weights [N]."""

    features: Floats
    matched: Booleans
    stacks: NDArray[np.str_]
    groups: NDArray[np.str_]
    weights: Floats

    @classmethod
    def of(cls, samples: Sequence[Sample], spec: ModelSpec) -> Design:
        """Return the design of a fit for a model."""
        diameter, calibration = spec.input.diameter, spec.confidence
        if diameter is None or calibration is None:
            raise ValueError(f"The model {spec.name} has no confidence.")
        counts = [len(sample.matched) for sample in samples]
        stacks = np.repeat([sample.stack for sample in samples], counts)
        sizes = dict(zip(*np.unique(stacks, return_counts=True), strict=True))
        features = np.concatenate(
            [measure_object_features(sample.objects, diameter, calibration) for sample in samples]
        )
        # The size is not used: small objects are often right in this data, which would raise confidence in huge ones.
        features[:, SIZE_COLUMN] = 0.0
        return cls(
            features,
            np.concatenate([sample.matched for sample in samples]),
            stacks,
            np.repeat([sample.group for sample in samples], counts),
            np.array([EFFECTIVE_OBJECTS / sizes[stack] for stack in stacks]),
        )

    def fit(self, inside: Booleans) -> Floats:
        """Return the intercept and the coefficients of a ridge-regularized logistic regression for some objects."""
        features, matched, weights = self.features[inside], self.matched[inside], self.weights[inside].copy()
        recorded = self.groups[inside] == "recorded"
        if recorded.any() and not recorded.all():
            weights[recorded] *= weights[~recorded].sum() / weights[recorded].sum()
        mean, spread = features.mean(0), features.std(0) + 1e-9
        design = np.column_stack([np.ones(len(matched)), (features - mean) / spread])
        penalty = RIDGE_PENALTY * np.diag([0.0] + [1.0] * features.shape[1])
        coefficients = np.zeros(design.shape[1])
        for _ in range(NEWTON_STEPS):
            probability = logistic(design @ coefficients)
            hessian = design.T * (weights * probability * (1 - probability)) @ design + penalty
            gradient = design.T @ (weights * (matched - probability)) - penalty @ coefficients
            coefficients += np.linalg.solve(hessian, gradient)
        slopes = coefficients[1:] / spread
        return np.append(coefficients[0] - slopes @ mean, slopes)

    def cross_validate(self) -> Floats:
        """Return the confidence of each object, predicted by a fit to all other stacks [N]."""
        confidences = np.zeros(len(self.matched))
        for stack in np.unique(self.stacks):
            inside = self.stacks == stack
            intercept, *slopes = self.fit(~inside)
            confidences[inside] = logistic(intercept + self.features[inside] @ np.array(slopes))
        return confidences


def logistic(log_odds: Floats) -> Floats:
    """Return the probabilities for log-odds [N]."""
    probabilities: Floats = 1 / (1 + np.exp(-np.clip(log_odds, -50, 50)))
    return probabilities


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write samples to an `.npz` file."""
    index = [(s.group, s.stack, s.condition, len(s.matched), s.f1) for s in samples]
    objects = Objects.concatenate([sample.objects for sample in samples])
    np.savez_compressed(
        path,
        index=np.array(json.dumps(index)),
        matched=np.concatenate([sample.matched for sample in samples]),
        voxel_counts=objects.voxel_counts,
        confidence=objects.confidence,
        peaks=objects.peaks,
    )


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples in a file of `write_samples`."""
    with np.load(path) as archive:
        start = 0
        for group, stack, condition, count, f1 in json.loads(str(archive["index"])):
            part = slice(start, start + count)
            objects = Objects(*(archive[name][part] for name in ("voxel_counts", "confidence", "peaks")))
            yield Sample(group, stack, condition, objects, archive["matched"][part], f1)
            start += count


def report_results(samples: Sequence[Sample], confidences: Floats) -> Iterator[str]:
    """Yield the lines of a table that compares the confidence in results, the expected F1, with F1."""
    ends = np.cumsum([len(sample.matched) for sample in samples])
    expected = np.array([part.mean() for part in np.split(confidences, ends[:-1])])
    f1 = np.array([sample.f1 for sample in samples])
    error, correlation = np.abs(expected - f1).mean(), np.corrcoef(expected, f1)[0, 1]
    yield f"expected F1 of {len(f1)} results: mean difference from F1 {np.mean(expected - f1):+.2f}"
    yield f"mean absolute difference {error:.2f}, correlation {correlation:.2f}"
    yield "| threshold | F1 up to 0.45, with a warning | F1 of at least 0.6, with a warning |\n|---|---|---|"
    for threshold in (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7):
        bad, good = (expected[chosen] < threshold for chosen in (f1 <= 0.45, f1 >= 0.6))
        yield f"| {threshold} | {bad.sum()} of {len(bad)} | {good.sum()} of {len(good)} |"


def report(samples: Sequence[Sample], spec: ModelSpec) -> tuple[list[str], dict[str, Reliability]]:
    """Return the lines of the report, and the reliability of the confidence in the groups of stacks."""
    design = Design.of(samples, spec)
    confidences = design.cross_validate()
    lines = ["  objects:"]
    names = ("intercept", "certainty", "peak", "size", "result", "fragment")
    coefficients = design.fit(np.ones(len(design.matched), np.bool_))
    lines += [f"    {name}: {value:.2f}" for name, value in zip(names, coefficients, strict=True)]
    probabilities = np.concatenate([sample.objects.confidence for sample in samples]).astype(np.float64)
    recorded = design.groups == "recorded"
    reliability = dict[str, Reliability]()
    lines += ["| stacks | number | objects | error | error of the mean probability |", "|---|---|---|---|---|"]
    for name, inside in (("all", recorded | ~recorded), ("synthetic", ~recorded), ("recorded", recorded)):
        if not inside.any():
            continue
        before, after = (
            bin_by_confidence(values[inside], design.matched[inside], design.weights[inside])
            for values in (probabilities, confidences)
        )
        reliability[name] = after
        cells = (len(set(design.stacks[inside])), inside.sum(), f"{after.error:.3f}", f"{before.error:.3f}")
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return [*lines, *report_results(samples, confidences)], reliability


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of recorded stacks")
    parser.add_argument("--embryos", type=Path, help="folder of BBBC050")
    parser.add_argument("--tissues", type=Path, help="folder of the stacks of `scripts.recipes.tissues`")
    parser.add_argument("--left-out", type=Path, help="folder of models that were trained without an organoid")
    parser.add_argument("--model", default="nuclei", help="name or folder of the model")
    parser.add_argument("--samples", type=Path, help="file to write the objects to, or to read them from")
    parser.add_argument("--diagram", type=Path, help="SVG file for the reliability diagram")
    options = parser.parse_args(arguments)
    runner = start_segmenter(options.model)
    if options.samples is not None and options.samples.exists():
        samples = list(read_samples(options.samples))
    else:
        samples = list(collect_all_samples(runner, options))
        if options.samples is not None:
            write_samples(samples, options.samples)
    lines, reliability = report(samples, runner.spec)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if options.diagram is not None:
        options.diagram.write_text(draw_diagram(reliability), encoding="utf-8")


if __name__ == "__main__":
    main()
