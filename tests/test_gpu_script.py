"""`benchmarks/gpu.sh` is run on machines that are taken away at any second."""

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
# Prints rows as a benchmark does, and says elsewhere which are finished.
PYTHON = """#!/bin/sh
if [ "$1" = hatch_build.py ]; then exit; fi
for row in 1 2 3 4 5; do echo "| $$ | $row |"; echo "| $$ | $row |" >>"$FINISHED"; sleep 0.01; done
"""


@pytest.fixture
def in_place_of_python(tmp_path):
    """Write a script that is run wherever `gpu.sh` runs Python; returns the environment that says so."""

    def write(script):
        python = tmp_path / "python"
        python.write_text(script)
        python.chmod(0o755)
        known = {key: value for key, value in os.environ.items() if not key.startswith("STACKSEG")}
        return known | {"PYTHON": str(python)}

    return write


def run(environment, *arguments):
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_a_row_that_is_finished_outlives_the_script(tmp_path, in_place_of_python):
    finished, report = tmp_path / "finished", tmp_path / "out" / "report.md"
    finished.touch()
    environment = in_place_of_python(PYTHON) | {"FINISHED": str(finished)}
    command = [SCRIPT, "--device", "cpu", "--tiny", "--out", tmp_path / "out"]
    seconds = random.Random(0)
    for _ in range(20):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(seconds.uniform(0.02, 0.2))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The last step's process may be about to print; what it has said to be finished was printed before.
        rows = finished.read_text().splitlines()
        assert not rows or set(rows) <= set(report.read_text().splitlines())
    assert len(rows) > 20


# In a network of its own there is nothing but a loopback interface, which is down.
WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
RAISE_LOOPBACK = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x1))
os.execv(sys.argv[1], sys.argv[1:])
"""
NOTHING = "#!/bin/sh\ntrue\n"
USUAL_STEPS = ["machine", "check", "request", "script", "kits19", "labels", "clients", "engines", "tests"]
OTHER_STEPS = ["graphs", "loads", "profile"]


@pytest.mark.thorough
@pytest.mark.skipif(subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode != 0, reason="needs unshare")
def test_rows_of_every_step_outlive_twenty_cuts_without_a_network(tmp_path, in_place_of_python):
    finished, report = tmp_path / "finished", tmp_path / "out" / "report.md"
    environment = in_place_of_python(
        f"""#!/bin/bash
set -o pipefail
if [ "$1" = hatch_build.py ]; then exit; fi
{sys.executable} "$@" | while IFS= read -r row; do echo "$row"; echo "$row" >>"{finished}"; done
"""
    )
    finished.touch()
    chosen = random.Random(0)
    for _ in range(20):
        command = [*WITHOUT_NETWORK, sys.executable, "-c", RAISE_LOOPBACK, SCRIPT, "--device", "cpu", "--tiny"]
        process = subprocess.Popen(
            [*command, "--out", tmp_path / "out", *chosen.sample(USUAL_STEPS + OTHER_STEPS, 3)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # So many seconds are not enough for three steps.
        time.sleep(chosen.uniform(3, 25))
        process.kill()
        process.wait()
        rows = finished.read_text(encoding="utf-8").splitlines()
        assert not rows or set(rows) <= set(report.read_text(encoding="utf-8").splitlines())
    print(len(rows), "rows,", sum(row.startswith("|") for row in rows), "of tables")
    assert len(rows) > 20


def test_the_status_is_that_of_a_step_that_fails(tmp_path, in_place_of_python):
    environment = in_place_of_python(
        "#!/bin/sh\ncase $* in hatch_build.py) exit;; *engines*) echo broken >&2; exit 3;; esac\necho '| row |'\n"
    )
    steps = ["machine", "engines", "clients"]
    done = run(environment, "--device", "cpu", "--tiny", "--out", tmp_path / "out", *steps)
    assert done.returncode == 3
    assert done.stdout.count("| row |") == 2
    assert "    broken" in done.stdout


def test_the_most_important_steps_are_run_first(tmp_path, in_place_of_python):
    environment, options = in_place_of_python(NOTHING), ["--device", "cpu", "--tiny", "--out", tmp_path / "out"]
    told = run(environment, *options).stdout.splitlines()
    assert [line.removeprefix("## ").split()[0] for line in told if line.startswith("## ")] == USUAL_STEPS
    told = run(environment, *options, *OTHER_STEPS).stdout
    assert all(f"\n## {name}" in told for name in OTHER_STEPS)


def test_no_step_begins_without_time(tmp_path, in_place_of_python):
    environment = in_place_of_python(NOTHING) | {"SECONDS_IN_ALL": "5"}
    done = run(environment, "--device", "cpu", "--out", tmp_path / "out", "machine")
    assert (done.returncode, "Left out: no time." in done.stdout) == (1, True)


def test_a_step_that_does_not_exist_is_refused(tmp_path):
    done = run(os.environ, "--out", tmp_path / "out", "request", "reqeust")
    assert (done.returncode, done.stderr[:26]) == (2, "There is no step reqeust; ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("options", "precision"), [([], "bf16"), (["--device", "cpu"], "fp32")])
def test_random_weights_run_in_a_precision_that_is_set_as_their_labels_say_nothing(
    tmp_path, in_place_of_python, options, precision
):
    environment = in_place_of_python('#!/bin/sh\ncase $* in *kits19*) echo "in $STACKSEG_ENGINE__PRECISION";; esac\n')
    done = run(environment, *options, "--out", tmp_path / "out", "kits19")
    assert f"\nin {precision}\n" in done.stdout


def test_what_is_carried_is_for_the_python_that_is_named_and_leaves_torch_and_numpy_to_the_machine():
    wheels = runpy.run_path(str(ROOT / "benchmarks" / "wheels.py"))
    environment = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": ""}
    wanted = [
        "torch",
        "numpy",
        "old; python_version < '3.12'",
        "new; python_version >= '3.12'",
        "more; extra == 'more'",
    ]
    assert list(wheels["walk"](list(map(Requirement, wanted)), environment)) == ["new"]
