"""Find the folders `models` and `configs` that come with the package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def bundled_folder(name: str) -> Path:
    """Return the bundled folder `name`: inside an installed package, or at the top of a clone."""
    installed = PACKAGE / "bundled" / name
    return installed if installed.is_dir() else PACKAGE.parent / name
