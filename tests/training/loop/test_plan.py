import math

import pytest

from service.training.loop.plan import TrainerState, TrainingPlan, ValidationScores


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
