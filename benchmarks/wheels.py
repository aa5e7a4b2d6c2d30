"""Pins of what StackSeg needs when it runs on a machine that brings Python, torch and NumPy, one per line.

python benchmarks/wheels.py 3.12

By the dependencies in pyproject.toml, the metadata of what is installed here, and constraints.txt, for the Python that
is named.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Of the machine: torch, which was built for its driver, and NumPy, for which other libraries there were built.
BROUGHT = {"torch", "numpy"}
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    environment = {**default_environment(), "python_version": sys.argv[1], "python_full_version": f"{sys.argv[1]}.0"}
    environment["extra"] = ""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    needed = set(walk(list(map(Requirement, stated)), environment))
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = Requirement(line)
        if canonicalize_name(pin.name) in needed and (pin.marker is None or pin.marker.evaluate(environment)):
            print(f"{pin.name}{pin.specifier}")


def walk(requirements: list[Requirement], environment: dict[str, str]) -> Iterator[str]:
    """Yield the names of packages and of all that they need there, each once."""
    seen, left = set(BROUGHT), list(requirements)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker is not None and not requirement.marker.evaluate(environment)):
            continue
        seen.add(name)
        yield name
        # What only another Python than this one needs is not installed here.
        with suppress(PackageNotFoundError):
            left += map(Requirement, requires(name) or ())


if __name__ == "__main__":
    main()
