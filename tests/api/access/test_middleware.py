from __future__ import annotations

import asyncio
from typing import Any

from service.api.access.middleware import DrainBody


def exchange(
    messages: list[Any], status: int, headers: dict[str, str] | None = None, read: int = 0, seconds: float = 10
) -> tuple[int, int, bool]:
    """How many messages of a body are left when an application has read `read` of them and answers with the status.

    Then the status, and whether the connection is closed.
    """
    pending, left = list(messages), []

    async def receive() -> Any:
        if not pending:
            await asyncio.sleep(3600)
        return pending.pop(0)

    async def send(message: Any) -> None:
        left.append(len(pending))
        sent.append(message["status"])
        closed.append((b"connection", b"close") in message["headers"])

    async def app(_scope: Any, listen: Any, answer: Any) -> None:
        for _ in range(read):
            await listen()
        await answer({"type": "http.response.start", "status": status, "headers": []})

    sent: list[int] = []
    closed: list[bool] = []
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    asyncio.run(DrainBody(app, seconds)({"type": "http", "headers": raw}, receive, send))
    return left[0], sent[0], closed[0]


BODY = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, True, False)]


def test_refused_body_is_received_to_its_end_before_the_answer() -> None:
    assert exchange(BODY, 422, read=1) == (0, 422, False)


def test_nothing_is_received_of_a_client_that_asked_first() -> None:
    assert exchange(BODY, 422, {"Expect": "100-continue"}) == (4, 422, True)


def test_rest_is_received_of_a_client_that_asked_and_was_told_to_go_on() -> None:
    assert exchange(BODY, 422, {"Expect": "100-continue"}, read=1) == (0, 422, False)
    assert exchange(BODY, 422, {"Expect": "100-continue"}, read=4) == (0, 422, False)


def test_nothing_is_received_after_a_body_has_ended_or_its_client_has_gone() -> None:
    assert exchange(BODY, 422, read=4) == (0, 422, False)
    assert exchange([BODY[0], {"type": "http.disconnect"}, *BODY], 422) == (4, 422, False)


def test_success_is_never_delayed() -> None:
    assert exchange(BODY, 200) == (4, 200, False)


def test_patience_ends() -> None:
    assert exchange(BODY[:2], 422, seconds=0.05) == (0, 422, True)
