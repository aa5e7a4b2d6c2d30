from __future__ import annotations

import random
import socket

import pytest
from sockets import SECONDS, Pieces, answer, head, served

from service.api.http.joined_writes import MAX_JOINED_BYTES
from service.api.http.reading import READ_BYTES


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_JOINED_BYTES, MAX_JOINED_BYTES + 1])
def test_an_answer_is_its_head_and_then_its_body(size: int) -> None:
    body = random.Random(size).randbytes(size)
    with served(Pieces(body, length=size)) as address, socket.create_connection(address, SECONDS) as client:
        for _ in range(2):
            client.sendall(head("Content-Length: 0"))
            assert answer(client) == body


def test_a_small_answer_is_one_piece_of_what_is_sent() -> None:
    body = b"x" * 1000
    with served(Pieces(body, length=1000)) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Content-Length: 0"))
        assert client.recv(READ_BYTES).endswith(body)


def test_a_head_without_a_body_is_sent() -> None:
    with served(Pieces(b"", length=7)) as address, socket.create_connection(address, SECONDS) as client:
        for _ in range(2):
            client.sendall(b"HEAD / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert client.recv(READ_BYTES).endswith(b"content-length: 7\r\n\r\n")


def test_the_head_of_an_answer_that_breaks_off_is_sent() -> None:
    with served(Pieces(length=7)) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Content-Length: 0"))
        with client.makefile("rb") as file:
            assert file.read().endswith(b"content-length: 7\r\n\r\n")
