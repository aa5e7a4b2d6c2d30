"""The client is a separate package that knows the parameters and file formats of the service."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib

import pytest
from paths import ROOT
from stackseg_client import AsyncClient, Client, Job, Parameters
from stackseg_client.async_client import AsyncJob
from stackseg_client.folders import STACK_SUFFIXES
from stackseg_client.projects import AsyncProject, Project

from service.serving.parameters import Query
from service.serving.results import metadata

FOLDER = ROOT / "clients" / "python"


def test_client_loads_neither_the_service_nor_torch() -> None:
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import stackseg_client; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "stackseg_client.client" in modules
    assert not {"service", "torch", "pydantic", "zarr"} & set(modules.split())


def test_parameters_are_those_of_the_service() -> None:
    # The client has its own argument for tables.
    assert set(Parameters.__annotations__) == set(Query.model_fields) - {"measurements"}
    described = {
        line.split()[0] for line in str(Parameters.__doc__).splitlines() if line.startswith("    ") and line.strip()
    }
    assert set(Parameters.__annotations__) == described


def test_folders_contain_the_formats_of_the_service() -> None:
    # An OME-Zarr folder cannot be uploaded.
    assert set(STACK_SUFFIXES) == set(metadata.STACK_SUFFIXES) - {".zarr"}


def test_versions_agree() -> None:
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (ROOT, FOLDER)]
    assert projects[0]["version"] == projects[1]["version"]
    assert projects[1]["license"] == projects[0]["license"]


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (Job, AsyncJob), (Project, AsyncProject)])
def test_asynchronous_classes_have_the_same_methods(one: type, other: type) -> None:
    methods = [
        {
            name: list(inspect.signature(method).parameters.values())
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }
        for kind in (one, other)
    ]
    assert methods[0] == methods[1]
    assert len(methods[0]) >= 5
