"""`stackseg serve` runs the HTTP service."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
from pathlib import Path

from service.core.config import Settings, override_settings
from service.core.sections.serving import Server

log = logging.getLogger(__name__)


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg serve`."""
    server = Server()
    serve.add_argument("--host", help=f"address to listen on (default: {server.host}, or server.host)")
    serve.add_argument(
        "--port", type=int, help=f"port to listen on, 0 for a free one (default: {server.port}, or server.port)"
    )
    for name, meaning in (("keyfile", "private key"), ("certfile", "its certificate")):
        serve.add_argument(
            f"--ssl-{name}",
            type=Path,
            metavar="PEM",
            help=f"{meaning} for HTTPS (default: plain HTTP, or server.ssl_{name})",
        )
    serve.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Serve until a signal ends it. Raises ConfigError for an address or a folder that cannot be used."""
    # torch reads it when it is imported. Otherwise threads of the network spin while they wait for each other, on cores
    # that decode other requests meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from service.api.server import serve  # noqa: PLC0415

    chosen = {name: getattr(options, name) for name in ("host", "port", "ssl_keyfile", "ssl_certfile")}
    settings = override_settings(
        settings, "server", {name: value for name, value in chosen.items() if value is not None}
    )
    host = settings.server.host
    if is_public(host) and not settings.access.keys:
        log.warning("%s is a public address and there are no access.keys: whoever reaches it may use it", host)
    if not serve(settings, host, settings.server.port):
        # A thread that compiles or computes in native code cannot be ended, and the interpreter would wait or crash.
        logging.shutdown()
        os._exit(0)
    return 0


def is_public(host: str) -> bool:
    """Return whether other machines may reach a service that listens on this address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
