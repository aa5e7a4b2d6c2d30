"""API keys: ASGI middleware that lets known callers in, and what each caller may do."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.access.keys import ApiKeys
from service.api.access.rate_limit import make_rate_limits
from service.api.messages.headers import ANONYMOUS, RawHeaders, find_header
from service.core.errors import RateLimited, Unauthorized
from service.core.sections.serving import Access

# Open without a key and under any host name: probes know neither.
HEALTH_PATH = re.compile(r"(/v[12])?/health(/live|/ready)?")
# Open without a key: the project publishes all of it, and browsers cannot send a key for a page.
DOCUMENTATION_PATH = re.compile(r"/(docs(/[a-z.]+)?|page/([a-z]+/)?[a-z_.]+|openapi\.json)?")

ErrorHandler = Callable[[Request, Exception], Response]


class ApiKeyAuth:
    """Middleware that lets in known keys within their rate limits; `scope["state"]["caller"]` then has the name."""

    def __init__(self, app: ASGIApp, access: Access, handle_error: ErrorHandler) -> None:
        self._app, self._handle_error = app, handle_error
        self._keys = ApiKeys(access.keys)
        self._rate_limits = make_rate_limits(access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as slots:
            try:
                self._admit(scope, slots)
            except (Unauthorized, RateLimited) as error:
                await self._handle_error(Request(scope), error)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, slots: ExitStack) -> None:
        """Name the caller and count the request, until `slots` is closed. Raises Unauthorized and RateLimited."""
        state = scope.setdefault("state", {})
        if HEALTH_PATH.fullmatch(scope["path"]) or DOCUMENTATION_PATH.fullmatch(scope["path"]):
            state["caller"] = ANONYMOUS
            return
        caller = state["caller"] = self._keys.authenticate(extract_key(scope["headers"]))
        rate_limit = self._rate_limits[caller]
        if scope["method"] == "POST":
            slots.enter_context(rate_limit.hold_slot())
        rate_limit.count_request()


def check_admin(request: Request, access: Access) -> None:
    """Raise Unauthorized for a key that is not an admin's; without keys, for clients on other hosts."""
    if access.keys and request.scope["state"]["caller"] not in access.admins:
        raise Unauthorized("Only keys that the configuration names in access.admins may do this.")
    if not access.keys and not (request.client and is_loopback(request.client.host)):
        raise Unauthorized(
            "Without API keys this may be done from the service's own host alone, which a container's port is not. Its"
            " operator may make a key with `stackseg key NAME` and name it in access.admins."
        )


def is_admin(request: Request, access: Access) -> bool:
    """Return whether `check_admin` lets the caller pass."""
    try:
        check_admin(request, access)
    except Unauthorized:
        return False
    return True


class Identity(NamedTuple):
    """The caller as the owner of trained models, None without API keys; `everyone`: whether it may use those of all."""

    owner: str | None
    everyone: bool


def identify(request: Request, access: Access) -> Identity:
    """Return who the caller is to trained models."""
    return Identity(request.scope["state"]["caller"] if access.keys else None, is_admin(request, access))


def check_trainer(request: Request, access: Access) -> None:
    """Raise Unauthorized for who may not train models: neither named in access.trainers nor an admin."""
    if access.keys and request.scope["state"]["caller"] in access.trainers:
        return
    if access.keys and not is_admin(request, access):
        raise Unauthorized("Only keys that the configuration names in access.trainers or access.admins may train.")
    check_admin(request, access)


def is_loopback(host: str) -> bool:
    """Return whether an address is one of the service's own host."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def extract_key(headers: RawHeaders) -> str | None:
    """Return the key in `Authorization: Bearer KEY`, else in `X-API-Key: KEY`; None without either."""
    scheme, _, key = find_header(headers, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else find_header(headers, b"x-api-key") or None
