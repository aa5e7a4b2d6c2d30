"""Tests of the files around the code: presets, pinned versions, make targets, container files, documents."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaml
from paths import ROOT

from service.core.config import Settings, read_settings

PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
DOCUMENT_PATTERNS = ("*.md", "docs/**/*.md", "models/*/*.md", "clients/*/*.md")
DOCUMENTS = sorted(path for pattern in DOCUMENT_PATTERNS for path in ROOT.glob(pattern))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
MAX_LINE_CHARACTERS = 120


def list_anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def read_yaml(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def flatten(sections: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return the values of a configuration by (section, key)."""
    return {(section, key): value for section, keys in sections.items() for key, value in keys.items()}


def normalize_name(name: str) -> str:
    """Normalize the name of a Python project, as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins() -> dict[str, set[str]]:
    """Return the pinned versions of each project. Ranges of Python versions may have different pins."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)( ; .+)?", line)
        assert match is not None, line
        found.setdefault(match[1], set()).add(match[2])
    return found


def list_dependencies() -> set[str]:
    """Return the names of all declared dependencies, including those of the extras."""
    extras = [name for extra in PROJECT["optional-dependencies"].values() for name in extra]
    names = {normalize_name(re.split(r"[<>=!~\[ ]", line)[0]) for line in [*PROJECT["dependencies"], *extras]}
    return names - {PROJECT["name"]}


def test_default_preset_contains_every_key_with_its_default() -> None:
    assert flatten(read_yaml(ROOT / "configs" / "default.yaml")) == flatten(Settings().model_dump(mode="json"))
    assert read_settings(ROOT / "configs" / "default.yaml", {}) == Settings()


def test_default_preset_has_a_comment_for_every_key() -> None:
    text = (ROOT / "configs" / "default.yaml").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("  ") and " # " not in line] == []


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_only_contain_keys_that_differ_from_the_default(path: Path) -> None:
    chosen = flatten(read_settings(path, {}).model_dump(mode="json"))
    defaults = flatten(Settings().model_dump(mode="json"))
    if path.stem != "default":
        assert flatten(read_yaml(path)) == {key: value for key, value in chosen.items() if value != defaults[key]}


def test_dependencies_are_pinned_and_installed_in_the_pinned_versions() -> None:
    pinned = read_pins()
    assert list_dependencies() <= pinned.keys()
    # Ray is only installed for `make test-all`.
    for name in sorted(list_dependencies() - {"ray"}):
        installed = version(name).partition("+")[0]
        assert installed in pinned[name], f"{name} {installed} is installed, {pinned[name]} pinned"


def test_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="stackseg")
    assert command.load().__module__ == "service.__main__"


def test_wheel_contains_models_and_presets_where_the_service_finds_them(tmp_path: Path) -> None:
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["only-include"]) == {"service", *wheel["sources"]}
    for source, target in wheel["sources"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    shutil.copytree(ROOT / "service", tmp_path / "service", dirs_exist_ok=True)
    code = "import sys; from service.__main__ import main; sys.exit(main(['models', '--config', 'default']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    for model in ("membranes/1", "nuclei/1", "tissue/1"):
        assert model in done.stdout


RUN_COMMANDS_WITHOUT_EXTRAS = """
import json, sys
missing = set(sys.argv[1].split(","))
class HidingFinder:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *args):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, *args)
sys.meta_path[:] = map(HidingFinder, sys.meta_path)
import service.api.server
from service.__main__ import main
for command in json.loads(sys.argv[2]):
    print(main(command), file=sys.stderr)
"""
# The extra that each command requires.
REQUIRED_EXTRAS = {
    "segment stack.tif labels.zarr": "zarr",
    "segment . -o results --format zarr": "zarr",
    "segment s3://stacks/a.zarr labels.tif": "remote",
    "segment stack.tif labels.tif --link laptrack --time all": "laptrack",
    "evaluate nowhere": "train",
    "train --images a.tif --labels b.tif --out c": "train",
    "bench --plot a.png": "demo",
    "serve --config cluster": "ray",
}


def test_commands_without_their_extra_name_the_extra_to_install(tmp_path: Path) -> None:
    extras = list_dependencies() - {
        normalize_name(re.split(r"[<>=!~;\[ ]", line)[0]) for line in PROJECT["dependencies"]
    }
    modules = [
        module for module, names in packages_distributions().items() if extras & {normalize_name(n) for n in names}
    ]
    assert {"matplotlib", "openvino", "skimage", "zarr"} <= set(modules)
    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((8, 16, 16), np.uint8), metadata={"axes": "ZYX"})
    commands = json.dumps(
        [command.split() for command in [*REQUIRED_EXTRAS, "segment stack.tif labels.tif --model tissue"]]
    )
    code = [sys.executable, "-c", RUN_COMMANDS_WITHOUT_EXTRAS, ",".join([*modules, "ray"]), commands]
    done = subprocess.run(
        code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    lines = done.stderr.splitlines()
    for (command, extra), message, status in zip(REQUIRED_EXTRAS.items(), lines[::2], lines[1::2], strict=False):
        assert f"pip install 'stackseg[{extra}]'" in message, (command, message)
        assert status in {"1", "2"}
    assert lines[-1] == "0", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.tif", "stack.tif"]
    assert tifffile.imread(tmp_path / "labels.tif").shape == (8, 16, 16)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_every_target() -> None:
    targets = re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = subprocess.run(
        ["make", "--no-print-directory", "-C", ROOT, "help"], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == targets


def run_setup(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup.sh in `folder`, with only the commands of the system in PATH."""
    (folder / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    environment = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_setup_refuses_unsupported_python_versions(tmp_path: Path) -> None:
    done = run_setup(tmp_path, "run", PYTHON="/bin/false")
    assert done.returncode != 0
    assert (
        "StackSeg needs Python 3.11, 3.12 or 3.13. No suitable interpreter was found. Tried: /bin/false." in done.stderr
    )
    assert not (tmp_path / ".venv").exists()


def test_setup_refuses_unknown_dependency_sets(tmp_path: Path) -> None:
    done = run_setup(tmp_path, "everything")
    assert done.returncode == 2
    assert "choose run, demo, dev or ray" in done.stderr


def test_docker_context_contains_exactly_the_files_that_the_image_copies() -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    sources = [source for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()]
    assert {source if source in allowed else source.partition("/")[0] for source in sources} == set(allowed)
    for source in sources:
        assert "${VARIANT}" in source or (ROOT / source).exists()


@pytest.mark.parametrize(("file", "variant"), [("compose.yaml", "gpu"), ("compose.cpu.yaml", "cpu")])
def test_compose_files_build_existing_variants(file: str, variant: str) -> None:
    service = read_yaml(ROOT / "docker" / file)["services"]["stackseg"]
    assert service["build"]["args"]["VARIANT"] == variant
    assert (ROOT / "configs" / f"{variant}.yaml").exists()
    assert f":{PROJECT['version']}" in service["image"]


def test_compose_reserves_a_gpu_and_the_preset_uses_it() -> None:
    reserved = read_yaml(ROOT / "docker" / "compose.yaml")["services"]["stackseg"]["deploy"]["resources"][
        "reservations"
    ]
    assert reserved["devices"] == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert read_settings(ROOT / "configs" / "gpu.yaml", {}).device.name == "cuda"


def test_image_requires_the_cuda_version_of_the_pinned_torch() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^cuda-toolkit==(\d+\.\d+)", constraints, re.MULTILINE)
    assert pinned is not None
    assert f"ARG CUDA={pinned[1]}\nENV NVIDIA_REQUIRE_CUDA=cuda>=${{CUDA}}\n" in DOCKERFILE


def test_image_and_compose_agree_with_the_settings() -> None:
    variables = dict(re.findall(r"^\s*(?:ENV )?(STACKSEG_\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    server = read_settings(None, variables).server
    service = read_yaml(ROOT / "docker" / "compose.cpu.yaml")["services"]["stackseg"]
    assert server.host == "0.0.0.0"
    assert f"EXPOSE {server.port}" in DOCKERFILE
    assert service["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    assert float(service["stop_grace_period"].removesuffix("s")) > server.drain_seconds
    assert str(server.scratch_folder) in DOCKERFILE.split("VOLUME ")[1]


def test_image_does_not_run_as_root() -> None:
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert len(user) == 1
    assert "0" not in user[0]


def test_newest_changelog_entry_is_the_current_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == PROJECT["version"] == version("stackseg")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_are_valid(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text(encoding="utf-8"))
    for target, anchor in links:
        if "://" in target:
            continue
        document = path.parent / target if target else path
        assert document.exists(), target
        assert not anchor or anchor in list_anchors(document), f"{target}#{anchor}"


def test_documents_that_code_and_settings_refer_to_exist() -> None:
    sources = [*ROOT.glob("service/**/*.py"), *ROOT.glob("service/**/*.js"), *ROOT.glob("configs/*.yaml")]
    references = {name for path in sources for name in re.findall(r"docs/\w+\.md", path.read_text(encoding="utf-8"))}
    assert references
    assert [name for name in sorted(references) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_documents_are_at_most_120_characters_long(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE_CHARACTERS] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_named_in_documents_exist(path: Path) -> None:
    sections = "|".join(Settings.model_fields)
    named = set(re.findall(rf"`({sections})\.(\w+)`", path.read_text(encoding="utf-8")))
    assert named <= flatten(Settings().model_dump()).keys()
