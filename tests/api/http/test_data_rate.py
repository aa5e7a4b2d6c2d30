from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.api.http.data_rate import DataRate, SlowClientLimits

LIMITS = SlowClientLimits(head_seconds=5, bytes_per_second=100, window_seconds=10)


@given(st.lists(st.integers(0, 250), min_size=40, max_size=60))
def test_rate_is_averaged_over_windows(moved: list[int]) -> None:
    rate, total, since_window, late = DataRate(), 0, 0, []
    for second, number in enumerate(moved):
        slow = rate.is_too_low(LIMITS, float(second), total)
        if second and second % LIMITS.window_seconds == 0:
            late.append((slow, since_window < LIMITS.bytes_per_second * LIMITS.window_seconds))
            since_window = 0
        else:
            assert not slow
        total, since_window = total + number, since_window + number
    assert late
    assert all(slow == expected for slow, expected in late)


def test_who_has_moved_all_that_there_was_is_not_slow() -> None:
    rate = DataRate()
    assert not rate.is_too_low(LIMITS, 0, 0, owed=30)
    assert not rate.is_too_low(LIMITS, 10, 30, owed=40)
    assert rate.is_too_low(LIMITS, 20, 69, owed=50)


def test_window_begins_anew_after_a_pause_and_nothing_is_said_of_what_is_not_known() -> None:
    rate = DataRate()
    assert not rate.is_too_low(LIMITS, 0, 0)
    rate.reset()
    assert not rate.is_too_low(LIMITS, 10, 0)
    assert not rate.is_too_low(LIMITS, 19, 0)
    assert not rate.is_too_low(LIMITS, 20, None)
    assert rate.is_too_low(LIMITS, 20, 0)
