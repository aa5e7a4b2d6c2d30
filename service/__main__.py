"""Command line interface: `stackseg COMMAND`.

Each command imports heavy dependencies only when it runs. torch and MONAI take seconds to import, and `--help`,
`models` and errors about unknown options should not wait for them.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from service.cli import bench, evaluate, keys, models, segment, serve, train, tune
from service.cli.options import CommandParser, add_settings_options, load_settings
from service.core import telemetry
from service.core.errors import ConfigError, StackSegError
from service.core.files.bundled import get_software_version

COMMANDS = (
    ("serve", serve, "Run the HTTP service and the web UI"),
    ("segment", segment, "Segment a file or a folder of files without a running service"),
    ("models", models, "List, import, export and remove models"),
    ("evaluate", evaluate, "Score a model on annotated stacks"),
    ("train", train, "Train a model on annotated stacks"),
    ("bench", bench, "Measure the speed of a model on this machine"),
    ("tune", tune, "Find the fastest engine for a model on this machine"),
    ("key", keys, "Create an API key for the setting access.keys"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 0 for success, 1 for a refused or failed request, 2 for a usage or configuration error, 3 if a trained
    model is not better than its base model, and 130 if the command was interrupted. SIGTERM and SIGHUP raise SystemExit
    with the status 143 or 129.
    """
    _prepare_streams()
    options = create_parser().parse_args(arguments)
    try:
        settings = load_settings(options)
        telemetry.configure_logging(settings.logging.level, settings.logging.format)
        with _clean_up_on_signals():
            status: int = options.run(options, settings)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has ended, such as `head`. Python would report the same error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StackSegError, OSError) as error:
        # str(error) would begin with "[Errno 2]".
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        sys.stderr.write(f"stackseg: {options.reword(text)}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if options.extra is None:
            raise
        command = f"pip install 'stackseg[{options.extra}]'"
        sys.stderr.write(
            f"stackseg: {error.name} is not installed. Install it with the {options.extra} extra: {command}\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stackseg: interrupted\n")
        return 130
    return status


def _prepare_streams() -> None:
    """Escape characters that the output cannot encode, such as those of file names, and replace closed streams."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def _clean_up_on_signals() -> Iterator[None]:
    """Exit with 128 plus the number of the signal if batch systems or closed terminals end the command.

    By default, these signals would end the process immediately, and its temporary folders would remain. The service
    has its own handlers.
    """

    def exit_process(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    is_main_thread = threading.current_thread() is threading.main_thread()
    # `nohup` ignores SIGHUP.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers if is_main_thread else ():
        signal.signal(number, exit_process)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is exit_process:
                signal.signal(number, signal.SIG_DFL)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line with one subparser per command."""
    root = argparse.ArgumentParser(prog="stackseg", description="Segment 3D microscopy stacks.")
    root.add_argument("--version", action="version", version=get_software_version())
    root.set_defaults(extra=None, reword=str)
    commands = root.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, module, summary in COMMANDS:
        command = commands.add_parser(name, help=summary)
        module.add_arguments(command)
        add_settings_options(command)
    return root


if __name__ == "__main__":
    sys.exit(main())
