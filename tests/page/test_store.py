"""The state that the views of a stack share."""

from __future__ import annotations

from browsing import Open
from live import Live

# What listeners are told of, of a state with the values 1 and 2, and what the state is at the end.
CHANGES = """async () => {
  const { Store, hasChanged } = await import("/page/core/store.js");
  const store = new Store({ one: 1, two: 2 }), told = [], ending = new AbortController();
  store.subscribe(before => told.push(["one", "two"].filter(name => hasChanged(before, store.state, [name]))));
  store.subscribe(before => told.push(before.one), ending.signal);
  const first = store.state;
  store.set({ one: 1 });
  store.set({ one: 3, two: 2 });
  ending.abort();
  store.set({ one: 4, two: 5 });
  return { told, first, last: store.state };
}"""


def test_listeners_are_told_of_changes_and_of_nothing_else(fake: Live, open_page: Open) -> None:
    found = open_page(fake).evaluate(CHANGES)
    assert found["told"] == [["one"], 1, ["one", "two"]]
    assert (found["first"], found["last"]) == ({"one": 1, "two": 2}, {"one": 4, "two": 5})
