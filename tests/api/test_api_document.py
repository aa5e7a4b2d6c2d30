"""docs/api.md lists what OpenAPI describes: endpoints, parameters, headers and problem types."""

from __future__ import annotations

import re
from typing import Any

import pytest
from job_service import Service
from paths import ROOT

DOCUMENT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def read_table(first_column: str, section: str = "") -> list[list[str]]:
    """Return the rows of the first table whose first column has this heading, below a heading in the document."""
    text = DOCUMENT[DOCUMENT.index(section) :]
    lines = text[text.index(f"| {first_column} |") :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def read_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture
def schema(service: Service) -> dict[str, Any]:
    return dict(service.client.get("/openapi.json").json())


def list_parameters(schema: dict[str, Any], path: str, method: str) -> set[str]:
    parameters = schema["paths"][path][method]["parameters"]
    return {parameter["name"] for parameter in parameters if parameter["in"] == "query"}


def test_endpoint_table_lists_every_operation(schema: dict[str, Any]) -> None:
    documented = [read_names(row[0])[0] for row in read_table("endpoint")]
    described = {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}
    assert sorted(documented) == sorted(described)


@pytest.mark.parametrize(
    ("section", "paths"),
    [
        ("### Parameters", {"/segment": "post", "/jobs": "post", "/inspect": "post"}),
        ("## Stacks", {"/stacks/{stack}/planes": "get"}),
        ("## Annotations", {"/annotations": "post"}),
    ],
)
def test_parameter_tables_list_every_parameter(schema: dict[str, Any], section: str, paths: dict[str, str]) -> None:
    documented = [name for row in read_table("parameter", section) for name in read_names(row[0])]
    for path, method in paths.items():
        assert sorted(documented) == sorted(list_parameters(schema, path, method))


def test_parameter_table_names_the_values_of_every_enumeration(schema: dict[str, Any]) -> None:
    rows = {name: " ".join(row) for row in read_table("parameter", "### Parameters") for name in read_names(row[0])}
    for parameter in schema["paths"]["/segment"]["post"]["parameters"]:
        choices = [choice for kind in parameter["schema"].get("anyOf", []) for choice in kind.get("enum", [])]
        assert set(choices) <= set(read_names(rows.get(parameter["name"], ""))), parameter["name"]


def test_header_table_lists_every_header_of_a_result(schema: dict[str, Any]) -> None:
    documented = {read_names(row[0])[0] for row in read_table("header")}
    assert documented == schema["paths"]["/segment"]["post"]["responses"]["200"]["headers"].keys()


def test_media_type_table_lists_formats_of_a_result(schema: dict[str, Any]) -> None:
    documented = {name for row in read_table("`Accept`") for name in read_names(row[0])}
    described = schema["paths"]["/segment"]["post"]["responses"]["200"]["content"].keys()
    # Parameters select the zip archive and the description of a saved file. application/gzip is a synonym for NIfTI.
    assert documented - {"application/gzip"} == described - {"application/zip", "application/json"}


def test_error_table_lists_every_problem_type_with_its_status(schema: dict[str, Any]) -> None:
    documented = {(row[0], name) for row in read_table("status", "## Errors") for name in read_names(row[1])}
    described = {
        (status, problem_type)
        for status, response in schema["paths"]["/segment"]["post"]["responses"].items()
        for problem_type in response["content"].get("application/problem+json", {}).get("examples", {})
    }
    # These errors have no class. OpenAPI describes only existing paths and methods, and POST ignores
    # ranges and conditions.
    unlisted = {
        ("404", "not-found"),
        ("405", "method-not-allowed"),
        ("412", "precondition-failed"),
        ("416", "range-not-satisfiable"),
    }
    assert documented - unlisted == described


def test_error_examples_of_the_document_have_the_members_of_the_schema(schema: dict[str, Any]) -> None:
    members = re.findall(r'^  "(\w+)":', DOCUMENT[DOCUMENT.index("## Errors") :], re.MULTILINE)
    assert set(members) <= schema["components"]["schemas"]["Problem"]["properties"].keys()


def test_job_example_of_the_document_has_the_members_of_the_schema(schema: dict[str, Any]) -> None:
    section = DOCUMENT[DOCUMENT.index("## Jobs") :]
    example = section[section.index("```json") : section.index("| `state`")]
    members = set(re.findall(r'"(\w+)":', example)) - {"overlap", "done", "total", "receive"}
    assert members == schema["components"]["schemas"]["JobReport"]["properties"].keys()


def test_numbers_in_queries_are_decimal(schema: dict[str, Any], service: Service) -> None:
    numeric = []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                kinds = parameter["schema"].get("anyOf", [parameter["schema"]])
                if parameter["in"] == "query" and {"integer", "number"} & {kind.get("type") for kind in kinds}:
                    numeric.append(parameter["name"])
                    url = re.sub(r"\{\w+\}", "0" * 32, path)
                    response = service.client.request(method.upper(), url, params={parameter["name"]: "1_0"})
                    assert response.status_code == 422, (method, path, parameter["name"])
                    assert "1_0" in response.json()["detail"]
    assert {"limit", "from", "overlap", "ignore_label"} <= set(numeric)
