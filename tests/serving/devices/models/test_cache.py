from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from fakes import until

from service.core.errors import BrokenModel, Cancelled, OutOfMemory, UnknownModel
from service.serving.devices.models.cache import Lease, ModelCache


@dataclass
class Model:
    name: str
    nbytes: int


class RecordingCache:
    """A ModelCache that loads models of the given sizes, as soon as `gate` is open; `loads` in their order."""

    def __init__(self, limit: int, **sizes: int) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes, self.guesses = sizes, dict(sizes)
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.error: Exception | None = None
        self.unload_error: Exception | None = None
        self.model_cache: ModelCache[Model] = ModelCache(
            limit, self.load, guess=self.guesses.__getitem__, unloaded=self.unload
        )

    def load(self, name: str) -> Model:
        self.loads.append(name)
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return Model(name, self.sizes[name])

    def unload(self, name: str) -> None:
        self.unloads.append(name)
        if self.unload_error is not None:
            raise self.unload_error

    def use(self, name: str) -> Lease[Model]:
        """A lease whose model is there."""
        lease = self.model_cache.lease(name)
        assert lease.model.result(10).name == name
        return lease

    def touch(self, *names: str) -> None:
        for name in names:
            self.use(name).end()


@contextmanager
def started_cache(limit: int, *first: str, **sizes: int) -> Iterator[RecordingCache]:
    """A cache that loads the `first` models once the gate is opened."""
    made = RecordingCache(limit, **sizes)
    if first:
        made.gate.clear()
    made.model_cache.start(first)
    yield made
    made.gate.set()
    made.model_cache.close()
    assert made.model_cache.join(10)


def test_the_least_recently_used_makes_room() -> None:
    with started_cache(10, a=4, b=4, c=4, d=8) as recording:
        recording.touch("a", "b", "a", "c")
        until(lambda: recording.unloads == ["b"])
        assert set(recording.model_cache.loaded_models) == {"a", "c"}
        recording.touch("d")
        assert set(recording.model_cache.loaded_models) == {"d"}
        recording.touch("b")
        assert set(recording.model_cache.loaded_models) == {"b"}


def test_memory_that_cannot_be_freed_keeps_no_other_model_from_being_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with started_cache(10, a=6, b=6, c=6) as recording:
        recording.unload_error = RuntimeError("the device is lost")
        recording.touch("a", "b", "c")
    assert (recording.unloads, "the device is lost" in caplog.text) == (["a", "b"], True)


def test_a_model_that_has_grown_makes_room_as_it_is() -> None:
    with started_cache(10, a=1, b=1) as recording:
        lease = recording.use("a")
        lease.model.result().nbytes = 10
        lease.end()
        assert recording.model_cache.loaded_models["a"].nbytes == 10
        recording.touch("b")
        assert recording.unloads == ["a"]


def test_nobody_gets_a_model_before_the_first_ones_are_loaded() -> None:
    with started_cache(10, "a", "b", a=3, b=3) as recording:
        lease, told = recording.model_cache.lease("a"), list[list[str]]()
        lease.model.add_done_callback(lambda _: told.append([*recording.loads]))
        until(lambda: "a" in recording.loads)
        assert recording.model_cache.starting == ("a", "b")
        recording.gate.set()
        assert lease.model.result(10).name == "a"
        until(lambda: told == [["a", "b"]])


def test_a_model_in_use_is_never_unloaded_and_the_one_that_waits_for_its_room_has_its_turn() -> None:
    with started_cache(10, a=6, b=6) as recording:
        mine, also_mine = recording.use("a"), recording.use("a")
        other = recording.model_cache.lease("b")
        until(lambda: recording.model_cache.is_awaited("b"))
        late = recording.model_cache.lease("a")
        mine.end()
        assert not other.model.done()
        assert not late.model.done(), "or b would wait for ever while others use a"
        also_mine.end()
        assert other.model.result(10).name == "b"
        assert not late.model.done()
        other.end()
        assert late.model.result(10).name == "a"
        late.end()
    assert recording.unloads == ["a", "b"]


def test_whoever_waits_for_room_and_gives_up_lets_others_use_what_is_there() -> None:
    with started_cache(10, a=6, b=6) as recording:
        mine = recording.use("a")
        other, late = recording.model_cache.lease("b"), recording.model_cache.lease("a")
        other.end()
        assert other.model.cancelled()
        mine.end()
        assert late.model.result(10).name == "a"
        late.end()
        late.end()
        assert recording.model_cache.loaded_models["a"].users == 0
    assert recording.unloads == []


def test_a_model_that_is_larger_than_was_guessed_still_keeps_to_the_budget() -> None:
    with started_cache(10, a=6, b=6) as recording:
        recording.guesses["b"] = 1
        recording.touch("a", "b")
        assert recording.loads == ["a", "b", "b"], "it is known to take 6 only once it was loaded"
        recording.touch("a")
        assert recording.loads == ["a", "b", "b", "a"]
        assert set(recording.model_cache.loaded_models) == {"a"}


def test_a_model_larger_than_the_budget_is_refused_and_others_stay() -> None:
    with started_cache(10, a=6, huge=11) as recording:
        recording.guesses["huge"] = 1
        recording.touch("a")
        lease = recording.model_cache.lease("huge")
        with pytest.raises(BrokenModel, match=r"huge takes .*models\.memory_bytes allows"):
            lease.model.result(10)
        assert "huge" in recording.model_cache.problems
        with pytest.raises(BrokenModel):
            recording.model_cache.lease("huge").model.result(10)
        assert recording.loads == ["a", "huge"]
        recording.touch("a")
        assert recording.loads == ["a", "huge"]


def test_while_one_is_loaded_others_are_used() -> None:
    with started_cache(10, a=3, b=3) as recording:
        recording.touch("a")
        recording.gate.clear()
        waiting = recording.model_cache.lease("b")
        until(lambda: recording.loads == ["a", "b"])
        recording.touch("a")
        assert not waiting.model.done()
        assert recording.model_cache.is_awaited("b")
        recording.gate.set()
        assert waiting.model.result(10).name == "b"


@pytest.mark.parametrize(
    ("error", "again"),
    [(OutOfMemory("none left", 3), True), (UnknownModel("gone"), True), (RuntimeError("odd"), False)],
)
def test_a_model_that_does_not_load_is_tried_again_unless_it_is_broken(error: Exception, again: bool) -> None:
    with started_cache(10, a=3) as recording:
        recording.error = error
        lease = recording.model_cache.lease("a")
        with pytest.raises(type(error)):
            lease.model.result(10)
        recording.error = None
        assert bool(recording.model_cache.problems) is not again
        second = recording.model_cache.lease("a")
        if again:
            assert second.model.result(10).name == "a"
        else:
            with pytest.raises(BrokenModel, match="RuntimeError: odd"):
                second.model.result(10)


def test_who_waits_when_it_closes_is_told_so() -> None:
    with started_cache(10, a=3, b=3) as recording:
        recording.gate.clear()
        loading, waiting = recording.model_cache.lease("a"), recording.model_cache.lease("b")
        until(lambda: recording.loads == ["a"])
        recording.model_cache.close()
        for lease in (loading, waiting, recording.model_cache.lease("a")):
            with pytest.raises(Cancelled):
                lease.model.result(10)


def test_many_users_of_more_models_than_fit() -> None:
    sizes = dict.fromkeys("abcde", 4)
    with started_cache(10, **sizes) as recording:
        wrong: list[str] = []

        def use(names: str) -> None:
            for name in names:
                lease = recording.use(name)
                if recording.model_cache.get(name) is None or len(recording.model_cache.loaded_models) > 2:
                    wrong.append(name)
                lease.end()

        with ThreadPoolExecutor(5) as threads:
            list(threads.map(use, ["abcde"[turn:] * 4 for turn in range(5)]))
        assert wrong == []
        until(lambda: len(recording.loads) - len(recording.unloads) == len(recording.model_cache.loaded_models))
