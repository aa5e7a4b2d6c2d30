from __future__ import annotations

import re

import pytest
from fakes import Clock

from service.api.access.keys import generate_key, hash_key
from service.api.access.rate_limit import RateLimit
from service.core.errors import RateLimited


def test_generated_keys_are_unique_and_hashed_with_sha256() -> None:
    key, other_key = generate_key(), generate_key()
    assert key != other_key
    assert re.fullmatch(r"stackseg_[A-Za-z0-9_-]{43}", key)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", hash_key(key))
    assert hash_key(key) == hash_key(key) != hash_key(other_key)


def test_rate_limit_allows_a_burst_and_then_the_configured_rate() -> None:
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


def test_request_is_accepted_after_waiting_for_retry_after() -> None:
    clock = Clock()
    rate_limit = RateLimit(7, 0, clock)
    rejection_count = 0
    for _ in range(200):
        try:
            rate_limit.count_request()
        except RateLimited as error:
            rejection_count += 1
            clock.now += error.retry_after
            rate_limit.count_request()
    assert rejection_count > 20


def test_number_of_concurrent_requests_is_limited() -> None:
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
