from __future__ import annotations

import asyncio
from typing import Any

from service.api.access.middleware import DrainBody


def run_exchange(
    messages: list[Any], status: int, headers: dict[str, str] | None = None, read_count: int = 0, seconds: float = 10
) -> tuple[int, int, bool]:
    """Run an application that reads `read_count` messages of a body and then responds with `status`.

    Return the number of unread messages, the status, and whether the connection is closed.
    """
    pending, unread = list(messages), []

    async def receive() -> Any:
        if not pending:
            await asyncio.sleep(3600)
        return pending.pop(0)

    async def send(message: Any) -> None:
        unread.append(len(pending))
        sent.append(message["status"])
        closed.append((b"connection", b"close") in message["headers"])

    async def app(_scope: Any, receive_drained: Any, send_drained: Any) -> None:
        for _ in range(read_count):
            await receive_drained()
        await send_drained({"type": "http.response.start", "status": status, "headers": []})

    sent: list[int] = []
    closed: list[bool] = []
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    asyncio.run(DrainBody(app, seconds)({"type": "http", "headers": raw}, receive, send))
    return unread[0], sent[0], closed[0]


BODY = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, True, False)]


def test_rejected_body_is_received_completely_before_the_response() -> None:
    assert run_exchange(BODY, 422, read_count=1) == (0, 422, False)


def test_body_is_not_received_if_the_client_waits_for_100_continue() -> None:
    assert run_exchange(BODY, 422, {"Expect": "100-continue"}) == (4, 422, True)


def test_rest_of_the_body_is_received_after_100_continue_was_sent() -> None:
    assert run_exchange(BODY, 422, {"Expect": "100-continue"}, read_count=1) == (0, 422, False)
    assert run_exchange(BODY, 422, {"Expect": "100-continue"}, read_count=4) == (0, 422, False)


def test_nothing_is_received_after_the_end_of_the_body_or_a_disconnect() -> None:
    assert run_exchange(BODY, 422, read_count=4) == (0, 422, False)
    assert run_exchange([BODY[0], {"type": "http.disconnect"}, *BODY], 422) == (4, 422, False)


def test_successful_response_is_not_delayed() -> None:
    assert run_exchange(BODY, 200) == (4, 200, False)


def test_connection_is_closed_if_the_body_does_not_arrive_in_time() -> None:
    assert run_exchange(BODY[:2], 422, seconds=0.05) == (0, 422, True)
