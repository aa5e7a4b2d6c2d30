import pytest
import torch

from service.training.throughput import HEADER, StepCost, choose_precisions


@pytest.mark.parametrize(
    ("setting", "native_dtypes", "expected"),
    [
        ("auto", {torch.float32}, "bf16"),
        ("auto", {torch.float32, torch.float16}, "fp16"),
        ("auto", {torch.float32, torch.float16, torch.bfloat16}, "bf16"),
        ("fp32", {torch.float32, torch.bfloat16}, "bf16"),
        ("fp16", {torch.float32, torch.bfloat16}, "fp16"),
    ],
)
def test_mixed_precision_is_the_configured_or_native_one(setting, native_dtypes, expected) -> None:
    assert choose_precisions(setting, frozenset(native_dtypes)) == ("fp32", expected)


def test_row_matches_the_header() -> None:
    row = StepCost("bf16", 4, 0.5, 3 * 2**20).format_row()
    assert row == "| bf16 | 8.00 | 500 | 3 MiB |"
    assert row.count("|") == HEADER.splitlines()[0].count("|")
    assert StepCost("fp32", 1, 1.0, None).format_row().endswith("unknown |")
