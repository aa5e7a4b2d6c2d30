"""Options that all commands share, and the argument parser of a command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from service.core.config import Settings, override_settings, read_settings
from service.core.quantities import parse_float, parse_integer

MODEL_HELP = "Name or folder of the model (default: the models.default setting, or 'nuclei' if it is not set)"


def integer(text: str) -> int:
    """Parse the value of an option. argparse names this function in error messages. Raises ValueError."""
    return parse_integer(text)


def decimal(text: str) -> float:
    """Parse the value of an option. argparse names this function in error messages. Raises ValueError."""
    return parse_float(text)


class CommandParser(argparse.ArgumentParser):
    """Parser of one command. Errors about unknown options show the usage of this command and a similar option."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments. Exit with status 2 if there are unknown arguments."""
        options, unknown_arguments = super().parse_known_args(args, namespace)
        if unknown_arguments:
            option = next((text for text in unknown_arguments if text.startswith("-")), "").partition("=")[0]
            similar_options = difflib.get_close_matches(option, self._option_string_actions, 1)
            hint = f"; did you mean {similar_options[0]}?" if similar_options else ""
            self.error(f"unrecognized arguments: {' '.join(unknown_arguments)}{hint}")
        return options, unknown_arguments


def add_settings_options(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add `--config` and `--models`. Pass `default=argparse.SUPPRESS` to preserve values given before a subcommand."""
    command.add_argument(
        "--config",
        type=Path,
        default=default,
        metavar="FILE",
        help="Configuration file, or a bundled preset: 'cluster', 'cpu', 'default' or 'gpu' (default: 'default')",
    )
    command.add_argument(
        "--models",
        type=Path,
        default=default,
        metavar="FOLDER",
        help="Folder with one subfolder per model (default: the models.folder setting, or the bundled models if it is"
        " not set)",
    )


def add_annotated_stacks(command: argparse.ArgumentParser, images_help: str) -> None:
    """Add the arguments FOLDER, `--images` and `--labels`, which specify stacks with their labels."""
    command.add_argument(
        "folders",
        type=Path,
        nargs="*",
        metavar="FOLDER",
        help="Folder with a stack (image.tif) and its labels (mask.tif)",
    )
    command.add_argument("--images", type=Path, nargs="+", default=[], help=images_help)
    command.add_argument(
        "--labels", type=Path, nargs="+", default=[], help="Ground-truth labels for --images, in the same order"
    )


def add_unknown_voxels(command: argparse.ArgumentParser) -> None:
    """Add `--ignore-label` and `--partial-planes`, which specify voxels that are not annotated."""
    command.add_argument(
        "--ignore-label", type=integer, metavar="N", help="Label of voxels that are not annotated (default: none)"
    )
    command.add_argument(
        "--partial-planes",
        action="store_true",
        help="Only some planes are annotated: all voxels of planes without labels are unknown",
    )


def load_settings(options: argparse.Namespace) -> Settings:
    """Load the settings that the options select. Raises ConfigError."""
    settings = read_settings(options.config)
    return settings if options.models is None else override_settings(settings, "models", {"folder": options.models})
