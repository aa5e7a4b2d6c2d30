"""`benchmarks/gpu.sh` is run on machines that are taken away at any second."""

import os
import random
import signal
import subprocess
import time

from paths import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
# Prints rows as a benchmark does, and says elsewhere which are finished.
PYTHON = """#!/bin/sh
if [ "$1" = hatch_build.py ]; then exit; fi
for row in 1 2 3 4 5; do echo "| $$ | $row |"; echo "| $$ | $row |" >>"$FINISHED"; sleep 0.01; done
"""


def test_a_row_that_is_finished_outlives_the_script(tmp_path):
    python, finished, report = tmp_path / "python", tmp_path / "finished", tmp_path / "out" / "report.md"
    python.write_text(PYTHON)
    python.chmod(0o755)
    finished.touch()
    environment = os.environ | {"PYTHON": str(python), "FINISHED": str(finished)}
    command = [SCRIPT, "--device", "cpu", "--tiny", "--out", tmp_path / "out"]
    seconds = random.Random(0)
    for _ in range(8):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(seconds.uniform(0.05, 0.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The last step's process may be about to print; what it has said to be finished was printed before.
        rows = finished.read_text().splitlines()
        assert not rows or set(rows) <= set(report.read_text().splitlines())
    assert len(rows) > 20


def test_the_status_is_that_of_a_step_that_fails(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\ncase $* in hatch_build.py) exit;; *engines*) echo broken >&2; exit 3;; esac\necho '| row |'\n"
    )
    python.chmod(0o755)
    command = [SCRIPT, "--device", "cpu", "--tiny", "--out", tmp_path / "out", "machine", "engines", "clients"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout.count("| row |") == 2
    assert "    broken" in done.stdout


def test_a_step_that_does_not_exist_is_refused(tmp_path):
    command = [SCRIPT, "--out", tmp_path / "out", "request", "reqeust"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:26]) == (2, "There is no step reqeust; ")
    assert not (tmp_path / "out").exists()
