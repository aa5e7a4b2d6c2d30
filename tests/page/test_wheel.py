"""Wheel events of mice and trackpads in the web UI."""

from __future__ import annotations

import itertools
import math

import pytest
from playwright.sync_api import Page

COUNT_PLANES = """async events => {
  const { createPlaneCounter } = await import("/page/viewer/wheel.js");
  return events.map(createPlaneCounter());
}"""
GET_ZOOM_FACTORS = """async events => {
  const { getZoomFactor } = await import("/page/viewer/wheel.js");
  return events.map(getZoomFactor);
}"""


def make_event(delta: float, milliseconds: float = 0, mode: int = 0, **others: float | bool) -> dict[str, float | bool]:
    return {"deltaX": 0, "deltaY": delta, "deltaMode": mode, "timeStamp": milliseconds} | others


def test_each_notch_of_a_mouse_moves_one_plane_and_a_swipe_only_a_few(module_page: Page) -> None:
    notches = [
        *(make_event(delta, 20 * turn) for turn, delta in enumerate([100, 100, -120, 240, -100])),
        # Firefox reports lines. On macOS, a slow notch has a very small distance.
        *(make_event(delta, 1000 + 20 * turn, 1) for turn, delta in enumerate([3, 3, -3])),
        *(make_event(delta, 2000 + 300 * turn) for turn, delta in enumerate([4, 4, -4])),
    ]
    assert module_page.evaluate(COUNT_PLANES, notches) == [math.copysign(1, event["deltaY"]) for event in notches]
    # A swipe of 200 pixels, in the wrong direction for a moment, and with some movement sideways.
    steps = [2, 6, 12, 20, -1, 30, 30, 25, 20, 15, 12, 8, 6, 5, 4, 3, 2, 1]
    swipe = [make_event(step, 16 * turn, deltaX=step / 2) for turn, step in enumerate(steps)]
    planes = module_page.evaluate(COUNT_PLANES, swipe)
    assert planes[0] == 1
    assert sum(planes) == 6
    back = module_page.evaluate(COUNT_PLANES, [make_event(-step, 16 * turn) for turn, step in enumerate(steps)])
    assert back == [-count for count in planes]


def test_zoom_is_proportional_to_a_pinch_and_limited_for_a_notch(module_page: Page) -> None:
    pinch = [-1.0, -2.5, -4.0, -2.5, -1.0]
    steps = [make_event(delta, ctrlKey=True) for delta in [*pinch, sum(pinch), 100, -240]]
    *factors, whole, smaller, larger = module_page.evaluate(GET_ZOOM_FACTORS, steps)
    assert list(itertools.accumulate(factors, lambda a, b: a * b))[-1] == pytest.approx(whole)
    assert 1 < whole < 1.2
    assert (larger, smaller) == (pytest.approx(1.2), pytest.approx(1 / 1.2))
