"""Files bundled with the package, such as the folders `models` and `configs`, and the version of the package."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


def bundled_folder(name: str) -> Path:
    """Return the bundled folder `name`: inside an installed package, or at the top level of a clone."""
    installed = PACKAGE / "bundled" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def software_version(distribution: str = "stackseg") -> str:
    """Return the version of the package, or the version in `pyproject.toml` for a clone that is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        project_file = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project_file["project"]["version"])
