from __future__ import annotations

from scripts.recipes.confidence import kind_of


def test_results_are_good_fair_or_bad_by_their_f1() -> None:
    assert [kind_of(f1) for f1 in (0.2, 0.45, 0.5, 0.6, 0.9)] == ["bad", "bad", "fair", "good", "good"]
