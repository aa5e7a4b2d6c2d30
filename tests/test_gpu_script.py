"""`benchmarks/gpu.sh` keeps its finished results when it is killed, and runs its steps in order of importance."""

import os
import random
import runpy
import signal
import subprocess
import sys
import time

import pytest
from packaging.requirements import Requirement
from paths import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
# Stands in for Python: prints rows like a benchmark, and records each printed row in the file FINISHED.
FAKE_PYTHON = """#!/bin/sh
if [ "$1" = hatch_build.py ]; then exit; fi
for row in 1 2 3 4 5; do echo "| $$ | $row |"; echo "| $$ | $row |" >>"$FINISHED"; sleep 0.01; done
"""


@pytest.fixture
def replace_python(tmp_path):
    """Return a function that makes `gpu.sh` run a given script instead of Python, by the environment it returns."""

    def write(script):
        python = tmp_path / "python"
        python.write_text(script)
        python.chmod(0o755)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("STACKSEG")}
        return environment | {"PYTHON": str(python)}

    return write


def run(environment, *arguments):
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_finished_rows_are_in_the_report_after_the_script_is_killed(tmp_path, replace_python):
    finished, report = tmp_path / "finished", tmp_path / "out" / "report.md"
    finished.touch()
    environment = replace_python(FAKE_PYTHON) | {"FINISHED": str(finished)}
    command = [SCRIPT, "--device", "cpu", "--tiny", "--out", tmp_path / "out"]
    rng = random.Random(0)
    for _ in range(20):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(rng.uniform(0.02, 0.2))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Rows are recorded as finished after they are printed, so the report must have all finished rows.
        rows = finished.read_text().splitlines()
        assert not rows or set(rows) <= set(report.read_text().splitlines())
    assert len(rows) > 20


# A new network namespace has only a loopback interface, which is down.
WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
ENABLE_LOOPBACK = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x1))
os.execv(sys.argv[1], sys.argv[1:])
"""
NO_OUTPUT = "#!/bin/sh\ntrue\n"
DEFAULT_STEPS = ["machine", "check", "request", "script", "kits19", "labels", "clients", "engines", "tests"]
OPTIONAL_STEPS = ["graphs", "loads", "profile"]


@pytest.mark.thorough
@pytest.mark.skipif(subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode != 0, reason="needs unshare")
def test_finished_rows_of_real_steps_survive_repeated_kills_without_network(tmp_path, replace_python):
    finished, report = tmp_path / "finished", tmp_path / "out" / "report.md"
    environment = replace_python(
        f"""#!/bin/bash
set -o pipefail
if [ "$1" = hatch_build.py ]; then exit; fi
{sys.executable} "$@" | while IFS= read -r row; do echo "$row"; echo "$row" >>"{finished}"; done
"""
    )
    finished.touch()
    rng = random.Random(0)
    for _ in range(20):
        command = [*WITHOUT_NETWORK, sys.executable, "-c", ENABLE_LOOPBACK, SCRIPT, "--device", "cpu", "--tiny"]
        process = subprocess.Popen(
            [*command, "--out", tmp_path / "out", *rng.sample(DEFAULT_STEPS + OPTIONAL_STEPS, 3)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Three steps take longer than this.
        time.sleep(rng.uniform(3, 25))
        process.kill()
        process.wait()
        rows = finished.read_text(encoding="utf-8").splitlines()
        assert not rows or set(rows) <= set(report.read_text(encoding="utf-8").splitlines())
    print(len(rows), "rows,", sum(row.startswith("|") for row in rows), "of tables")
    assert len(rows) > 20


def test_exit_status_is_that_of_the_failed_step(tmp_path, replace_python):
    environment = replace_python(
        "#!/bin/sh\ncase $* in hatch_build.py) exit;; *engines*) echo broken >&2; exit 3;; esac\necho '| row |'\n"
    )
    steps = ["machine", "engines", "clients"]
    process = run(environment, "--device", "cpu", "--tiny", "--out", tmp_path / "out", *steps)
    assert process.returncode == 3
    assert process.stdout.count("| row |") == 2
    assert "    broken" in process.stdout


def test_default_steps_run_in_order_of_importance(tmp_path, replace_python):
    environment, options = replace_python(NO_OUTPUT), ["--device", "cpu", "--tiny", "--out", tmp_path / "out"]
    output = run(environment, *options).stdout.splitlines()
    assert [line.removeprefix("## ").split()[0] for line in output if line.startswith("## ")] == DEFAULT_STEPS
    output = run(environment, *options, *OPTIONAL_STEPS).stdout
    assert all(f"\n## {name}" in output for name in OPTIONAL_STEPS)


def test_step_is_skipped_if_no_time_is_left(tmp_path, replace_python):
    environment = replace_python(NO_OUTPUT) | {"SECONDS_IN_ALL": "5"}
    process = run(environment, "--device", "cpu", "--out", tmp_path / "out", "machine")
    assert (process.returncode, "Skipped: no time left." in process.stdout) == (1, True)


def test_unknown_step_is_refused(tmp_path):
    process = run(os.environ, "--out", tmp_path / "out", "request", "reqeust")
    assert (process.returncode, process.stderr[:23]) == (2, "Unknown step: reqeust. ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("options", "precision"), [([], "bf16"), (["--device", "cpu"], "fp32")])
def test_precision_is_fixed_for_random_weights_whose_labels_cannot_be_verified(
    tmp_path, replace_python, options, precision
):
    environment = replace_python('#!/bin/sh\ncase $* in *kits19*) echo "in $STACKSEG_ENGINE__PRECISION";; esac\n')
    process = run(environment, *options, "--out", tmp_path / "out", "kits19")
    assert f"\nin {precision}\n" in process.stdout


def test_requirements_are_for_the_given_python_version_and_exclude_torch_and_numpy():
    wheels = runpy.run_path(str(ROOT / "benchmarks" / "wheels.py"))
    environment = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": ""}
    requirements = [
        "torch",
        "numpy",
        "old; python_version < '3.12'",
        "new; python_version >= '3.12'",
        "more; extra == 'more'",
    ]
    assert list(wheels["walk_dependencies"](list(map(Requirement, requirements)), environment)) == ["new"]
