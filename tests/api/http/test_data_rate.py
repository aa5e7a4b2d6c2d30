from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.api.http.data_rate import DataRate, SlowClientLimits

LIMITS = SlowClientLimits(head_seconds=5, bytes_per_second=100, window_seconds=10)


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
