"""Tests that downloads are pinned and checked: hashes of Python and npm packages, and the digest of the base image."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
HASH = r"--hash=sha256:[0-9a-f]{64}"


def read_hashes(text: str) -> dict[str, set[str]]:
    """Return the hashes of each pin, which may end with a marker."""
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", text.replace("\\\n", " "))]
    found = [re.fullmatch(rf"([a-z0-9-]+==\S+(?: ; .+?)?)((?: {HASH})+)", entry) for entry in entries]
    assert None not in found, [entry for entry, match in zip(entries, found, strict=True) if match is None]
    return {match[1]: set(match[2].split()) for match in found if match}


def list_requirements() -> list[Requirement]:
    """Return everything that pyproject.toml asks for: dependencies, extras, groups and the build backend."""
    project = PYPROJECT["project"]
    groups = [*project["optional-dependencies"].values(), *PYPROJECT["dependency-groups"].values()]
    lines = [
        *project["dependencies"],
        *PYPROJECT["build-system"]["requires"],
        *(line for group in groups for line in group),
    ]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != project["name"]]


def make_wheel(folder: Path, name: str, release: str) -> str:
    """Write an empty package, and return its pin with its hash, without a local version."""
    metadata = f"{name}-{release}.dist-info"
    path = folder / f"{name}-{release}-py3-none-any.whl"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")
    return (
        f"{name}=={release.partition('+')[0]} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
    )


def install(folder: Path, pins: str, package: str) -> subprocess.CompletedProcess[str]:
    """Install a package from the wheels in `folder` into `folder`/target."""
    (folder / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "install.sh", folder / "scripts")
    pip = f"pip=={version('pip')} \\\n    --hash=sha256:{'0' * 64}\n"
    (folder / "hashes.txt").write_text(pip + pins, encoding="utf-8")
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    environment.pop("PIP_CONSTRAINT", None)
    command = ["sh", script, sys.executable, "--target", folder / "target", package]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def list_installed(folder: Path) -> list[str]:
    return [path.name.removesuffix(".dist-info") for path in (folder / "target").glob("*.dist-info")]


def test_every_pinned_package_has_a_hash() -> None:
    hashes = read_hashes((ROOT / "hashes.txt").read_text(encoding="utf-8"))
    assert list(hashes) == (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_pins_satisfy_everything_that_the_project_requires() -> None:
    pinned: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, release = line.split(" ;")[0].split("==")
        pinned.setdefault(name, []).append(release)
    for requirement in list_requirements():
        releases = pinned.get(canonicalize_name(requirement.name), [])
        assert releases, requirement
        assert all(requirement.specifier.contains(release) for release in releases), (str(requirement), releases)


def test_build_backend_is_the_pinned_one() -> None:
    assert set(PYPROJECT["build-system"]["requires"]) <= set(PYPROJECT["dependency-groups"]["build"])


def test_install_accepts_files_with_a_listed_hash(tmp_path: Path) -> None:
    done = install(tmp_path, make_wheel(tmp_path, "tool", "1.0"), "tool")
    assert done.returncode == 0, done.stderr
    assert list_installed(tmp_path) == ["tool-1.0"]


def test_install_refuses_changed_files(tmp_path: Path) -> None:
    pin = make_wheel(tmp_path, "tool", "1.0")
    with ZipFile(tmp_path / "tool-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("tool.py", "import os")
    done = install(tmp_path, pin, "tool")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert list_installed(tmp_path) == []


def test_install_refuses_packages_without_a_hash(tmp_path: Path) -> None:
    make_wheel(tmp_path, "other", "1.0")
    done = install(tmp_path, make_wheel(tmp_path, "tool", "1.0"), "other")
    assert done.returncode != 0
    assert list_installed(tmp_path) == []


@pytest.mark.parametrize("builds", [["2.0"], ["2.0", "2.0+cpu"]])
def test_install_selects_the_cpu_build_of_torch_if_it_is_available(tmp_path: Path, builds: list[str]) -> None:
    pins = [make_wheel(tmp_path, "torch", build) for build in builds]
    hashes = " ".join(line for pin in pins for line in re.findall(HASH, pin))
    done = install(tmp_path, f"torch==2.0 {hashes}\n", "torch")
    assert done.returncode == 0, done.stderr
    assert list_installed(tmp_path) == [f"torch-{builds[-1]}"]


UV = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    --output-file) output=$2 ;;
    # The writer of a pipe must not fail because its reader has ended early.
    -) packages=$(cat) ;;
  esac
  shift
done
if [ -n "${output:-}" ]; then
  printf '%s \\\\\\n    --hash=sha256:%s\\n' 'a==1 ; python_full_version < "3.12"' A torch==2 CUDA >"$output"
else
  printf '%s \\\\\\n    --hash=sha256:X86 \\\\\\n    --hash=sha256:ARM\\n' "$packages"
fi
"""


def test_lock_contains_the_hashes_of_both_builds_of_torch(tmp_path: Path) -> None:
    for folder in ("bin", "scripts", "clients/napari"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "constraints.sh", tmp_path / "scripts")
    (tmp_path / "bin" / "uv").write_text(UV, encoding="utf-8")
    (tmp_path / "bin" / "uv").chmod(0o755)
    subprocess.run(["bash", script], env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, check=True)
    lines = [line.strip(" \\") for line in (tmp_path / "hashes.txt").read_text(encoding="utf-8").splitlines()]
    torch = ["torch==2", *(f"--hash=sha256:{build}" for build in ("X86", "ARM", "CUDA"))]
    assert lines == ['a==1 ; python_full_version < "3.12"', "--hash=sha256:A", *torch]
    assert (tmp_path / "clients" / "napari" / "test-hashes.txt").is_file()
    assert (tmp_path / "constraints.txt").read_text() == 'a==1 ; python_full_version < "3.12"\ntorch==2\n'


def test_scripts_and_image_do_not_install_packages_without_hashes() -> None:
    paths = [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "docker" / "Dockerfile", *ROOT.glob("scripts/*.sh")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths).replace("\\\n", " ")
    commands = re.split(r"&&|\n", re.sub(r"(^#|\s#|.*echo \").*|^pip_install\(\).*", "", text, flags=re.MULTILINE))
    installs = [
        line.strip() for line in commands if re.search(r"\bpip\"? (install|wheel|download)|\bpip_install ", line)
    ]
    unchecked = [line for line in installs if not re.search(r"--require-hashes|--no-deps|--no-index", line)]
    # torch for other CUDA versions: docs/security.md explains why.
    assert len(unchecked) == 1
    assert '--index-url "https://download.pytorch.org/whl/cu${CUDA%.*}${CUDA#*.}"' in unchecked[0]
    assert len(installs) > 5
    assert [line for line in commands if re.search(r"\bnpm (install|i|ci)\b(?!.*--package-lock-only)", line)] == [
        "\tnpm ci --ignore-scripts --no-audit --no-fund"
    ]


def test_image_starts_from_a_digest() -> None:
    assert re.search(r"^ARG BASE=debian:bookworm-slim@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    assert [line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("FROM ")] == ["${BASE}"] * 2


def read_npm_packages() -> dict[str, dict[str, Any]]:
    packages = json.loads((ROOT / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    return {path.removeprefix("node_modules/"): package for path, package in packages.items()}


def test_npm_packages_have_exact_versions_and_hashes() -> None:
    tools = json.loads((ROOT / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    packages = read_npm_packages()
    assert packages.pop("")["devDependencies"] == tools
    assert {name: packages[name]["version"] for name in tools} == tools
    for name, package in packages.items():
        algorithm, _, digest = package["integrity"].partition("-")
        assert algorithm == "sha512", name
        assert len(base64.b64decode(digest)) == hashlib.sha512().digest_size
        assert "resolved" not in package, "run `make page-lock`, which leaves out the address of the registry"
