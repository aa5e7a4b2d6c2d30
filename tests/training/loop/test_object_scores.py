import pytest

from service.training.loop.object_scores import ObjectCounts, prefer_first


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


def test_counts_are_described_with_the_scores_in_parentheses() -> None:
    objects = ObjectCounts(true=34, found=32, matched=29, strictly_matched=20)
    scores = "F1 0.88 at IoU 0.5 and 0.61 at IoU 0.7, precision 0.91, recall 0.85"
    assert objects.describe() == f"29 of 34 objects correct, 3 false ({scores})"
    cells = objects._replace(true=1, matched=1, voxels=100, split_bits=20.0, merge_bits=10.0)
    assert cells.describe().startswith("1 of 1 object correct, 31 false (")
    assert cells.describe().endswith(", variation of information 0.30: 0.20 splits, 0.10 merges)")
