"""Settings of the service, read from a YAML file and overridden by environment variables `STACKSEG_SECTION__KEY`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from service.core.errors import ConfigError, get_validation_message
from service.core.files.bundled import get_bundled_folder
from service.core.files.documents import parse_yaml
from service.core.sections.computing import Cluster, Device, Engine, Models, Section, Training, Windows
from service.core.sections.serving import (
    Access,
    Annotations,
    Jobs,
    Limits,
    Logging,
    References,
    Server,
    Trainings,
    Watchdog,
)

ENVIRONMENT_PREFIX = "STACKSEG_"
# Variables with this prefix that are not settings: the API key for scripts, and the addresses of a Kubernetes service
# called stackseg, which Kubernetes and Docker set in every container next to it.
_OTHER_VARIABLES = re.compile(
    r"STACKSEG_KEY=.*|STACKSEG_(\w+_)?SERVICE_(HOST|PORT(_\w+)?)=.*|STACKSEG_(\w+_)?PORT(_\w+)?=(tcp|udp|sctp)://.*"
    r"|STACKSEG_(\w+_)?PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*",
    re.DOTALL,
)


class Settings(Section):
    """All sections of the settings. The defaults are suitable for both a laptop and a GPU host."""

    models: Models = Models()
    device: Device = Device()
    cluster: Cluster = Cluster()
    engine: Engine = Engine()
    windows: Windows = Windows()
    limits: Limits = Limits()
    references: References = References()
    jobs: Jobs = Jobs()
    annotations: Annotations = Annotations()
    trainings: Trainings = Trainings()
    server: Server = Server()
    access: Access = Access()
    watchdog: Watchdog = Watchdog()
    training: Training = Training()
    logging: Logging = Logging()

    @property
    def annotations_folder(self) -> Path:
        """The folder that stores annotated stacks."""
        return self.annotations.folder or self._find_data_folder("annotations")

    @property
    def trained_folder(self) -> Path:
        """The folder that stores the models trained by the service."""
        return self.models.trained_folder or self._find_data_folder("trained-models")

    @property
    def default_jobs_folder(self) -> Path | None:
        """The folder that stores jobs if `jobs.folder` is not set; None: a temporary folder."""
        return None if self.jobs.folder == "temporary" else _find_user_folder("XDG_STATE_HOME", ".local/state", "jobs")

    def _find_data_folder(self, name: str) -> Path:
        """Return a subfolder of the jobs folder if that is set, or else of the user's data folder.

        If the user has no home directory, return a path that cannot exist, so that no data is stored at a place where
        the operator does not expect it.
        """
        if isinstance(self.jobs.folder, Path):
            return self.jobs.folder / name
        return _find_user_folder("XDG_DATA_HOME", ".local/share", name) or Path(os.devnull) / name

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        batch_size = self.windows.sw_batch_size
        if batch_size != "auto" and batch_size > self.limits.sw_batch_size:
            raise ValueError("windows.sw_batch_size must not exceed limits.sw_batch_size")
        if self.windows.overlap > self.limits.overlap:
            raise ValueError("windows.overlap must not exceed limits.overlap")
        return self

    @model_validator(mode="after")
    def _check_reference_keys(self) -> Self:
        for roots in (self.references.inputs, self.references.outputs):
            for name, root in roots.items():
                if unknown_keys := sorted(set(root.keys) - self.access.keys.keys()):
                    raise ValueError(
                        f"references: {name} lists the API key {unknown_keys[0]}, which is not in access.keys"
                    )
        return self


def _find_user_folder(variable: str, default: str, name: str) -> Path | None:
    """Return the subfolder `stackseg/name` of one of the user's folders; None if the user has no home directory.

    variable  environment variable with the absolute path of the user's folder
    default   path of the user's folder relative to the home directory
    """
    configured_folder = Path(os.environ.get(variable, ""))
    try:
        folder = configured_folder if configured_folder.is_absolute() else Path.home() / default
    except RuntimeError:
        return None
    return folder / "stackseg" / name


def read_settings(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Read a configuration file or a bundled preset, and apply overrides from environment variables.

    Raises ConfigError if the file cannot be read, or if a key, variable or value is unknown or invalid.
    """
    sections = _read_settings_file(path) if path is not None else {}
    _apply_overrides(sections, os.environ if environment is None else environment)
    return _validate_settings(sections)


def override_settings(settings: Settings, section: str, values: Mapping[str, Any]) -> Settings:
    """Return a copy of the settings with some keys of one section changed. Raises ConfigError for invalid values."""
    sections = settings.model_dump()
    return _validate_settings({**sections, section: {**sections[section], **values}})


def _validate_settings(sections: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(sections)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'][:2])) or 'settings'}: {_describe_problem(problem)}"
            for problem in error.errors()
        )
        raise ConfigError(f"The configuration is invalid: {problems}") from error


def _describe_problem(problem: Mapping[str, Any]) -> str:
    """Return pydantic's message, or one that names a list if the value is not one."""
    is_list = problem["type"] == "tuple_type"
    return "Input should be a list, such as [a, b]" if is_list else get_validation_message(problem)


def _find_settings_file(path: Path) -> Path:
    """Return `path` if the file exists, otherwise the path of the bundled preset of that name. Raises ConfigError."""
    presets = {file.stem: file for file in sorted(get_bundled_folder("configs").glob("*.yaml"))}
    if path.exists() and not path.is_dir():
        return path
    if str(path) not in presets:
        raise ConfigError(
            f"{path} is neither a file nor a bundled preset. The bundled presets are {', '.join(presets)}."
        )
    return presets[str(path)]


def _read_settings_file(path: Path) -> dict[str, Any]:
    path = _find_settings_file(path)
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(section, dict | None) for section in content.values()):
        raise ConfigError(f"{path} must contain sections, each a mapping of keys to values.")
    return {name: dict(section or {}) for name, section in content.items()}


def _apply_overrides(sections: dict[str, Any], environment: Mapping[str, str]) -> None:
    for variable, yaml_text in environment.items():
        is_setting = variable.startswith(ENVIRONMENT_PREFIX)
        if not is_setting or _OTHER_VARIABLES.fullmatch(f"{variable}={yaml_text}"):
            continue
        section, separator, key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        field = Settings.model_fields.get(section)
        if not separator or field is None or key not in type(field.default).model_fields:
            settings_reference = get_bundled_folder("configs") / "default.yaml"
            raise ConfigError(f"{variable} does not match a setting. {settings_reference} lists all settings.")
        try:
            sections.setdefault(section, {})[key] = parse_yaml(yaml_text)
        except ValueError as error:
            raise ConfigError(f"The value of {variable} is not valid YAML: {error}") from error
