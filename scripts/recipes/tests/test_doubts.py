from __future__ import annotations

from scripts.recipes.doubts import Judged, report


def test_the_table_counts_warnings_of_good_results_and_their_absence_from_others() -> None:
    judged = [
        *(Judged("good", confidence) for confidence in (0.1, 0.45, 0.9)),
        *(Judged("bad", confidence) for confidence in (0.35, 0.2)),
        Judged("fair", 0.3),
        *(Judged("texture", confidence) for confidence in (None, 0.65, 0.7)),
    ]
    lines = list(report(judged))
    assert "| 0.3 | 1 of 3 | 1 of 2 | 0 of 0 | 2 of 3 |" in lines
    assert "| 0.5 | 2 of 3 | 0 of 2 | 0 of 0 | 2 of 3 |" in lines
    assert lines[-1] == "| 0.7 | 2 of 3 | 0 of 2 | 0 of 0 | 1 of 3 |"
