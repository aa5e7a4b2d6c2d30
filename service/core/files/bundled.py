"""Files bundled with the package, such as the folders `models` and `configs`, and the package version."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).parents[2]


def get_bundled_folder(name: str) -> Path:
    """Return the bundled folder `name`: inside an installed package, or at the top level of a Git clone."""
    installed_folder = PACKAGE_FOLDER / "bundled" / name
    return installed_folder if installed_folder.is_dir() else PACKAGE_FOLDER.parent / name


def get_software_version(distribution: str = "stackseg") -> str:
    """Return the version of the package, or the version in `pyproject.toml` for a Git clone that is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        project_metadata = tomllib.loads((PACKAGE_FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project_metadata["project"]["version"])
