import pytest
import torch

from service.engine.precision import choose_precision

FP32 = frozenset({torch.float32})
VOLTA = FP32 | {torch.float16}
AMPERE = VOLTA | {torch.bfloat16}
CPU_BF16 = FP32 | {torch.bfloat16}


@pytest.mark.parametrize(
    ("native_dtypes", "expected"), [(FP32, "fp32"), (VOLTA, "fp16"), (AMPERE, "bf16"), (CPU_BF16, "bf16")]
)
def test_auto_selects_the_fastest_native_precision(native_dtypes, expected):
    assert choose_precision("auto", native_dtypes) == (expected, None)
    assert choose_precision("auto", native_dtypes).dtype in native_dtypes


@pytest.mark.parametrize("setting", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("native_dtypes", [FP32, VOLTA, AMPERE, CPU_BF16])
def test_explicit_precision_is_used_with_a_warning_if_emulated(setting, native_dtypes):
    choice = choose_precision(setting, native_dtypes)
    assert choice.name == setting
    assert (choice.warning is None) == (choice.dtype in native_dtypes)
    assert choice.warning is None or f"no {setting} units" in choice.warning


def test_auto_skips_faulty_precisions_and_explicit_ones_cause_a_warning():
    faults = {torch.float16: "cuDNN 9.10.2 is installed."}
    assert choose_precision("auto", FP32, faults) == (
        "fp32",
        "cuDNN 9.10.2 is installed. Until this is fixed, fp32 is used.",
    )
    name, warning = choose_precision("fp16", FP32, faults)
    assert (name, "cuDNN 9.10.2" in warning, "units" in warning) == ("fp16", True, False)
    assert "no bf16 units" in choose_precision("bf16", FP32, faults).warning
    assert choose_precision("fp32", FP32, faults).warning is None
