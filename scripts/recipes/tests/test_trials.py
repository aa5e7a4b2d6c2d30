from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scripts.recipes.trials import MARGINS, TrialScores, cache_scores, report


def test_table_counts_stacks_whose_diameter_a_trial_selected() -> None:
    never = (np.nan,) * (len(MARGINS) - 1)
    results = {
        "spots": [
            TrialScores(0.2, (0.6, *never)),
            TrialScores(0.4, (0.8, *never)),
            TrialScores(np.nan, (np.nan, *never)),
        ],
        "noise": [],
    }
    lines = list(report(results))
    assert lines[0].startswith("| margin | spots | noise |")
    assert lines[1] == f"| {MARGINS[0]:g} | 2 of 3: 0.30 to 0.70 | 0 of 0 |"
    assert lines[-1] == f"| {MARGINS[-1]:g} | 0 of 3 | 0 of 0 |"


def test_identical_windows_are_scored_once() -> None:
    calls: list[Tensor] = []
    score_windows = cache_scores(lambda windows: calls.append(windows) or 2 * windows)
    for value in (1.0, 1.0, 3.0):
        assert torch.equal(score_windows(torch.full((2, 1, 2, 2, 2), value)), torch.full((2, 1, 2, 2, 2), 2 * value))
    assert len(calls) == 2
