"""`stackseg key`: create an API key."""

from __future__ import annotations

import argparse
import re
import sys

from service.api.access import keys as api_keys
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.sections.serving import KEY_NAME_PATTERN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `stackseg key`."""
    parser.add_argument(
        "name", metavar="NAME", help="Name of the user or program that will use the key; shown in logs and metrics"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _settings: Settings) -> int:
    """Print a new API key, and the lines with its hash for the configuration file."""
    if not re.fullmatch(KEY_NAME_PATTERN, options.name):
        raise BadParameter(
            f"The name {options.name!r} is not valid. Use up to 64 letters, digits and the characters . _ @ -, and"
            " begin with a letter or a digit."
        )
    key = api_keys.generate_key()
    sys.stdout.write(
        f"API key for {options.name}. It is not stored and will not be shown again. Clients send it as\n"
        f"`Authorization: Bearer KEY` or `X-API-Key: KEY`.\n\n"
        f"{key}\n\nAdd its hash to the configuration file:\n\n"
        f'access:\n  keys:\n    "{options.name}": {api_keys.hash_key(key)}\n'
    )
    return 0
