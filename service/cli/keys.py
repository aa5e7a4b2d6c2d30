"""`stackseg key` makes an API key."""

from __future__ import annotations

import argparse
import re
import sys

from service.api.access import keys as api_keys
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.sections.serving import KEY_NAME


def add_arguments(key: argparse.ArgumentParser) -> None:
    """Add the argument of `stackseg key`."""
    key.add_argument("name", metavar="NAME", help="who or what will use it, as logs and metrics will show it")
    key.set_defaults(run=run)


def run(options: argparse.Namespace, _settings: Settings) -> int:
    """Print a new API key, and the lines of the configuration that hold its hash."""
    if not re.fullmatch(KEY_NAME, options.name):
        raise BadParameter(f"{options.name!r}: use up to 64 letters, digits and . _ @ -, a letter or digit first.")
    key = api_keys.generate_key()
    sys.stdout.write(
        f"The key of {options.name}, shown this once; sent as `Authorization: Bearer KEY` or `X-API-Key: KEY`:\n\n"
        f"{key}\n\nFor the configuration, which holds only its hash:\n\n"
        f'access:\n  keys:\n    "{options.name}": {api_keys.hash_key(key)}\n'
    )
    return 0
