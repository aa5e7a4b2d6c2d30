from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest
from fakes import wait_until

from service.core.errors import BrokenModel, Cancelled, OutOfMemory, UnknownModel
from service.serving.devices.models.cache import Lease, ModelCache


@dataclass
class Model:
    name: str
    nbytes: int


class RecordingCache:
    """A model cache that records loads and unloads. Models have the given sizes, and load when `gate` is set."""

    def __init__(self, limit: int, **sizes: int) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes, self.estimates = sizes, dict(sizes)
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.error: Exception | None = None
        self.unload_error: Exception | None = None
        self.model_cache: ModelCache[Model] = ModelCache(
            limit, self.load, estimate_bytes=self.estimates.__getitem__, after_unload=self.unload
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
        """Return a lease whose model is loaded."""
        lease = self.model_cache.lease(name)
        assert lease.model_future.result(10).name == name
        return lease

    def touch(self, *names: str) -> None:
        for name in names:
            self.use(name).end()


@contextmanager
def started_cache(limit: int, *first: str, **sizes: int) -> Iterator[RecordingCache]:
    """Start a cache. The models in `first` are loaded when the gate is set."""
    recording = RecordingCache(limit, **sizes)
    if first:
        recording.gate.clear()
    recording.model_cache.start(first)
    yield recording
    recording.gate.set()
    recording.model_cache.close()
    assert recording.model_cache.join(10)


def test_least_recently_used_model_is_evicted() -> None:
    with started_cache(10, a=4, b=4, c=4, d=8) as cache:
        cache.touch("a", "b", "a", "c")
        wait_until(lambda: cache.unloads == ["b"])
        assert set(cache.model_cache.loaded_models) == {"a", "c"}
        cache.touch("d")
        assert set(cache.model_cache.loaded_models) == {"d"}
        cache.touch("b")
        assert set(cache.model_cache.loaded_models) == {"b"}


def test_models_are_loaded_even_if_freeing_memory_fails(caplog: pytest.LogCaptureFixture) -> None:
    with started_cache(10, a=6, b=6, c=6) as cache:
        cache.unload_error = RuntimeError("the device is lost")
        cache.touch("a", "b", "c")
    assert (cache.unloads, "the device is lost" in caplog.text) == (["a", "b"], True)


def test_model_is_evicted_by_its_current_size() -> None:
    with started_cache(10, a=1, b=1) as cache:
        lease = cache.use("a")
        lease.model_future.result().nbytes = 10
        lease.end()
        assert cache.model_cache.loaded_models["a"].nbytes == 10
        cache.touch("b")
        assert cache.unloads == ["a"]


def test_sizes_are_not_counted_for_leases_on_loaded_models() -> None:
    counts = []

    class CountedModel:
        @property
        def nbytes(self) -> int:
            counts.append(1)
            return 4

    cache = ModelCache(10, lambda _name: CountedModel())
    cache.start(())
    with closing(cache):
        cache.lease("a").model_future.result(10)
        counts.clear()
        cache.lease("a").model_future.result(10)
        assert not counts
    assert cache.join(10)


def test_leases_are_granted_after_all_startup_models_are_loaded() -> None:
    with started_cache(10, "a", "b", a=3, b=3) as cache:
        lease, loads = cache.model_cache.lease("a"), list[list[str]]()
        lease.model_future.add_done_callback(lambda _: loads.append([*cache.loads]))
        wait_until(lambda: "a" in cache.loads)
        assert cache.model_cache.pending_startup_models == ("a", "b")
        cache.gate.set()
        assert lease.model_future.result(10).name == "a"
        wait_until(lambda: loads == [["a", "b"]])


def test_model_in_use_is_not_unloaded_but_gets_no_new_leases_while_another_waits() -> None:
    with started_cache(10, a=6, b=6) as cache:
        first, second = cache.use("a"), cache.use("a")
        other = cache.model_cache.lease("b")
        wait_until(lambda: cache.model_cache.is_load_pending("b"))
        late = cache.model_cache.lease("a")
        first.end()
        assert not other.model_future.done()
        assert not late.model_future.done(), "otherwise b could wait forever while others use a"
        second.end()
        assert other.model_future.result(10).name == "b"
        assert not late.model_future.done()
        other.end()
        assert late.model_future.result(10).name == "a"
        late.end()
    assert cache.unloads == ["a", "b"]


def test_cancelled_lease_stops_the_eviction_of_other_models() -> None:
    with started_cache(10, a=6, b=6) as cache:
        first = cache.use("a")
        other, late = cache.model_cache.lease("b"), cache.model_cache.lease("a")
        other.end()
        assert other.model_future.cancelled()
        first.end()
        assert late.model_future.result(10).name == "a"
        late.end()
        late.end()
        assert cache.model_cache.loaded_models["a"].active_request_count == 0
    assert cache.unloads == []


def test_memory_limit_holds_for_a_model_that_is_larger_than_estimated() -> None:
    with started_cache(10, a=6, b=6) as cache:
        cache.estimates["b"] = 1
        cache.touch("a", "b")
        assert cache.loads == ["a", "b", "b"], "the size of b is known only after it was loaded"
        cache.touch("a")
        assert cache.loads == ["a", "b", "b", "a"]
        assert set(cache.model_cache.loaded_models) == {"a"}


def test_model_larger_than_the_limit_fails_and_other_models_stay_loaded() -> None:
    with started_cache(10, a=6, huge=11) as cache:
        cache.estimates["huge"] = 1
        cache.touch("a")
        lease = cache.model_cache.lease("huge")
        with pytest.raises(BrokenModel, match=r"huge takes .*models\.memory_bytes allows"):
            lease.model_future.result(10)
        assert "huge" in cache.model_cache.problems
        with pytest.raises(BrokenModel):
            cache.model_cache.lease("huge").model_future.result(10)
        assert cache.loads == ["a", "huge"]
        cache.touch("a")
        assert cache.loads == ["a", "huge"]


def test_loaded_models_are_usable_while_another_is_loaded() -> None:
    with started_cache(10, a=3, b=3) as cache:
        cache.touch("a")
        cache.gate.clear()
        waiting = cache.model_cache.lease("b")
        wait_until(lambda: cache.loads == ["a", "b"])
        cache.touch("a")
        assert not waiting.model_future.done()
        assert cache.model_cache.is_load_pending("b")
        cache.gate.set()
        assert waiting.model_future.result(10).name == "b"


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [(OutOfMemory("none left", 3), True), (UnknownModel("gone"), True), (RuntimeError("unexpected"), False)],
)
def test_loading_is_retried_after_temporary_errors_only(error: Exception, is_retried: bool) -> None:
    with started_cache(10, a=3) as cache:
        cache.error = error
        lease = cache.model_cache.lease("a")
        with pytest.raises(type(error)):
            lease.model_future.result(10)
        cache.error = None
        assert bool(cache.model_cache.problems) is not is_retried
        second = cache.model_cache.lease("a")
        if is_retried:
            assert second.model_future.result(10).name == "a"
        else:
            with pytest.raises(BrokenModel, match="RuntimeError: unexpected"):
                second.model_future.result(10)


def test_waiting_leases_are_cancelled_when_the_cache_closes() -> None:
    with started_cache(10, a=3, b=3) as cache:
        cache.gate.clear()
        loading, waiting = cache.model_cache.lease("a"), cache.model_cache.lease("b")
        wait_until(lambda: cache.loads == ["a"])
        cache.model_cache.close()
        for lease in (loading, waiting, cache.model_cache.lease("a")):
            with pytest.raises(Cancelled):
                lease.model_future.result(10)


def test_concurrent_use_of_more_models_than_fit() -> None:
    sizes = dict.fromkeys("abcde", 4)
    with started_cache(10, **sizes) as cache:
        unexpected_names: list[str] = []

        def use(names: str) -> None:
            for name in names:
                lease = cache.use(name)
                if cache.model_cache.get(name) is None or len(cache.model_cache.loaded_models) > 2:
                    unexpected_names.append(name)
                lease.end()

        with ThreadPoolExecutor(5) as threads:
            list(threads.map(use, ["abcde"[start:] * 4 for start in range(5)]))
        assert unexpected_names == []
        wait_until(lambda: len(cache.loads) - len(cache.unloads) == len(cache.model_cache.loaded_models))
