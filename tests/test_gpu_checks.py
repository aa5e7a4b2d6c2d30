"""The checks of `benchmarks/gpu_checks.py`, and helper functions of `benchmarks/gpu.py`."""

import threading

import gpu
import pytest
import torch
from gpu_checks import CHECKS, Check, attempt, compare, find_slow_operations, largest_difference

from service.core.config import Settings
from service.core.types import Segmentation
from service.models.loader import load_network


def test_slow_convolutions_and_memory_format_conversions_are_found():
    slow = [
        "void at::native::vol2col_kernel<c10::BFloat16>(long, ...)",
        "aten::slow_conv3d_forward",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, ...>",
        "void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, ...>",
    ]
    fast = [
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
        "aten::cudnn_convolution",
    ]
    assert find_slow_operations([*fast, *slow]) == slow


def test_difference_of_non_finite_scores_exceeds_any_tolerance():
    expected = torch.tensor([1.0, -1.0])
    assert largest_difference(expected, expected) == 0
    assert largest_difference(torch.tensor([1.0, -0.9]), expected) == pytest.approx(0.1)
    assert not largest_difference(torch.tensor([1.0, torch.nan]), expected) <= 1e-3


def test_labels_are_compared_by_the_fraction_of_voxels_that_differ():
    expected = torch.zeros(1, 10, 10, dtype=torch.int16).numpy()
    expected[0, :5] = 1
    actual = expected.copy()
    actual[0, 5, 0] = 1
    pair = (Segmentation(pixels, "labels", None, 1) for pixels in (actual, expected))
    actual, expected = pair
    assert compare("labels", actual, expected, 0.011).passed
    assert not compare("labels", actual, expected, 0.009).passed


def test_check_without_an_expected_value_has_no_verdict():
    assert [Check("", "", passed).verdict for passed in (None, True, False)] == ["", "passed", "FAILED"]
    assert len(CHECKS) == len(set(CHECKS))


def test_error_in_a_check_adds_a_failed_row_after_its_other_rows():
    def check():
        yield Check("first", "1", passed=True)
        raise RuntimeError("CUDA error: misaligned address")

    first, second = attempt("copies", check)
    assert first.passed
    assert second == Check("copies", "RuntimeError: CUDA error: misaligned address", passed=False)


def test_clients_stop_when_a_measurement_is_aborted():
    stop = threading.Event()
    with pytest.raises(SystemExit), gpu.run_threads(lambda: stop.wait(10), 2, stop):
        raise SystemExit
    assert stop.is_set()


def test_reference_is_the_network_as_loaded_in_eager_fp32(bands, monkeypatch):
    settings = Settings.model_validate({"engine": {"kind": "winograd", "precision": "bf16"}})
    scores = []
    make_call = gpu.make_call
    monkeypatch.setattr(gpu, "make_call", lambda network, *rest: make_call(lambda x: scores.append(network(x)), *rest))
    runner = gpu.build_reference(bands, settings, torch.device("cpu"), 3)
    assert (runner.name, runner.batch_size, runner.precision) == ("eager fp32 contiguous", 3, "fp32")
    assert scores
    runner.call()
    batch = torch.zeros(3, 1, *bands.input.roi_size)
    with torch.inference_mode():
        assert torch.equal(scores[-1], load_network(bands)(batch))
