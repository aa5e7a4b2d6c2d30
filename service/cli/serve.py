"""`stackseg serve`: run the HTTP service."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
from pathlib import Path

from service.cli.options import integer
from service.core.config import Settings, override_settings
from service.core.sections.serving import Server

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg serve`."""
    server = Server()
    parser.add_argument(
        "--host",
        help="Address to listen on, or :: for all IPv4 and IPv6 addresses (default: the server.host setting, or"
        f" {server.host} if it is not set)",
    )
    parser.add_argument(
        "--port",
        type=integer,
        help="Port to listen on, or 0 for any free port (default: the server.port setting, or"
        f" {server.port} if it is not set)",
    )
    for name, meaning in (("keyfile", "Private key"), ("certfile", "Certificate")):
        parser.add_argument(
            f"--ssl-{name}",
            type=Path,
            metavar="PEM",
            help=f"{meaning} for HTTPS in PEM format (default: the server.ssl_{name} setting, or plain HTTP if it is"
            " not set)",
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Run the service until a signal arrives. Raises ConfigError if the address or a folder cannot be used."""
    # torch reads this variable when it is imported. By default, its idle threads spin, and would occupy cores that
    # are needed to decode other requests.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from service.api.server import serve  # noqa: PLC0415

    overrides = {name: getattr(options, name) for name in ("host", "port", "ssl_keyfile", "ssl_certfile")}
    settings = override_settings(
        settings, "server", {name: value for name, value in overrides.items() if value is not None}
    )
    host = settings.server.host
    if is_public(host) and not settings.access.keys:
        log.warning(
            "%s is a public address and access.keys is empty: anyone who can reach this address can use the service",
            host,
        )
    if not serve(settings, host, settings.server.port):
        # Threads that compile or run native code cannot be stopped. A normal exit would wait for them or crash.
        logging.shutdown()
        os._exit(0)
    return 0


def is_public(host: str) -> bool:
    """Return whether a service that listens on this address can be reached from other machines."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
