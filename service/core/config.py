"""Settings of the operator: a YAML file, overridden by environment variables `STACKSEG_SECTION__KEY`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from service.core.errors import ConfigError, validation_message
from service.core.files.bundled import bundled_folder
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

PREFIX = "STACKSEG_"


class Settings(Section):
    """All sections of settings, with defaults for a laptop as well as a GPU host."""

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
        """The folder of annotated stacks."""
        return self.annotations.folder or self._data_folder("annotations")

    @property
    def trained_folder(self) -> Path:
        """The folder of models that requests have trained."""
        return self.models.trained_folder or self._data_folder("trained-models")

    def _data_folder(self, name: str) -> Path:
        if self.jobs.folder is not None:
            return self.jobs.folder / name
        return _find_user_data() / "stackseg" / name

    @model_validator(mode="after")
    def _within_own_limits(self) -> Self:
        chosen = self.windows.sw_batch_size
        if chosen != "auto" and chosen > self.limits.sw_batch_size:
            raise ValueError("windows.sw_batch_size exceeds limits.sw_batch_size")
        if self.windows.overlap > self.limits.overlap:
            raise ValueError("windows.overlap exceeds limits.overlap")
        return self

    @model_validator(mode="after")
    def _roots_have_known_keys(self) -> Self:
        for roots in (self.references.inputs, self.references.outputs):
            for name, root in roots.items():
                if unknown := sorted(set(root.keys) - self.access.keys.keys()):
                    raise ValueError(f"references: {name} is for the key {unknown[0]}, which is not in access.keys")
        return self


def _find_user_data() -> Path:
    """Return the user's own data folder; users without a home have one in the working directory."""
    if configured := os.environ.get("XDG_DATA_HOME"):
        return Path(configured)
    data = Path("~/.local/share")
    try:
        return data.expanduser()
    except RuntimeError:
        return data


def read_settings(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Read a configuration file or bundled preset, and override single keys by `STACKSEG_SECTION__KEY` variables.

    Raises ConfigError for a file that cannot be read, and for an unknown or invalid key, variable or value, by name.
    """
    values = _read_file(path) if path is not None else {}
    _override(values, os.environ if environment is None else environment)
    return _validate(values)


def override_settings(settings: Settings, section: str, values: Mapping[str, Any]) -> Settings:
    """Return settings with some keys of one section changed. Raises ConfigError for an unknown key or value."""
    sections = settings.model_dump()
    return _validate({**sections, section: {**sections[section], **values}})


def _validate(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'][:2])) or 'settings'}: {validation_message(fault)}"
            for fault in error.errors()
        )
        raise ConfigError(f"The configuration is not understood: {faults}") from error


def _find_file(path: Path) -> Path:
    """Return the file itself where there is one, else the bundled preset of that name. Raises ConfigError."""
    presets = {file.stem: file for file in sorted(bundled_folder("configs").glob("*.yaml"))}
    if path.exists() and not path.is_dir():
        return path
    if str(path) not in presets:
        raise ConfigError(f"{path}: there is no such file, and no bundled preset of that name: {', '.join(presets)}.")
    return presets[str(path)]


def _read_file(path: Path) -> dict[str, Any]:
    path = _find_file(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(section, dict | None) for section in content.values()):
        raise ConfigError(f"{path}: expected sections with keys below them")
    return {name: dict(section or {}) for name, section in content.items()}


def _override(values: dict[str, Any], environment: Mapping[str, str]) -> None:
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        section, separator, key = variable.removeprefix(PREFIX).lower().partition("__")
        field = Settings.model_fields.get(section)
        if not separator or field is None or key not in type(field.default).model_fields:
            all_of_them = bundled_folder("configs") / "default.yaml"
            raise ConfigError(f"{variable}: there is no such setting; see {all_of_them} for all of them.")
        try:
            values.setdefault(section, {})[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{variable}: the value is not valid YAML: {error}") from error
