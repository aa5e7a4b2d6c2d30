from __future__ import annotations

import sys
from pathlib import Path

import pytest
import stackseg_client
from stackseg_client.errors import ServiceNotStarted


def test_missing_program_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(ServiceNotStarted, match="pip install FOLDER_OF_STACKSEG") as caught, stackseg_client.local():
        pass
    assert str(tmp_path) in str(caught.value)


def test_refused_settings_are_quoted() -> None:
    expected = pytest.raises(ServiceNotStarted, match=r"status 2[\s\S]*windows\.overlop")
    with expected, stackseg_client.local(windows={"overlop": 0.5}):
        pass


def test_slow_start_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "stackseg"
    program.write_text(f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    program.chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(ServiceNotStarted, match="not ready") as caught, stackseg_client.local(start_seconds=2):
        pass
    pid = str(caught.value).split()[-1]
    assert pid.isdigit()
    assert not Path("/proc", pid).exists()
