from __future__ import annotations

import re

import pytest
from fakes import Clock

from service.api.access.keys import generate_key, hash_key
from service.api.access.rate_limit import RateLimit
from service.core.errors import RateLimited


def test_key_is_new_every_time_and_not_to_be_read_from_its_hash() -> None:
    one, other = generate_key(), generate_key()
    assert one != other
    assert re.fullmatch(r"stackseg_[A-Za-z0-9_-]{43}", one)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", hash_key(one))
    assert hash_key(one) == hash_key(one) != hash_key(other)


def test_rate_allows_a_burst_and_then_its_pace() -> None:
    clock = Clock()
    rate_limit = RateLimit(6, 0, clock)
    for _ in range(6):
        rate_limit.count_request()
    with pytest.raises(RateLimited) as caught:
        rate_limit.count_request()
    assert caught.value.retry_after == 10
    clock.now += 9.5
    with pytest.raises(RateLimited) as caught:
        rate_limit.count_request()
    assert caught.value.retry_after == 1
    clock.now += 0.5
    rate_limit.count_request()
    clock.now += 3600
    for _ in range(6):
        rate_limit.count_request()
    with pytest.raises(RateLimited):
        rate_limit.count_request()


def test_who_waits_as_long_as_told_is_let_in() -> None:
    clock = Clock()
    rate_limit = RateLimit(7, 0, clock)
    refused = 0
    for _ in range(200):
        try:
            rate_limit.count_request()
        except RateLimited as error:
            refused += 1
            clock.now += error.retry_after
            rate_limit.count_request()
    assert refused > 20


def test_only_so_many_are_worked_on_at_once() -> None:
    rate_limit = RateLimit(0, 2)
    with rate_limit.hold_slot():
        with rate_limit.hold_slot(), pytest.raises(RateLimited), rate_limit.hold_slot():
            pass
        with rate_limit.hold_slot():
            pass
    with pytest.raises(ValueError, match="broken"), rate_limit.hold_slot():
        raise ValueError("broken")
    with rate_limit.hold_slot(), rate_limit.hold_slot():
        pass


def test_zero_means_no_limit() -> None:
    rate_limit = RateLimit(0, 0)
    for _ in range(10_000):
        rate_limit.count_request()
    with rate_limit.hold_slot(), rate_limit.hold_slot(), rate_limit.hold_slot():
        pass
