"""Tests of the store for state that several views share."""

from __future__ import annotations

from playwright.sync_api import Page

# Returns the notifications of two listeners, and the first and the last state.
OBSERVE_CHANGES = """async () => {
  const { Store, hasChanged } = await import("/page/core/store.js");
  const store = new Store({ one: 1, two: 2 }), notifications = [], abort = new AbortController();
  store.subscribe(previous =>
    notifications.push(["one", "two"].filter(name => hasChanged(previous, store.state, [name]))));
  store.subscribe(previous => notifications.push(previous.one), abort.signal);
  const first = store.state;
  store.set({ one: 1 });
  store.set({ one: 3, two: 2 });
  abort.abort();
  store.set({ one: 4, two: 5 });
  return { notifications, first, last: store.state };
}"""


def test_listeners_are_notified_only_of_changes(module_page: Page) -> None:
    outcome = module_page.evaluate(OBSERVE_CHANGES)
    assert outcome["notifications"] == [["one"], 1, ["one", "two"]]
    assert (outcome["first"], outcome["last"]) == ({"one": 1, "two": 2}, {"one": 4, "two": 5})
