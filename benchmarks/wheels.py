"""Prepare the wheels that `benchmarks/gpu.sh --collect` downloads for a machine without network access.

python benchmarks/wheels.py 3.12               print the pinned requirements for this Python version, one per line
python benchmarks/wheels.py --repack WHEELS    remove unused codecs from the imagecodecs wheel in a folder
python benchmarks/wheels.py --size WHEELS      print the size of everything to be copied, and fail if it is too large

The requirements are the dependencies in pyproject.toml and their transitive dependencies, according to the metadata of
the packages installed here. constraints.txt pins their versions. The machine itself provides Python, torch and NumPy.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path, PurePosixPath
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# The torch of the machine matches its driver, and its other libraries were built for its NumPy.
PROVIDED_PACKAGES = {"torch", "numpy"}
# Extension modules of imagecodecs for the codecs of TIFF (without JPEG), Zarr and PNG. `_imcd` has LZW, PackBits and
# the predictors, `_deflate` has gzip. All modules import the two shared ones.
EXTENSION_MODULES = {
    "_blosc",
    "_bz2",
    "_deflate",
    "_imcd",
    "_lz4",
    "_png",
    "_shared",
    "_shared_cython",
    "_zlib",
    "_zstd",
}
# Maximum size of the files that the GPU machine accepts.
MAX_CARRIED_MIB = float(os.environ.get("MAX_CARRIED_MIB", "64"))
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("python", nargs="?", help="Python version, such as 3.12")
    action.add_argument("--repack", type=Path, metavar="WHEELS")
    action.add_argument("--size", type=Path, metavar="WHEELS")
    options = parser.parse_args()
    if options.repack:
        for wheel in sorted(options.repack.glob("imagecodecs-*.whl")):
            repack(wheel)
    elif options.size:
        check_size(options.size)
    else:
        print_pins(options.python)


def print_pins(python: str) -> None:
    """Print the pinned requirements for a Python version."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = set(walk_dependencies(list(map(Requirement, project["dependencies"])), environment))
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = Requirement(line)
        if canonicalize_name(pin.name) in needed and (pin.marker is None or pin.marker.evaluate(environment)):
            print(f"{pin.name}{pin.specifier}")


def walk_dependencies(requirements: list[Requirement], environment: dict[str, str]) -> Iterator[str]:
    """Yield the names of packages and of their dependencies, each once, except for those that the machine provides."""
    visited, pending = set(PROVIDED_PACKAGES), list(requirements)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in visited or (requirement.marker is not None and not requirement.marker.evaluate(environment)):
            continue
        visited.add(name)
        yield name
        try:
            pending += map(Requirement, requires(name) or ())
        except PackageNotFoundError:
            # Packages that only the other Python version needs are not installed here.
            if requirement.marker is None or requirement.marker.evaluate():
                sys.exit(f"{name} is not installed. Use the Python of the project: PYTHON=.venv/bin/python")


def repack(wheel: Path) -> None:
    """Rewrite a wheel of imagecodecs with only `EXTENSION_MODULES` and the shared libraries that they link to.

    imagecodecs imports its extension modules on first use, and reports a codec as unavailable if its module is missing.
    """
    with ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist() if not entry.is_dir()}
        contents = {name: archive.read(name) for name in entries}
    kept = select_files(contents)
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
    contents[record] = filter_record(contents[record], kept)
    partial = wheel.with_suffix(".partial")
    with ZipFile(partial, "w") as archive:
        for name, entry in entries.items():
            if name in kept:
                archive.writestr(entry, contents[name], ZIP_DEFLATED, 9)
    partial.replace(wheel)


def select_files(contents: dict[str, bytes]) -> set[str]:
    """Return the names of all files except unused extension modules and the libraries that only those link to."""
    libraries = {name for name in contents if name.startswith("imagecodecs.libs/")}
    extensions = {name for name in contents if name.endswith(".so")} - libraries
    pending = [name for name in extensions if PurePosixPath(name).name.split(".")[0] in EXTENSION_MODULES]
    kept = set(contents) - libraries - extensions | set(pending)
    while pending:
        content = contents[pending.pop()]
        # A binary names a library that it links to in its string table. The hash in the name makes it unique.
        linked = {name for name in libraries - kept if PurePosixPath(name).name.encode() + b"\0" in content}
        kept |= linked
        pending += linked
    return kept


def filter_record(record: bytes, kept: set[str]) -> bytes:
    """Return a wheel's list of files and hashes without the files that were removed."""
    output = io.StringIO()
    rows = csv.reader(io.StringIO(record.decode("utf-8")))
    csv.writer(output, lineterminator="\n").writerows(row for row in rows if row and row[0] in kept)
    return output.getvalue().encode("utf-8")


def check_size(wheels: Path) -> None:
    """Print the size of the wheels, of the tracked files and of both; exit if they exceed `MAX_CARRIED_MIB`."""
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    tracked = [ROOT / name for name in listing.stdout.split("\0") if name]
    wheels_mib, tracked_mib = sum_mib(wheels.glob("*.whl")), sum_mib(tracked)
    total_mib = wheels_mib + tracked_mib
    print(f"wheels {wheels_mib:.1f} MiB + tracked files {tracked_mib:.1f} MiB = {total_mib:.1f} MiB")
    if total_mib > MAX_CARRIED_MIB:
        sys.exit(
            f"The wheels and the tracked files total {total_mib:.1f} MiB, but the GPU machine accepts only "
            f"{MAX_CARRIED_MIB:g} MiB. Copy fewer files, or set the environment variable MAX_CARRIED_MIB to the limit "
            "of your machine."
        )


def sum_mib(files: Iterable[Path]) -> float:
    """Return the total size of the files that exist."""
    return sum(file.lstat().st_size for file in files if file.is_file()) / 2**20


if __name__ == "__main__":
    main()
