import math

import pytest

from service.training.loop.plan import ObjectCounts, TrainerState, TrainingPlan, ValidationScores, prefer_first


def make_scores(loss: float, f1: float = 0.0) -> ValidationScores:
    return ValidationScores(loss, None, f1, f1, f1, f1)


def test_correct_objects_select_the_weights_and_the_loss_decides_ties() -> None:
    state = TrainerState()
    assert state.add_row(0.1, None, make_scores(0.5, 0.2))
    assert state.add_row(0.1, 0.4, make_scores(0.6, 0.3))
    assert not state.add_row(0.1, 0.4, make_scores(0.1, 0.2))
    assert state.add_row(0.1, 0.4, make_scores(0.5, 0.3))
    assert not state.add_row(0.1, 0.4, make_scores(0.5, 0.3))
    assert (state.best, state.stale) == (3, 1)
    assert state.get_scores(3) == make_scores(0.5, 0.3)
    assert "0.20 before, 0.30 at best" in state.summarize()


@pytest.mark.parametrize(
    ("f1_scores", "object_count", "expected"),
    [
        ([0.73, 0.80], 11, 0),
        ([0.73, 0.80], 500, 1),
        ([0.50, 0.60, 0.70], 11, 1),
        ([0.90, 0.20, 0.90], 11, 0),
        ([0.0, 0.0], 0, 0),
        ([0.99, 1.0], 1000, 1),
    ],
)
def test_first_score_is_preferred_unless_another_is_clearly_better(
    f1_scores: list[float], object_count: int, expected: int
) -> None:
    assert prefer_first(f1_scores, object_count) == expected


def test_summary_of_a_run_without_scores_is_readable() -> None:
    state = TrainerState()
    state.add_row(0.1, None, make_scores(math.nan))
    state.step = state.skipped = 20
    assert "20 steps skipped" in state.summarize()
    assert "nan" not in state.summarize()
    assert "inf" not in state.summarize().replace("finite", "")


def test_learning_rate_rises_briefly_and_decays_to_almost_zero() -> None:
    plan = TrainingPlan(learning_rate=1.0)
    rates = [plan.get_learning_rate(percent / 100) for percent in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[5] == 1
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.01


def test_counts_are_described_with_the_scores_in_parentheses() -> None:
    objects = ObjectCounts(true=34, found=32, matched=29, strictly_matched=20)
    scores = "F1 0.88 at IoU 0.5 and 0.61 at IoU 0.7, precision 0.91, recall 0.85"
    assert objects.describe() == f"29 of 34 objects correct, 3 false ({scores})"
    cells = objects._replace(true=1, matched=1, voxels=100, split_bits=20.0, merge_bits=10.0)
    assert cells.describe().startswith("1 of 1 object correct, 31 false (")
    assert cells.describe().endswith(", variation of information 0.30: 0.20 splits, 0.10 merges)")
