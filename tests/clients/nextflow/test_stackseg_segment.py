"""The Nextflow module calls the command line with options that exist.

The script of the process is evaluated by Groovy and run by bash, with a program that records the arguments in place of
`stackseg`. Needs Groovy (Debian's groovy), or a folder OTHER_READERS with `groovy-all.jar`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from service.__main__ import create_parser
from service.cli.segmentation.parameters import PARAMETERS
from service.core.files.bundled import get_software_version

FOLDER = ROOT / "clients" / "nextflow"
MODULE_FOLDER = FOLDER / "modules" / "stackseg" / "segment"
MODULE = (MODULE_FOLDER / "main.nf").read_text(encoding="utf-8")
JAR = Path(os.environ.get("OTHER_READERS", "/usr/share/java")) / "groovy-all.jar"
needs_groovy = pytest.mark.skipif(not JAR.exists() or shutil.which("java") is None, reason="needs Java and Groovy")

# Prints the script that the section of a process gives.
EVALUATION = """
def values = new groovy.json.JsonSlurper().parseText(args[0])
print new GroovyShell(new Binding(values)).evaluate(args[1])
"""
# Evaluates the body of the workflow with the functions of Nextflow that it calls.
WORKFLOW_PROGRAM = """
def paths = args.drop(1).collect { java.nio.file.Paths.get(it) }
paths.each { it.metaClass.getName = { -> delegate.fileName.toString() }
  it.metaClass.getSimpleName = { -> delegate.fileName.toString().tokenize('.')[0] } }
def channel = new Expando(fromPath: { Map options, pattern -> new Expando(map: { paths.collect(it) }) })
def binding = new Binding(Channel: channel, params: [:], error: { throw new IllegalStateException(it as String) },
  STACKSEG_SEGMENT: { stacks -> stacks.each { println it[0].id } })
new GroovyShell(binding).evaluate(args[0])
"""
# Records its arguments, and answers `stackseg --version`.
RECORDER = """#!/bin/sh
[ "$1" = --version ] && { echo 0.1.0; exit; }
printf '%s\\n' "$@" >arguments.txt
"""


def evaluate(section: str, meta: str, ext: str = "{}") -> str:
    """Return the shell script of a section of the process. `meta` and `ext` are JSON objects."""
    body = MODULE[MODULE.index(f"\n    {section}:\n") :].split(":\n", 1)[1]
    end = re.search(r"\n    (?:stub:\n|\}$)|\n\}\s*$", body)
    assert end is not None
    task = f'{{"cpus": 3, "process": "STACKSEG_SEGMENT", "ext": {ext}}}'
    # Nextflow escapes the names of files in scripts.
    values = f'{{"meta": {meta}, "task": {task}, "stack": "my\\\\ stack\\\\ \\\\(1\\\\).tif"}}'
    command = ["java", "-cp", str(JAR), "groovy.ui.GroovyMain", "-e", EVALUATION, values, body[: end.start()]]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def run_script(script: str, folder: Path) -> list[str]:
    """Run a script as Nextflow does, and return the arguments of `stackseg`."""
    program = folder / "bin" / "stackseg"
    program.parent.mkdir(exist_ok=True)
    program.write_text(RECORDER)
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    # Nextflow removes the common indentation of the lines.
    lines = "\n".join(line.removeprefix("    ") for line in script.splitlines())
    subprocess.run(["bash", "-ue", "-c", lines], cwd=folder, env=environment, check=True, timeout=30)
    arguments = folder / "arguments.txt"
    return arguments.read_text().splitlines() if arguments.exists() else []


def parse(arguments: list[str]) -> dict[str, Any]:
    options = vars(create_parser().parse_args(arguments))
    return {name: str(options[name]) for name in ("input", "result", "measurements", *PARAMETERS) if options[name]}


@needs_groovy
def test_script_calls_the_command_line(tmp_path: Path) -> None:
    meta = '{"id": "a b", "model": "nuclei", "channel": 0, "voxel_size": "0.5,0.2,0.2", "diameter": "15px"}'
    script = evaluate("script", meta, '{"args": "--border drop --quality best"}')
    assert parse(run_script(script, tmp_path)) == {
        "input": "my stack (1).tif",
        "result": "a b_labels.ome.tif",
        "measurements": "a b_objects.csv",
        "model": "nuclei",
        "channel": "0",
        "voxel_size": "0.5,0.2,0.2",
        "diameter": "15px",
        "border": "drop",
        "quality": "best",
    }
    versions = yaml.safe_load((tmp_path / "versions.yml").read_text())
    assert versions == {"STACKSEG_SEGMENT": {"stackseg": "0.1.0"}}


def list_ids(*paths: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow with stacks, and print their ids."""
    text = (FOLDER / "main.nf").read_text(encoding="utf-8")
    body = text[text.index("workflow {") + len("workflow {") : text.rindex("}")]
    command = ["java", "-cp", str(JAR), "groovy.ui.GroovyMain", "-e", WORKFLOW_PROGRAM, body, *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@needs_groovy
def test_results_of_several_stacks_have_different_names() -> None:
    run = list_ids("a/scan.1.tif", "a/scan.2.tif", "a/scan.1.czi")
    assert run.stdout.split() == ["scan.1.tif", "scan.2.tif", "scan.1.czi"], run.stderr
    run = list_ids("a/scan.tif", "b/scan.tif")
    assert "Several stacks have the name scan.tif" in run.stderr
    assert run.returncode == 1


@needs_groovy
def test_options_of_the_stack_may_be_missing(tmp_path: Path) -> None:
    script = evaluate("script", '{"id": "a"}', '{"prefix": "b"}')
    assert parse(run_script(script, tmp_path)) == {
        "input": "my stack (1).tif",
        "result": "b_labels.ome.tif",
        "measurements": "b_objects.csv",
    }


@needs_groovy
def test_stub_makes_all_outputs(tmp_path: Path) -> None:
    assert run_script(evaluate("stub", '{"id": "a"}'), tmp_path) == []
    patterns = re.findall(r'path\(?\s*"([^"]+)"', MODULE[MODULE.index("output:") : MODULE.index("when:")])
    assert len(patterns) == 3
    assert all(len(list(tmp_path.glob(pattern))) == 1 for pattern in patterns)


def test_module_and_its_description_agree() -> None:
    description = yaml.safe_load((MODULE_FOLDER / "meta.yml").read_text(encoding="utf-8"))
    outputs = re.findall(r"emit: (\w+)", MODULE)
    assert list(description["output"]) == outputs == ["labels", "table", "versions"]
    assert f'container "stackseg:{get_software_version()}-workflows"' in MODULE
    options = {name.replace("-", "_") for name in re.findall(r'"--([a-z-]+) \'\$\{meta', MODULE)}
    assert options == set(re.findall(r"`(\w+)`", description["input"][0][0]["meta"]["description"])) & options
    assert len(options) == 4 < len(PARAMETERS)
    assert options < set(PARAMETERS)
    config = (FOLDER / "nextflow.config").read_text(encoding="utf-8")
    assert options < set(re.findall(r"^    (\w+) +=", config, re.MULTILINE))
