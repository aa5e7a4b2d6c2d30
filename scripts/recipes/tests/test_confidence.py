from __future__ import annotations

from scripts.recipes.confidence import classify_f1


def test_results_are_classified_by_f1() -> None:
    assert [classify_f1(f1) for f1 in (0.2, 0.45, 0.5, 0.6, 0.9)] == ["bad", "bad", "fair", "good", "good"]
