from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.recipes.calibration import Design, Sample, find_matches, read_samples, report, write_samples
from service.core.files.bundled import get_bundled_folder
from service.core.types import Objects
from service.models.repository import read_spec

SPEC = read_spec(get_bundled_folder("models") / "nuclei")


def make_samples(num_stacks: int = 24) -> list[Sample]:
    """Return objects that match with a probability that depends only on their mean foreground probability."""
    rng, samples = np.random.default_rng(5), []
    for number in range(num_stacks):
        log_odds = rng.normal(1.5, 1, 40)
        objects = Objects.from_sums(np.full(40, 4000.0), 4000 / (1 + np.exp(-log_odds)), rng.uniform(0.7, 0.9, 40))
        matched = rng.random(40) < 1 / (1 + np.exp(-2 * (log_odds - 1.5)))
        group = "recorded" if number % 4 == 0 else "usual"
        samples.append(Sample(group, f"{group} {number}", "default", objects, matched, float(matched.mean())))
    return samples


def test_objects_match_if_more_than_half_of_their_union_overlaps() -> None:
    truth = np.array([[[7, 7, 7, 0, 9, 9, 9, 9, 0, 0]]])
    labels = np.array([[[1, 1, 0, 0, 2, 2, 3, 3, 0, 4]]])
    # Object 2 shares exactly half of its union with the true object 9.
    assert find_matches(truth, labels, 5).tolist() == [True, False, False, False, False]


def test_the_fit_recovers_the_probability_of_a_match() -> None:
    samples = make_samples()
    lines, reliability = report(samples, SPEC)
    coefficients = dict(line.split(": ") for line in lines[1:6])
    assert float(coefficients["    certainty"]) == pytest.approx(2, abs=0.4)
    errors = {name: values.error for name, values in reliability.items()}
    assert errors.keys() == {"all", "synthetic", "recorded"}
    assert max(errors["all"], errors["synthetic"]) < 0.06
    assert any("mean difference from F1 +0.0" in line or "mean difference from F1 -0.0" in line for line in lines)


def test_a_stack_has_no_influence_on_its_own_confidence() -> None:
    samples = make_samples(8)
    inverted = samples[3]._replace(matched=~samples[3].matched)
    first, second = (Design.of([*samples[:3], third, *samples[4:]], SPEC) for third in (samples[3], inverted))
    inside = first.stacks == samples[3].stack
    np.testing.assert_allclose(first.cross_validate()[inside], second.cross_validate()[inside])
    assert not np.allclose(first.cross_validate()[~inside], second.cross_validate()[~inside])


def test_samples_are_read_as_written(tmp_path: Path) -> None:
    samples = make_samples(3)
    write_samples(samples, tmp_path / "samples.npz")
    for written, read in zip(samples, read_samples(tmp_path / "samples.npz"), strict=True):
        assert (read.stack, read.f1) == (written.stack, written.f1)
        np.testing.assert_array_equal(read.matched, written.matched)
        np.testing.assert_array_equal(read.objects.confidence, written.objects.confidence)
