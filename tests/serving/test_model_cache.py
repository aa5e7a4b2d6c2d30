from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from fakes import until

from service.core.errors import BrokenModel, Cancelled, OutOfMemory
from service.serving.model_cache import Lease, Residents


class Model(NamedTuple):
    name: str
    nbytes: int


class Shelf:
    """Residents that load models of the given sizes, as soon as `gate` is open; `loads` in their order."""

    def __init__(self, limit: int, **sizes: int) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes, self.guesses = sizes, dict(sizes)
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.error: Exception | None = None
        self.residents: Residents[Model] = Residents(
            limit, self.load, guess=self.guesses.__getitem__, unloaded=self.unloads.append
        )

    def load(self, name: str) -> Model:
        self.loads.append(name)
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return Model(name, self.sizes[name])

    def use(self, name: str) -> Lease[Model]:
        """A lease whose model is there."""
        lease = self.residents.lease(name)
        assert lease.model.result(10).name == name
        return lease

    def touch(self, *names: str) -> None:
        for name in names:
            self.use(name).end()


@contextmanager
def shelf(limit: int, *first: str, **sizes: int) -> Iterator[Shelf]:
    made = Shelf(limit, **sizes)
    made.residents.start(first)
    yield made
    made.gate.set()
    made.residents.close()
    assert made.residents.join(10)


def test_models_are_loaded_when_they_are_first_asked_for_and_then_stay() -> None:
    with shelf(10, "a", a=3, b=4) as shelves:
        until(lambda: not shelves.residents.starting)
        assert (shelves.loads, list(shelves.residents.standings)) == (["a"], ["a"])
        shelves.touch("b", "a", "b")
        assert shelves.loads == ["a", "b"]
        assert {name: one.nbytes for name, one in shelves.residents.standings.items()} == {"a": 3, "b": 4}


def test_the_least_recently_used_makes_room() -> None:
    with shelf(10, a=4, b=4, c=4, d=8) as shelves:
        shelves.touch("a", "b", "a", "c")
        until(lambda: shelves.unloads == ["b"])
        assert set(shelves.residents.standings) == {"a", "c"}
        shelves.touch("d")
        assert set(shelves.residents.standings) == {"d"}
        shelves.touch("b")
        assert set(shelves.residents.standings) == {"b"}


def test_a_model_in_use_is_never_unloaded_and_the_one_that_waits_for_its_room_has_its_turn() -> None:
    with shelf(10, a=6, b=6) as shelves:
        mine, also_mine = shelves.use("a"), shelves.use("a")
        other = shelves.residents.lease("b")
        until(lambda: shelves.residents.is_awaited("b"))
        late = shelves.residents.lease("a")
        mine.end()
        assert not other.model.done()
        assert not late.model.done(), "or b would wait for ever while others use a"
        also_mine.end()
        assert other.model.result(10).name == "b"
        assert not late.model.done()
        other.end()
        assert late.model.result(10).name == "a"
        late.end()
    assert shelves.unloads == ["a", "b"]


def test_whoever_waits_for_room_and_gives_up_lets_others_use_what_is_there() -> None:
    with shelf(10, a=6, b=6) as shelves:
        mine = shelves.use("a")
        other, late = shelves.residents.lease("b"), shelves.residents.lease("a")
        other.end()
        assert other.model.cancelled()
        mine.end()
        assert late.model.result(10).name == "a"
        late.end()
        late.end()
        assert shelves.residents.standings["a"].users == 0
    assert shelves.unloads == []


def test_a_model_that_is_larger_than_was_guessed_still_keeps_to_the_budget() -> None:
    with shelf(10, a=6, b=6) as shelves:
        shelves.guesses["b"] = 1
        shelves.touch("a", "b")
        assert shelves.loads == ["a", "b", "b"], "it is known to take 6 only once it was loaded"
        shelves.touch("a")
        assert shelves.loads == ["a", "b", "b", "a"]
        assert set(shelves.residents.standings) == {"a"}


def test_a_model_larger_than_the_budget_is_refused_and_others_stay() -> None:
    with shelf(10, a=6, huge=11) as shelves:
        shelves.guesses["huge"] = 1
        shelves.touch("a")
        lease = shelves.residents.lease("huge")
        with pytest.raises(BrokenModel, match=r"huge takes .*models\.memory_bytes allows"):
            lease.model.result(10)
        assert "huge" in shelves.residents.problems
        with pytest.raises(BrokenModel):
            shelves.residents.lease("huge").model.result(10)
        assert shelves.loads == ["a", "huge"]
        shelves.touch("a")
        assert shelves.loads == ["a", "huge"]


def test_while_one_is_loaded_others_are_used() -> None:
    with shelf(10, a=3, b=3) as shelves:
        shelves.touch("a")
        shelves.gate.clear()
        waiting = shelves.residents.lease("b")
        until(lambda: shelves.loads == ["a", "b"])
        shelves.touch("a")
        assert not waiting.model.done()
        assert shelves.residents.is_awaited("b")
        shelves.gate.set()
        assert waiting.model.result(10).name == "b"


def test_nobody_gets_a_model_before_the_first_ones_are_loaded() -> None:
    shelves = Shelf(10, a=3, b=3)
    shelves.gate.clear()
    lease = shelves.residents.lease("a")
    shelves.residents.start(("a", "b"))
    until(lambda: "a" in shelves.loads)
    assert shelves.residents.starting == ("a", "b")
    assert not lease.model.done()
    shelves.gate.set()
    assert lease.model.result(10).name == "a"
    assert shelves.loads == ["a", "b"]
    shelves.residents.close()
    assert shelves.residents.join(10)


@pytest.mark.parametrize(("error", "again"), [(OutOfMemory("none left", 3), True), (RuntimeError("odd"), False)])
def test_a_model_that_does_not_load_is_tried_again_if_only_memory_was_missing(error: Exception, again: bool) -> None:
    with shelf(10, a=3) as shelves:
        shelves.error = error
        lease = shelves.residents.lease("a")
        with pytest.raises(type(error)):
            lease.model.result(10)
        shelves.error = None
        assert bool(shelves.residents.problems) is not again
        second = shelves.residents.lease("a")
        if again:
            assert second.model.result(10).name == "a"
        else:
            with pytest.raises(BrokenModel, match="RuntimeError: odd"):
                second.model.result(10)


def test_who_waits_when_it_closes_is_told_so() -> None:
    with shelf(10, a=3, b=3) as shelves:
        shelves.gate.clear()
        loading, waiting = shelves.residents.lease("a"), shelves.residents.lease("b")
        until(lambda: shelves.loads == ["a"])
        shelves.residents.close()
        for lease in (loading, waiting, shelves.residents.lease("a")):
            with pytest.raises(Cancelled):
                lease.model.result(10)


def test_many_users_of_more_models_than_fit() -> None:
    sizes = dict.fromkeys("abcde", 4)
    with shelf(10, **sizes) as shelves:
        wrong: list[str] = []

        def use(names: str) -> None:
            for name in names:
                lease = shelves.use(name)
                if shelves.residents.look(name) is None or len(shelves.residents.standings) > 2:
                    wrong.append(name)
                lease.end()

        threads = [threading.Thread(target=use, args=("abcde"[turn:] * 4,)) for turn in range(5)]
        run(threads)
        assert wrong == []
        until(lambda: len(shelves.loads) - len(shelves.unloads) == len(shelves.residents.standings))


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
