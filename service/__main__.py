"""Command line: `stackseg serve`, `segment IN OUT`, `models`, `evaluate`, `train`, `bench`, `tune`, `key NAME`.

Each command imports what it needs when it runs: torch and MONAI take seconds, and neither `--help` nor `models` nor a
misspelt option should wait for them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from service.cli import bench, evaluate, keys, models, segment, serve, train, tune
from service.cli.options import CommandParser, add_settings, settings_of
from service.core import telemetry
from service.core.errors import ConfigError, StackSegError
from service.core.files.bundled import software_version

COMMANDS = (
    ("serve", serve, "run the HTTP service"),
    ("segment", segment, "segment one file, without a service"),
    ("models", models, "list the models of the repository"),
    ("evaluate", evaluate, "score a model on annotated stacks"),
    ("train", train, "train a model on annotated stacks"),
    ("bench", bench, "measure a model on this machine"),
    ("tune", tune, "find the fastest way to run a model on this machine"),
    ("key", keys, "make an API key, for access.keys of the configuration"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 refused or failed, 2 not understood, 130 interrupted."""
    options = make_parser().parse_args(arguments)
    try:
        settings = settings_of(options)
        telemetry.configure_logging(settings.logging.level, settings.logging.format)
        status: int = options.run(options, settings)
    except (StackSegError, OSError) as error:
        # Python's own text begins with [Errno 2].
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        sys.stderr.write(f"stackseg: {options.reword(text)}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if options.extra is None:
            raise
        extra = f"the extra {options.extra}: pip install 'stackseg[{options.extra}]'"
        sys.stderr.write(f"stackseg: {error.name} is not installed, which comes with {extra}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stackseg: interrupted\n")
        return 130
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with one subparser per command."""
    root = argparse.ArgumentParser(prog="stackseg", description="Segment 3D microscopy stacks.")
    root.add_argument("--version", action="version", version=software_version())
    root.set_defaults(extra=None, reword=str)
    commands = root.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, module, summary in COMMANDS:
        command = commands.add_parser(name, help=summary)
        module.add_arguments(command)
        add_settings(command)
    return root


if __name__ == "__main__":
    sys.exit(main())
