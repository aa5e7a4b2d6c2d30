"""Options of every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.core.config import Settings, override_settings, read_settings


def add_settings(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add `--config` and `--models`; with argparse.SUPPRESS as default, one given before a subcommand still holds."""
    command.add_argument(
        "--config",
        type=Path,
        default=default,
        metavar="FILE",
        help="configuration file, or a bundled preset: cpu, default or gpu (default: default)",
    )
    command.add_argument(
        "--models",
        type=Path,
        default=default,
        metavar="FOLDER",
        help="folder with one subfolder per model (default: the bundled models, or models.folder)",
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that the options ask for. Raises ConfigError."""
    settings = read_settings(options.config)
    return settings if options.models is None else override_settings(settings, "models", {"folder": options.models})
