"""Tests of the state shared by the views of a stack."""

from __future__ import annotations

from browsing import OpenPage
from live import LiveServer

# Returns the notifications of two listeners, and the first and the last state.
CHANGE_STATE = """async () => {
  const { Store, hasChanged } = await import("/page/core/store.js");
  const store = new Store({ one: 1, two: 2 }), notifications = [], ending = new AbortController();
  store.subscribe(previous =>
    notifications.push(["one", "two"].filter(name => hasChanged(previous, store.state, [name]))));
  store.subscribe(previous => notifications.push(previous.one), ending.signal);
  const first = store.state;
  store.set({ one: 1 });
  store.set({ one: 3, two: 2 });
  ending.abort();
  store.set({ one: 4, two: 5 });
  return { notifications, first, last: store.state };
}"""


def test_listeners_are_only_notified_of_changes(fake: LiveServer, open_page: OpenPage) -> None:
    outcome = open_page(fake).evaluate(CHANGE_STATE)
    assert outcome["notifications"] == [["one"], 1, ["one", "two"]]
    assert (outcome["first"], outcome["last"]) == ({"one": 1, "two": 2}, {"one": 4, "two": 5})
