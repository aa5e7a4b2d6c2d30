"""Settings: the file, the environment above it, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from service.core.config import PREFIX, Settings, override_settings, read_settings
from service.core.errors import ConfigError

HASH = "sha256:" + 64 * "0"
KEYS = [(section, key) for section, keys in Settings().model_dump().items() for key in keys]


def variable(section: str, key: str) -> str:
    return f"{PREFIX}{section}__{key}".upper()


def write(folder: Path, content: Any) -> Path:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_limits_are_documented_with_their_defaults() -> None:
    document = Path(__file__).parents[2] / "docs/security.md"
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| ([\d.]+)( GiB)? \|", document.read_text(encoding="utf-8"), re.MULTILINE)
    defaults = Settings().model_dump()
    for section, key, number, unit in rows:
        assert float(number) * (2**30 if unit else 1) == defaults[section][key], f"{section}.{key}"
    assert {key for section, key, *_ in rows if section == "limits"} == defaults["limits"].keys()


def test_environment_of_the_process_counts_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKSEG_SERVER__PORT", "8123")
    assert read_settings().server.port == 8123
    assert read_settings(None, {}).server.port == Settings().server.port


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_key_is_read_from_file_and_environment(section: str, key: str, tmp_path: Path) -> None:
    default = Settings().model_dump(mode="json")[section][key]
    assert read_settings(write(tmp_path, {section: {key: default}}), {}) == Settings()
    assert read_settings(None, {variable(section, key): yaml.safe_dump(default)}) == Settings()


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("cuda:1", "device", "name", "cuda:1"),
        ("[cuda:0, cuda:1]", "device", "serve", ("cuda:0", "cuda:1")),
        ("[nuclei, bands]", "models", "serve", ("nuclei", "bands")),
        ("0", "limits", "waiting", 0),
        ("0.5", "windows", "overlap", 0.5),
        ("false", "engine", "channels_last", False),
        ("/var/cache/stackseg", "engine", "cache_folder", Path("/var/cache/stackseg")),
        ("null", "server", "scratch_folder", None),
        ("warning", "logging", "level", "warning"),
        (f"{{ada: {HASH}}}", "access", "keys", {"ada": HASH}),
        ("['*.example.org', '::1']", "access", "hosts", ("*.example.org", "::1")),
        ("[https://example.org:8443]", "access", "origins", ("https://example.org:8443",)),
    ],
)
def test_variables_are_read_as_yaml(text: str, section: str, key: str, value: Any) -> None:
    settings = read_settings(None, {variable(section, key): text})
    assert getattr(getattr(settings, section), key) == value


def test_variable_overrides_one_key_and_leaves_its_neighbours(tmp_path: Path) -> None:
    path = write(tmp_path, {"windows": {"overlap": 0.5, "sw_batch_size": 8}, "server": {"port": 9000}})
    settings = read_settings(path, {"STACKSEG_WINDOWS__OVERLAP": "0.125"})
    assert (settings.windows.overlap, settings.windows.sw_batch_size, settings.server.port) == (0.125, 8, 9000)


def test_other_variables_are_none_of_our_business() -> None:
    assert read_settings(None, {}) == Settings()
    assert read_settings(None, {"WINDOWS__OVERLAP": "2", "PATH": "/bin", "MYSTACKSEG_DEVICE__NAME": "?"}) == Settings()


@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", max_size=30))
def test_misspelt_variable_is_refused_by_name(rest: str) -> None:
    name = PREFIX + rest
    if name in {variable(*key) for key in KEYS}:
        return
    with pytest.raises(ConfigError, match=f"^{name}: there is no such setting"):
        read_settings(None, {name: "1"})


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_misspelt_key_is_refused_by_name(section: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}x: "):
        read_settings(write(tmp_path, {section: {key + "x": 1}}), {})


@pytest.mark.parametrize("content", [{"windos": {}}, {1: {}}, {"windows": {2: 3}}, {True: {"overlap": 0.5}}])
def test_unknown_sections_and_keys_that_are_no_words_are_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The configuration is not understood: "):
        read_settings(write(tmp_path, content), {})


IMPOSSIBLE = {
    "windows.overlap": ["1.0", "-0.1", ".nan"],
    "windows.sigma": ["0"],
    "windows.skip_below": ["dark", ".inf"],
    "windows.sw_batch_size": ["0", "2.5"],
    "windows.blending": ["triangle"],
    "device.name": ["gpu", "cuda:"],
    "device.serve": ["[cuda]"],
    "engine.precision": ["int8"],
    "limits.upload_bytes": ["4 GB"],
    "limits.waiting": ["-1"],
    "server.port": ["65536", ""],
    "logging.level": ["loud"],
    "logging.format": ["xml"],
    "access.requests_per_minute": ["-1"],
    # They could never match.
    "access.keys": ["{ada: secret}", f"{{'two words': {HASH}}}"],
    "access.hosts": ["[https://example.org]", "['example.org:8000']", "['*']"],
    "access.origins": ["[example.org]", "[https://example.org/page]"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in IMPOSSIBLE.items() for text in texts])
def test_impossible_value_is_refused_with_its_key(name: str, text: str) -> None:
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=rf"not understood: {section}\.{key}: "):
        read_settings(None, {variable(section, key): text})


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("device.serve", "[cuda:0, cuda:0]", "device: .*a GPU twice"),
        ("access.requests_per_minute", "60", "access: .*there are no keys"),
        ("windows.sw_batch_size", "33", "settings: windows.sw_batch_size exceeds limits.sw_batch_size"),
        ("windows.overlap", "0.8", "settings: windows.overlap exceeds limits.overlap"),
    ],
)
def test_value_that_contradicts_others_is_refused(name: str, text: str, fault: str) -> None:
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=f"understood: {fault}"):
        read_settings(None, {variable(section, key): text})
    if section == "windows":
        assert read_settings(None, {variable("windows", key): text, variable("limits", key): text})


def test_every_fault_is_told_at_once() -> None:
    environment = {"STACKSEG_WINDOWS__OVERLAP": "7", "STACKSEG_SERVER__PORT": "-1", "STACKSEG_DEVICE__NAME": "tpu"}
    with pytest.raises(ConfigError) as caught:
        read_settings(None, environment)
    for name in ("windows.overlap", "server.port", "device.name"):
        assert name in str(caught.value)


def test_one_section_is_overruled_and_checked_again() -> None:
    settings = override_settings(Settings(), "server", {"port": 9})
    assert (settings.server.port, settings.server.host) == (9, Settings().server.host)
    with pytest.raises(ConfigError, match=r"server\.port"):
        override_settings(Settings(), "server", {"port": -1})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("windows: [1, 2]", "expected sections"),
        ("- windows", "expected sections"),
        ("just words", "expected sections"),
        ("windows: {overlap: 0.5", "cannot be read as YAML"),
        ("windows: !!python/object:os.system {}", "cannot be read as YAML"),
    ],
)
def test_file_that_holds_no_sections_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"settings\.yaml: {reason}"):
        read_settings(path, {})


def test_missing_and_undecodable_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(
            ConfigError, match=rf"^{path}: there is no such file, and no .*: cluster, cpu, default, gpu\.$"
        ):
            read_settings(path, {})
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("logging: {level: caf\xe9}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: cannot be read"):
        read_settings(latin, {})


def test_preset_is_found_by_name_from_anywhere_unless_a_file_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(Path("cpu"), {}).device.name == "cpu"
    write(tmp_path, {"server": {"port": 9000}}).rename("cpu")
    assert read_settings(Path("cpu"), {}) == read_settings(None, {"STACKSEG_SERVER__PORT": "9000"})


@pytest.mark.parametrize("content", [None, {"windows": None}])
def test_empty_files_and_sections_change_nothing(content: Any, tmp_path: Path) -> None:
    assert read_settings(write(tmp_path, content), {}) == Settings()


def test_unreadable_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^STACKSEG_MODELS__SERVE: the value is not valid YAML"):
        read_settings(None, {"STACKSEG_MODELS__SERVE": "[nuclei"})
