"""Settings from files and environment variables, and their validation."""

from __future__ import annotations

import pwd
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from service.core.config import ENVIRONMENT_PREFIX, Settings, override_settings, read_settings
from service.core.errors import ConfigError

HASH = "sha256:" + 64 * "0"
KEYS = [(section, key) for section, keys in Settings().model_dump().items() for key in keys]


def variable(section: str, key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()


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


def test_process_environment_is_used_unless_an_environment_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_variable_overrides_only_its_own_key(tmp_path: Path) -> None:
    path = write(tmp_path, {"windows": {"overlap": 0.5, "sw_batch_size": 8}, "server": {"port": 9000}})
    settings = read_settings(path, {"STACKSEG_WINDOWS__OVERLAP": "0.125"})
    assert (settings.windows.overlap, settings.windows.sw_batch_size, settings.server.port) == (0.125, 8, 9000)


def test_other_environment_variables_are_ignored() -> None:
    assert read_settings(None, {}) == Settings()
    assert read_settings(None, {"WINDOWS__OVERLAP": "2", "PATH": "/bin", "MYSTACKSEG_DEVICE__NAME": "?"}) == Settings()


@pytest.mark.parametrize(
    "assignment",
    [
        "STACKSEG_KEY=stackseg_secret",
        "STACKSEG_SERVICE_HOST=10.0.0.1",
        "STACKSEG_SERVICE_PORT_HTTP=8000",
        "STACKSEG_PORT=tcp://10.0.0.1:8000",
        "STACKSEG_GPU_PORT_8000_TCP_ADDR=10.0.0.1",
    ],
)
def test_variables_of_scripts_and_of_kubernetes_services_are_ignored(assignment: str) -> None:
    name, _, value = assignment.partition("=")
    assert read_settings(None, {name: value}) == Settings()
    with pytest.raises(ConfigError, match=r"^STACKSEG_SERVER_PORT does not match a setting"):
        read_settings(None, {name: value, "STACKSEG_SERVER_PORT": "8000"})


def test_paths_may_begin_with_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    settings = read_settings(
        None, {"STACKSEG_JOBS__FOLDER": "~/jobs", "STACKSEG_REFERENCES__INPUTS": "{scans: ~/scans}"}
    )
    assert settings.jobs.folder == Path("/home/ada/jobs")
    assert settings.references.inputs["scans"].folder == Path("/home/ada/scans")


@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", max_size=30))
def test_misspelled_variable_is_rejected_with_its_name(rest: str) -> None:
    name = ENVIRONMENT_PREFIX + rest
    if name in {variable(*key) for key in KEYS} | {"STACKSEG_KEY"}:
        return
    with pytest.raises(ConfigError, match=f"^{name} does not match a setting"):
        read_settings(None, {name: "1"})


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_misspelled_key_is_rejected_with_its_name(section: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}x: "):
        read_settings(write(tmp_path, {section: {key + "x": 1}}), {})


@pytest.mark.parametrize("content", [{"windos": {}}, {1: {}}, {"windows": {2: 3}}, {True: {"overlap": 0.5}}])
def test_unknown_sections_and_non_string_keys_are_rejected(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The configuration is invalid: "):
        read_settings(write(tmp_path, content), {})


INVALID_VALUES = {
    "windows.overlap": ["1.0", "-0.1", ".nan"],
    "windows.sigma": ["0"],
    "windows.skip_below": ["dark", ".inf", "off", "false"],
    "windows.sw_batch_size": ["0", "2.5"],
    "windows.blending": ["triangle"],
    "device.name": ["gpu", "cuda:"],
    "device.serve": ["[cuda]"],
    "engine.precision": ["int8"],
    "limits.waiting": ["-1", "true"],
    "limits.request_seconds": ["1:30", ".inf", "1e12"],
    "limits.upload_bytes": ["4 GB", "1e30", ".inf"],
    "jobs.keep_hours": [".inf", "1e8"],
    "server.drain_seconds": [".inf"],
    "models.serve": ["nuclei"],
    "server.port": ["65536", "", "yes"],
    "server.scratch_folder": ["~nobody-of-this-name/scratch"],
    "logging.level": ["loud"],
    "logging.format": ["xml"],
    "access.requests_per_minute": ["-1"],
    # These values could never match.
    "access.keys": ["{ada: secret}", f"{{'two words': {HASH}}}"],
    "access.hosts": ["[https://example.org]", "['example.org:8000']", "['*']"],
    "access.origins": ["[example.org]", "[https://example.org/page]"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in INVALID_VALUES.items() for text in texts])
def test_invalid_value_is_rejected_with_its_key(name: str, text: str) -> None:
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=rf"is invalid: {section}\.{key}: "):
        read_settings(None, {variable(section, key): text})


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("device.serve", "[cuda:0, cuda:0]", "device: .*a GPU twice"),
        ("access.requests_per_minute", "60", "access: .*keys is empty"),
        ("windows.sw_batch_size", "33", "settings: windows.sw_batch_size must not exceed limits.sw_batch_size"),
        ("windows.overlap", "0.8", "settings: windows.overlap must not exceed limits.overlap"),
    ],
)
def test_value_that_conflicts_with_another_setting_is_rejected(name: str, text: str, problem: str) -> None:
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=f"invalid: {problem}"):
        read_settings(None, {variable(section, key): text})
    if section == "windows":
        assert read_settings(None, {variable("windows", key): text, variable("limits", key): text})


def test_error_lists_all_invalid_settings() -> None:
    environment = {"STACKSEG_WINDOWS__OVERLAP": "7", "STACKSEG_SERVER__PORT": "-1", "STACKSEG_DEVICE__NAME": "tpu"}
    with pytest.raises(ConfigError) as caught:
        read_settings(None, environment)
    for name in ("windows.overlap", "server.port", "device.name"):
        assert name in str(caught.value)


def test_overridden_section_is_validated() -> None:
    settings = override_settings(Settings(), "server", {"port": 9})
    assert (settings.server.port, settings.server.host) == (9, Settings().server.host)
    with pytest.raises(ConfigError, match=r"server\.port"):
        override_settings(Settings(), "server", {"port": -1})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("windows: [1, 2]", "must contain sections"),
        ("- windows", "must contain sections"),
        ("just words", "must contain sections"),
        ("windows: {overlap: 0.5", "cannot be read as YAML"),
        ("windows: {overlap: 0.5}\nwindows: {sigma: 0.2}", "cannot be read as YAML: found the key 'windows' twice"),
        ("windows: !!python/object:os.system {}", "cannot be read as YAML"),
    ],
)
def test_file_without_sections_is_rejected(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"settings\.yaml {reason}"):
        read_settings(path, {})


def test_missing_and_undecodable_files_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match=rf"^{path} is neither a file nor .* are cluster, cpu, default, gpu\.$"):
            read_settings(path, {})
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("logging: {level: caf\xe9}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read"):
        read_settings(latin, {})


def test_preset_is_found_by_name_unless_a_file_of_that_name_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(Path("cpu"), {}).device.name == "cpu"
    write(tmp_path, {"server": {"port": 9000}}).rename("cpu")
    assert read_settings(Path("cpu"), {}) == read_settings(None, {"STACKSEG_SERVER__PORT": "9000"})


@pytest.mark.parametrize("content", [None, {"windows": None}])
def test_empty_files_and_sections_change_nothing(content: Any, tmp_path: Path) -> None:
    assert read_settings(write(tmp_path, content), {}) == Settings()


def test_unparsable_variable_is_rejected_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^The value of STACKSEG_MODELS__SERVE is not valid YAML"):
        read_settings(None, {"STACKSEG_MODELS__SERVE": "[nuclei"})


def test_user_without_a_home_directory_stores_no_data_in_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may run as a user ID without a name."""

    def find_no_user(_uid: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", find_no_user)
    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for folder in (Settings().annotations_folder, Settings().trained_folder):
        with pytest.raises(OSError, match="Not a directory"):
            folder.mkdir(parents=True)
    assert Settings.model_validate({"jobs": {"folder": "/jobs"}}).annotations_folder == Path("/jobs/annotations")
