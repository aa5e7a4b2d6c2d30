"""Limits on the structure of `service/`. If you raise one, explain why in the commit message."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest
from paths import ROOT

MAX_IMPORT_DEPTH = 16
MAX_MODULES_LOADED_BY_SEGMENT_ROUTE = 97
MAX_MODULES_LOADED_BY_INFERENCE = 42
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 40
MAX_COMPLEXITY = 10
MAX_PACKAGE_ENTRIES = 11
# `service/cli` has one module per command.
MAX_COMMAND_LINE_ENTRIES = 13
MAX_NOQA = 74

# Statements and expressions that add a path to a function.
DECISIONS = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler),
    *(ast.Assert, ast.match_case, ast.comprehension),
)

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "service").rglob("*.py")
}
NON_CODE_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def list_imports(name: str, *, anywhere: bool = False) -> frozenset[str]:
    """Return the modules of `service` that a module imports at its top level, or anywhere if `anywhere` is set."""
    body = ast.walk(parse(name)) if anywhere else iter(parse(name).body)
    return frozenset(found for node in body for found in _imported(node) if found in MODULES) - {name}


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in MODULES else str(node.module)


@cache
def measure_depth(name: str) -> int:
    """Return the length of the longest chain of imports that starts at a module."""
    return 1 + max(map(measure_depth, list_imports(name)), default=0)


def list_loaded_modules(name: str) -> set[str]:
    """Return a module and all modules of `service` that importing it loads."""
    seen, waiting = set[str](), [name]
    while waiting:
        if (module := waiting.pop()) not in seen:
            seen.add(module)
            waiting += list_imports(module)
    return seen


def count_code_lines(source: str) -> int:
    """Count the lines that contain code, without blank lines, comments and docstrings."""
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NON_CODE_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - documented)


def measure_complexity(function: ast.AST) -> int:
    """Return the number of paths. Operands of `and` and `or`, and conditions of comprehensions, count as well."""
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    conditions = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + sum(isinstance(node, DECISIONS) for node in nodes) + operands + conditions


def test_import_chains_are_short() -> None:
    deepest = max(MODULES, key=measure_depth)
    assert measure_depth(deepest) <= MAX_IMPORT_DEPTH, deepest


@pytest.mark.parametrize(
    ("module", "limit"),
    [
        ("service.api.routes.segment", MAX_MODULES_LOADED_BY_SEGMENT_ROUTE),
        ("service.inference.segment", MAX_MODULES_LOADED_BY_INFERENCE),
    ],
)
def test_entry_points_load_few_modules(module: str, limit: int) -> None:
    assert len(list_loaded_modules(module)) <= limit


def test_service_imports_nothing_else_of_the_repository() -> None:
    """The wheel contains only the package `service`."""
    deptry = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["deptry"]
    others = set(deptry["known_first_party"]) - {"service"}
    for name in MODULES:
        imported = {found.partition(".")[0] for node in ast.walk(parse(name)) for found in _imported(node)}
        assert imported.isdisjoint(others), (name, imported & others)


def test_imports_have_no_cycles() -> None:
    """Imports within functions and for type checkers count as well."""
    is_finished: dict[str, bool] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert is_finished.get(name) is not False, [*path, name]
        if name not in is_finished:
            is_finished[name] = False
            for other in list_imports(name, anywhere=True):
                visit(other, (*path, name))
            is_finished[name] = True

    for module in MODULES:
        visit(module, ())


def test_files_and_functions_are_short() -> None:
    for name, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= MAX_FILE_LINES, path
        for node in ast.walk(parse(name)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # Only functions that are long with comments and docstrings need to be read without them.
            if (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES:
                text = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
                indented = " " * node.col_offset + text.lstrip()
                lines = count_code_lines("if True:\n" + indented) - 1 if node.col_offset else count_code_lines(text)
                assert lines <= MAX_FUNCTION_LINES, (path, node.name)


def test_functions_have_few_paths() -> None:
    for path in [*MODULES.values(), *(ROOT / "clients").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert measure_complexity(node) <= MAX_COMPLEXITY, (path, node.name)


def test_packages_have_few_entries() -> None:
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            entries = {other for other in MODULES if other.rpartition(".")[0] == name}
            limit = MAX_COMMAND_LINE_ENTRIES if name == "service.cli" else MAX_PACKAGE_ENTRIES
            assert len(entries) <= limit, name


def test_few_lines_have_lint_exemptions() -> None:
    exemptions = sum(path.read_text(encoding="utf-8").count("# noqa") for path in MODULES.values())
    assert exemptions <= MAX_NOQA


def test_modules_named_in_documents_exist() -> None:
    for document in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|js|cpp|hpp))`", document.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file() or any(ROOT.glob(f"service/**/{name}")), (document.name, name)
