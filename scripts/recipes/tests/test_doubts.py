from __future__ import annotations

from scripts.recipes.doubts import Result, report


def test_table_counts_false_and_missed_warnings() -> None:
    results = [
        *(Result("good", confidence) for confidence in (0.1, 0.45, 0.9)),
        *(Result("bad", confidence) for confidence in (0.35, 0.2)),
        Result("fair", 0.3),
        *(Result("texture", confidence) for confidence in (None, 0.65, 0.7)),
    ]
    lines = list(report(results))
    assert "| 0.3 | 1 of 3 | 1 of 2 | 0 of 0 | 2 of 3 |" in lines
    assert "| 0.5 | 2 of 3 | 0 of 2 | 0 of 0 | 2 of 3 |" in lines
    assert lines[-1] == "| 0.7 | 2 of 3 | 0 of 2 | 0 of 0 | 1 of 3 |"
