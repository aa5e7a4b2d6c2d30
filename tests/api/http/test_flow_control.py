from __future__ import annotations

import asyncio

from service.api.http.flow_control import CloseOnceTransport


class Transport(asyncio.Transport):
    """A transport that counts calls to `close`."""

    close_count = 0

    def close(self) -> None:
        self.close_count += 1

    def is_closing(self) -> bool:
        return self.close_count > 0


def test_transport_is_closed_only_once() -> None:
    transport = Transport()
    close_once = CloseOnceTransport(transport)
    assert not close_once.is_closing()
    close_once.close()
    close_once.close()
    assert transport.close_count == 1
    assert close_once.is_closing()
