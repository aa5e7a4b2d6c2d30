from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.api.http.data_rate import DataRate, HeadTimer, SlowClientLimits

LIMITS = SlowClientLimits(head_seconds=5, bytes_per_second=100, window_seconds=10)
HEAD_LIMITS = SlowClientLimits(head_seconds=20)


@given(st.lists(st.integers(0, 250), min_size=40, max_size=60))
def test_rate_is_averaged_over_windows(bytes_by_second: list[int]) -> None:
    rate, total, in_window, results = DataRate(), 0, 0, []
    for second, number in enumerate(bytes_by_second):
        is_slow = rate.is_too_low(LIMITS, float(second), total)
        if second and second % LIMITS.window_seconds == 0:
            results.append((is_slow, in_window < LIMITS.bytes_per_second * LIMITS.window_seconds))
            in_window = 0
        else:
            assert not is_slow
        total, in_window = total + number, in_window + number
    assert results
    assert all(is_slow == expected for is_slow, expected in results)


def test_connection_that_transferred_all_outstanding_bytes_is_not_too_slow() -> None:
    rate = DataRate()
    assert not rate.is_too_low(LIMITS, 0, 0, outstanding_bytes=30)
    assert not rate.is_too_low(LIMITS, 10, 30, outstanding_bytes=40)
    assert rate.is_too_low(LIMITS, 20, 69, outstanding_bytes=50)


def test_reset_starts_a_new_window_and_an_unknown_count_is_ignored() -> None:
    rate = DataRate()
    assert not rate.is_too_low(LIMITS, 0, 0)
    rate.reset()
    assert not rate.is_too_low(LIMITS, 10, 0)
    assert not rate.is_too_low(LIMITS, 19, 0)
    assert not rate.is_too_low(LIMITS, 20, None)
    assert rate.is_too_low(LIMITS, 20, 0)


def test_first_head_must_be_complete_in_time_after_the_connection_was_opened() -> None:
    timer = HeadTimer(100)
    timer.count_bytes(115)
    assert not timer.is_expired(HEAD_LIMITS, 75, 119)
    assert timer.is_expired(HEAD_LIMITS, 75, 120)


def test_used_connection_may_be_idle_but_must_send_later_heads_in_time() -> None:
    timer = HeadTimer(100)
    timer.end_message()
    timer.start_waiting(110, has_partial_head=False)
    assert timer.waiting_since == 110
    assert not timer.is_expired(HEAD_LIMITS, 75, 184)
    assert timer.is_expired(HEAD_LIMITS, 75, 185)
    timer.count_bytes(184)
    timer.count_bytes(200)
    assert not timer.is_expired(HEAD_LIMITS, 75, 203)
    assert timer.is_expired(HEAD_LIMITS, 75, 204)


def test_head_that_arrived_during_a_response_must_be_complete_in_time_after_it() -> None:
    timer = HeadTimer(100)
    timer.end_message()
    timer.count_bytes(101)
    timer.start_waiting(150, has_partial_head=True)
    assert not timer.is_expired(HEAD_LIMITS, 75, 169)
    assert timer.is_expired(HEAD_LIMITS, 75, 170)


def test_body_that_continues_after_its_response_does_not_keep_the_connection_open() -> None:
    timer = HeadTimer(100)
    timer.start_waiting(110, has_partial_head=False)
    timer.count_bytes(120)
    timer.end_message()
    assert not timer.is_expired(HEAD_LIMITS, 75, 194)
    assert timer.is_expired(HEAD_LIMITS, 75, 195)
