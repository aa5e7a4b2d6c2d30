import pytest
import torch

from service.engine.precision import choose

FP32 = frozenset({torch.float32})
VOLTA = FP32 | {torch.float16}
AMPERE = VOLTA | {torch.bfloat16}
CPU_BF16 = FP32 | {torch.bfloat16}


@pytest.mark.parametrize(
    ("native", "expected"), [(FP32, "fp32"), (VOLTA, "fp16"), (AMPERE, "bf16"), (CPU_BF16, "bf16")]
)
def test_auto_takes_the_fastest_that_is_native(native, expected):
    choice = choose("auto", native)
    assert choice.name == expected
    assert choice.dtype in native
    assert choice.warning is None


@pytest.mark.parametrize("setting", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("native", [FP32, VOLTA, AMPERE, CPU_BF16])
def test_what_is_set_is_honoured_and_warned_about_where_it_is_emulated(setting, native):
    choice = choose(setting, native)
    assert choice.name == setting
    assert (choice.warning is None) == (choice.dtype in native)
    assert choice.warning is None or setting in choice.warning
