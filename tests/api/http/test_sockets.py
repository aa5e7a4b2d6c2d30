from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

from service.api.http.sockets import count_acknowledged_bytes, count_unsent_bytes


def test_acknowledged_and_unsent_bytes_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as end,
    ):
        transport: Any = SimpleNamespace(get_write_buffer_size=lambda: 7, get_extra_info={"socket": end}.get)
        assert (count_acknowledged_bytes(transport), count_unsent_bytes(transport)) == (None, 7)
        end.settimeout(0.2)
        sent = 0
        try:
            while True:
                sent += end.send(bytes(2**16))
        except TimeoutError:
            pass
        acknowledged = count_acknowledged_bytes(transport)
        assert acknowledged is not None
        assert count_unsent_bytes(transport) == sent - acknowledged + 7
        while sent:
            sent -= len(client.recv(2**20))
        time.sleep(0.5)
        assert count_unsent_bytes(transport) == 7
    assert (count_acknowledged_bytes(transport), count_unsent_bytes(transport)) == (None, 7)
