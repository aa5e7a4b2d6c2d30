from __future__ import annotations

import asyncio

from service.api.http.flow_control import CloseOnceTransport


class Transport(asyncio.Transport):
    """A transport that counts how often it is closed."""

    closes = 0

    def close(self) -> None:
        self.closes += 1

    def is_closing(self) -> bool:
        return self.closes > 0


def test_a_transport_is_closed_once() -> None:
    transport = Transport()
    guarded = CloseOnceTransport(transport)
    assert not guarded.is_closing()
    guarded.close()
    guarded.close()
    assert transport.closes == 1
    assert guarded.is_closing()
