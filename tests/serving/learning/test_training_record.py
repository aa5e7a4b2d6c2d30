from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from service.serving.learning.training_record import INTERRUPTED, MOST_POINTS, TrainingRecord, read_records


def record(number: int = 1) -> TrainingRecord:
    return TrainingRecord(f"{number:032x}", "ann", "mine", "base/1", ["a"], 1.0, float(number))


def test_a_curve_stays_short_and_covers_all_steps() -> None:
    made = record()
    for step in range(1, 10_001):
        made.update({"step": step, "loss": 1 / step})
        assert len(made.loss) <= MOST_POINTS
    assert made.step == 10_000
    steps = [step for step, _ in made.loss]
    assert steps[-1] > 9_900
    assert {b - a for a, b in itertools.pairwise(steps)} == {made.stride}
    # JSON does not know these.
    made.update({"validation": [0, float("inf")], "step": 20_480, "loss": float("nan")})
    assert (made.validation, made.loss[-1][0], made.step) == ([], steps[-1], 20_480)


@pytest.mark.parametrize("line", [{"validation": 3}, {"loss": 1.0}, {"done": {}}, {"steps": "many"}])
def test_lines_that_make_no_sense_are_told(line: object) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        record().update(line)  # type: ignore[arg-type]


def test_what_is_not_over_is_interrupted_for_the_next_process(tmp_path: Path) -> None:
    running, done = record(1), record(2)
    running.state, done.state, done.message = "running", "done", "Better."
    done.update({"step": 1, "loss": 0.5})
    for made in (done, running):
        made.save(tmp_path / "trainings")
    (tmp_path / "trainings" / "damaged.json").write_text("[1]")
    first, second = read_records(tmp_path / "trainings")
    assert (first.id, first.state, first.message) == (running.id, "interrupted", INTERRUPTED)
    assert json.loads(json.dumps(vars(second))) == json.loads(json.dumps(vars(done)))
    assert read_records(tmp_path / "nowhere") == []
