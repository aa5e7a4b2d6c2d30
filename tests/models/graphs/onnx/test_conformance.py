"""Tests of all supported operators with the official test cases of ONNX."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from service.core.errors import BrokenModel
from service.models.graphs.onnx import file
from service.models.graphs.onnx.elementwise import UnsupportedCall
from service.models.graphs.onnx.network import _BUILDERS, PASS_THROUGH_OPERATORS, _NetworkBuilder
from service.models.graphs.onnx.operators import OPERATORS

# Errors of networks that cannot run. Loading a network runs it once, so such files are rejected.
RUN_ERRORS = (RuntimeError, TypeError, ValueError, LookupError)
SUPPORTED_OPERATORS = OPERATORS.keys() | _BUILDERS.keys() | PASS_THROUGH_OPERATORS
# Number of cases whose results are compared, rather than rejected, at present.
MIN_EQUAL_CASES = 350


def collect_cases() -> list[Any]:
    """Return the cases that consist of one call to a supported operator, except data types that torch lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases  # noqa: PLC0415

        cases = collect_testcases(None)
    return [
        case
        for case in cases
        if len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type in SUPPORTED_OPERATORS - {"Cast"}
    ]


def run_case(case: Any) -> list[tuple[Any, Any]]:
    """Return pairs of computed and expected outputs. The first input is the image, and the others are constants."""
    model, (inputs, outputs) = onnx.ModelProto(), case.data_sets[0]
    model.CopyFrom(case.model)
    names = [info.name for info in model.graph.input]
    for name, array in list(zip(names, inputs, strict=False))[1:]:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    parsed_model = file.parse_model(model.SerializeToString(), Path("case"))
    image = torch.from_numpy(np.array(inputs[0]))
    with torch.inference_mode():
        builder = _NetworkBuilder(parsed_model)
        network = builder.build(parsed_model.inputs[0])
        values = network(image.float() if image.is_floating_point() else image)
    expected = dict(zip((info.name for info in model.graph.output), outputs, strict=True))
    return [(value, expected[name]) for name, value in zip(builder.output_names, values, strict=True)]


def test_official_cases_give_the_expected_results_or_are_rejected() -> None:
    verdicts, differing_cases = Counter[str](), list[str]()
    for case in collect_cases():
        try:
            pairs = run_case(case)
        except (BrokenModel, UnsupportedCall, *RUN_ERRORS):
            verdicts["rejected"] += 1
            continue
        verdicts["run"] += 1
        for value, expected in pairs:
            array = value.numpy() if isinstance(value, Tensor) else np.array(value)
            expected_array = np.asarray(expected).astype(np.float64)
            if array.shape != expected_array.shape or not np.allclose(
                array, expected_array, 1e-3, 1e-4, equal_nan=True
            ):
                differing_cases.append(case.name)
    assert differing_cases == []
    assert verdicts["run"] >= MIN_EQUAL_CASES
