"""The tests that docs/security.md names exist."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT

NAMED_TESTS = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text(encoding="utf-8"))


def test_security_document_names_tests() -> None:
    assert len(NAMED_TESTS) > 50
    assert len(set(NAMED_TESTS)) == len(NAMED_TESTS)


@pytest.mark.parametrize(("path", "name"), NAMED_TESTS)
def test_named_test_exists(path: str, name: str) -> None:
    module = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
