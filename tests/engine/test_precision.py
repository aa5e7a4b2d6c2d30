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


FAULTY = {torch.float16: "cuDNN 9.10.2 is installed.", torch.bfloat16: "cuDNN 9.10.2 is installed."}


def test_auto_without_the_faulty_precisions_explains_why():
    choice = choose("auto", FP32, FAULTY)
    assert choice == ("fp32", "cuDNN 9.10.2 is installed. Until then, fp32 is used.")


@pytest.mark.parametrize("setting", ["bf16", "fp16"])
def test_a_faulty_precision_that_is_set_is_used_with_a_warning_about_the_fault(setting):
    choice = choose(setting, FP32, FAULTY)
    assert choice.name == setting
    assert choice.warning is not None
    assert "cuDNN 9.10.2" in choice.warning
    assert "units" not in choice.warning


def test_a_precision_without_faults_needs_no_warning():
    assert choose("fp32", FP32, FAULTY).warning is None


def test_a_precision_without_units_is_emulated_whatever_is_faulty():
    choice = choose("bf16", FP32, {torch.float16: "cuDNN 9.10.2 is installed."})
    assert choice.warning is not None
    assert "no bf16 units" in choice.warning
