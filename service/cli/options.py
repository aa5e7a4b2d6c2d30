"""Options of every command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from service.core.config import Settings, override_settings, read_settings


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, which names what it does not know with its own usage, not with that of all commands."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; end the process with status 2 where one is left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = next((text for text in unknown if text.startswith("-")), "").partition("=")[0]
            close = difflib.get_close_matches(option, self._option_string_actions, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


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
