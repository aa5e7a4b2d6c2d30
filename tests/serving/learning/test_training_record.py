from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from service.serving.learning.training_record import INTERRUPTED_MESSAGE, MAX_CURVE_POINTS, TrainingRecord, read_records


def make_record(number: int = 1) -> TrainingRecord:
    return TrainingRecord(f"{number:032x}", "ann", "mine", "base/1", ["a"], 1.0, float(number))


def test_long_loss_curve_is_thinned_out_evenly() -> None:
    training = make_record()
    for step in range(1, 10_001):
        training.update({"step": step, "loss": 1 / step})
        assert len(training.loss) <= MAX_CURVE_POINTS
    assert training.step == 10_000
    steps = [step for step, _ in training.loss]
    assert steps[-1] > 9_900
    assert {b - a for a, b in itertools.pairwise(steps)} == {training.stride}
    # JSON does not support infinity and NaN.
    training.update({"validation": [0, float("inf")], "step": 20_480, "loss": float("nan")})
    assert (training.validation, training.loss[-1][0], training.step) == ([], steps[-1], 20_480)


@pytest.mark.parametrize("progress", [{"validation": 3}, {"loss": 1.0}, {"done": {}}, {"steps": "many"}])
def test_invalid_progress_raises_an_error(progress: object) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        make_record().update(progress)  # type: ignore[arg-type]


def test_unfinished_training_run_is_interrupted_after_a_restart(tmp_path: Path) -> None:
    running, done = make_record(1), make_record(2)
    running.state, done.state, done.message = "running", "done", "Better."
    done.update({"step": 1, "loss": 0.5})
    for training in (done, running):
        training.save(tmp_path / "trainings")
    (tmp_path / "trainings" / "damaged.json").write_text("[1]")
    first, second = read_records(tmp_path / "trainings")
    assert (first.id, first.state, first.message) == (running.id, "interrupted", INTERRUPTED_MESSAGE)
    assert json.loads(json.dumps(vars(second))) == json.loads(json.dumps(vars(done)))
    assert read_records(tmp_path / "nowhere") == []
