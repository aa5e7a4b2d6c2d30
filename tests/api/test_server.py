from __future__ import annotations

import socket

import pytest

from service.api.server import format_address, listen
from service.core import errors


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_port_zero_takes_a_free_port_and_tells_it(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert format_address(listener) == (f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def test_address_in_use_is_a_configuration_error() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(errors.ConfigError, match="Cannot listen"):
        listen("127.0.0.1", listener.getsockname()[1])
