"""Authentication by API key (ASGI middleware), and authorization checks for admins and trainers."""

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

# Paths that need no key and accept any host name, because health probes have no key and often no valid host name.
HEALTH_PATH = re.compile(r"(/v[12])?/health(/live|/ready)?")
# Paths that need no key, because their content is public and browsers cannot send a key when they load a page.
DOCUMENTATION_PATH = re.compile(r"/(docs(/[a-z.]+)?|page/([a-z]+/)?[a-z_.]+|openapi\.json)?")

ErrorHandler = Callable[[Request, Exception], Response]


class ApiKeyAuth:
    """Middleware that checks the API key and rate limits, and stores the caller's name in the state of the request."""

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
        """Identify the caller, and count the request against the caller's rate limits.

        The slot for a running request is released when `slots` is closed. Raises Unauthorized if the API key is missing
        or unknown, and RateLimited if the request exceeds a rate limit.
        """
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
    """Raise Unauthorized unless the caller is an admin.

    If no API keys are configured, clients on the same host are admins.
    """
    if access.keys and request.scope["state"]["caller"] not in access.admins:
        raise Unauthorized(
            "This API key has no admin rights. Ask the operator of the service to add the key to `access.admins`."
        )
    if not access.keys and not (request.client and is_loopback(request.client.host)):
        raise Unauthorized(
            "This service has no API keys. Therefore, this request is allowed only from the computer that runs the"
            " service, and not through a container's published port. To allow it from other computers, the operator can"
            " create a key with `stackseg key NAME` and list the key in `access.admins`."
        )


def has_admin_rights(request: Request, access: Access) -> bool:
    """Return whether the caller is an admin (see `check_admin`)."""
    try:
        check_admin(request, access)
    except Unauthorized:
        return False
    return True


class Identity(NamedTuple):
    """Identity of the caller for access to trained models.

    owner     name of the caller's API key; None if the service has no API keys
    is_admin  whether the caller is an admin, who may manage the models of all owners
    """

    owner: str | None
    is_admin: bool


def get_identity(request: Request, access: Access) -> Identity:
    """Return the caller's identity for access to trained models."""
    return Identity(request.scope["state"]["caller"] if access.keys else None, has_admin_rights(request, access))


def check_trainer(request: Request, access: Access) -> None:
    """Raise Unauthorized unless the caller's key is in `access.trainers` or the caller is an admin."""
    if access.keys and request.scope["state"]["caller"] in access.trainers:
        return
    if access.keys and not has_admin_rights(request, access):
        raise Unauthorized(
            "This API key is not allowed to train models. Ask the operator of the service to add the key to"
            " `access.trainers`."
        )
    check_admin(request, access)


def is_loopback(host: str) -> bool:
    """Return whether an IP address is a loopback address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def extract_key(headers: RawHeaders) -> str | None:
    """Return the API key from `Authorization: Bearer KEY` or else from `X-API-Key: KEY`; None if there is no key."""
    scheme, _, key = find_header(headers, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else find_header(headers, b"x-api-key") or None
