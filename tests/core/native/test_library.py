"""Loading of the C++ library: variants, missing libraries and incompatible versions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fakes import bind_to_variants
from paths import ROOT

from service.core.native.library import CppFunctions, load_library
from service.core.native.variants import Variant, list_supported_variants, list_variants
from service.inference.windows.kernels import window_kernels

CALL_KERNELS = """
import torch
from torch import nn
from service.engine.cpu.norm import KERNELS, replace_norms

assert KERNELS.is_available, KERNELS.problem
torch.set_num_threads(2)
replace_norms(nn.Sequential(nn.GroupNorm(2, 32)))(torch.ones(1, 32, 16, 32, 32))
for path in {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line and ".so" in line}:
    print(path)
"""


@pytest.mark.parametrize("variant", list_supported_variants(), ids=lambda variant: variant.name)
def test_all_supported_variants_are_built(variant: Variant) -> None:
    assert variant.library_path.exists(), "run `python hatch_build.py --all`"
    assert bind_to_variants(window_kernels, variant).is_available


def test_first_existing_library_is_loaded() -> None:
    best = load_library()
    assert best._name == str(list_supported_variants()[0].library_path)
    assert load_library([Variant("missing"), *list_supported_variants()])._name == best._name


def test_missing_library_is_explained() -> None:
    with pytest.raises(OSError, match="g\\+\\+"):
        load_library([Variant("missing")])
    functions = bind_to_variants(window_kernels)
    assert not functions.is_available
    with pytest.raises(OSError, match="AVX2"):
        functions.require()


def test_library_of_another_version_is_rejected() -> None:
    functions = CppFunctions([("stackseg_of_tomorrow", "p", "-")])
    with pytest.raises(OSError, match="another version"):
        functions.require()


def test_variants_depend_on_the_architecture() -> None:
    names = [variant.name for variant in list_variants("x86_64")]
    assert names == ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]
    assert [variant.name for variant in list_variants("aarch64")] == ["aarch64"]


def test_kernels_use_the_openmp_runtime_of_torch() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", CALL_KERNELS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (runtime,) = completed.stdout.splitlines()
    assert "torch" in runtime
