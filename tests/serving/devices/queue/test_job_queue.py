from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from fakes import Clock
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import BadFile, NotReady, QueueFull
from service.serving.devices.queue.job import FreeMemory, Job, Needs
from service.serving.devices.queue.job_queue import BATCHES_AHEAD, JobQueue
from service.serving.devices.queue.memory import JobMemory


def done(_job: Job[int]) -> int:
    return 7


def sized(windows: int, host: int = 0, batch: int = 1, owner: str | None = None) -> Job[int]:
    return Job("m", done, windows=windows, needs=lambda: Needs(host, batch=batch), owner=owner)


def owned(owner: str, windows: int = 1, batch: int = 1) -> Job[int]:
    return sized(windows, batch=batch, owner=owner)


def offer(queue: JobQueue, *jobs: Job[Any]) -> None:
    for job in jobs:
        queue.offer(job)


def takes(queue: JobQueue, *jobs: Job[int]) -> bool:
    """Whether these begin now, in this order, and then no other."""
    for job in jobs:
        if queue._next() is not job or queue.take() is not job:
            return False
    return queue._next() is None


def timed(queue: JobQueue, name: str, windows: int, seconds: float) -> None:
    """Let the queue see how long jobs of this name take."""
    clock = Clock()

    def work(job: Job[None]) -> None:
        job.advance(0, windows)
        clock.now += seconds
        job.advance(windows, windows)

    job = Job(name, work, windows=windows, clock=clock)
    queue.put(job)
    assert queue.take() is job
    job.run()


def test_as_many_jobs_as_always_may_run_whatever_the_device_still_has_to_do() -> None:
    queue = JobQueue(limit=30, always=3)
    jobs = [sized(10_000) for _ in range(5)]
    offer(queue, *jobs)
    assert takes(queue, *jobs[:3])


def test_as_many_small_jobs_run_as_the_next_batches_have_room_for() -> None:
    queue = JobQueue(limit=30)
    jobs = [sized(1, batch=2) for _ in range(10)]
    offer(queue, *jobs)
    room = BATCHES_AHEAD * 2
    assert takes(queue, *jobs[:room])
    # Its window is computed, so that another one may come, though it still is decoded.
    jobs[0].advance(1, 1)
    assert takes(queue, jobs[room])
    jobs[1].run()
    assert takes(queue, jobs[room + 1])


def test_second_large_job_waits_until_the_first_is_nearly_done_and_small_ones_do_not() -> None:
    queue = JobQueue(limit=30)
    first, second, half, small = sized(1000), sized(1000), sized(400), sized(1)
    queue.offer(first)
    assert takes(queue, first)
    queue.offer(second)
    assert takes(queue)
    offer(queue, small, half)
    assert takes(queue, small, half), "what will be done long before it gets in beside it"
    first.advance(1000 - BATCHES_AHEAD, 1000)
    assert takes(queue), "the half one has work for long enough"
    half.run()
    assert takes(queue)
    first.advance(1000 - BATCHES_AHEAD + 1, 1000)
    small.run()
    assert takes(queue, second)


def test_job_that_does_not_fit_in_memory_waits_and_is_passed_by_those_that_fit_in_beside_it() -> None:
    free = [100]
    queue = JobQueue(limit=30, memory=JobMemory(lambda: FreeMemory(free[0])))
    large, next_large, small, beside = sized(1000, 60), sized(100, 90), sized(1, 15), sized(1, 5)
    queue.offer(large)
    assert takes(queue, large)
    next_large.created -= 100
    offer(queue, next_large, small, beside)
    assert queue.position(next_large) == 1
    # The small one would fit in now, and then be in the way once the large one has ended: 90 + 15 > 100.
    assert takes(queue, beside)
    large.run()
    assert takes(queue, next_large)
    beside.run()
    next_large.run()
    assert takes(queue, small)


def test_memory_that_others_have_taken_is_not_there_and_what_a_job_gives_back_counts_at_once() -> None:
    free = [80]
    queue = JobQueue(limit=30, memory=JobMemory(lambda: FreeMemory(free[0]), 60))
    large, small, first, second = sized(1, 40), sized(1, 10), sized(1, 30), sized(1, 30)
    offer(queue, large, small)
    assert takes(queue, large, small)
    free[0] = 20
    small.run()
    offer(queue, first, second)
    assert queue._next() is None
    free[0] = 80
    large.run()
    assert takes(queue, first, second)


def test_job_too_large_for_the_memory_begins_when_it_is_on_its_own() -> None:
    queue = JobQueue(limit=30, memory=JobMemory(lambda: FreeMemory(10, 10)))
    impossible = sized(10, 1000)
    queue.offer(impossible)
    assert takes(queue, impossible)
    device = Job("m", done, windows=1, needs=lambda: Needs(0, 11))
    queue.offer(device)
    assert takes(queue)


def test_job_that_takes_more_than_was_thought_leaves_less_for_others() -> None:
    queue = JobQueue(8, 4, JobMemory(lambda: FreeMemory(100, None)))
    jobs = [Job("nuclei", lambda _job: None, windows=1, needs=lambda: Needs(40, 0, 8)) for _ in range(3)]
    offer(queue, *jobs)
    assert queue.take() is jobs[0]
    queue.revise(jobs[0], Needs(70, 0, 8))
    queue.revise(jobs[1], Needs(1, 0, 8))
    assert queue._next() is None
    queue.revise(jobs[0], Needs(20, 0, 8))
    assert queue.take() is jobs[1]
    assert queue.take() is jobs[2]


def test_expected_work_is_time_and_not_windows() -> None:
    queue = JobQueue(limit=4)
    timed(queue, "slow", windows=1, seconds=0.2)
    timed(queue, "quick", windows=1000, seconds=0.01)
    slow, quick = Job("slow", done, windows=10), Job("quick", done, windows=100)
    offer(queue, slow, quick)
    assert queue.take() is quick


def test_pace_of_a_model_is_the_device_s_and_not_that_of_the_company_that_a_job_had() -> None:
    queue = JobQueue(limit=4)

    def work(job: Job[None]) -> None:
        job.advance(10, 10)
        job.device_seconds = 100.0

    job = Job("m", work, windows=10)
    queue.offer(job)
    queue.take().run()
    waiting = sized(5)
    queue.offer(waiting)
    assert queue.seconds_left(waiting) == pytest.approx(50)


def test_decoding_counts_and_its_time_is_learnt() -> None:
    queue, clock = JobQueue(limit=4), Clock()

    def work(job: Job[None]) -> None:
        job.advance(0, 10)
        clock.now += 100
        job.advance(10, 10)
        clock.now += 300

    first = Job("m", work, windows=10, clock=clock)
    queue.offer(first)
    queue.take().run()
    running = Job("m", done, windows=10, clock=clock)
    queue.offer(running)
    # 40 s a window with its decoding, and decoding takes three times as long as windows.
    assert queue.seconds_left(running) == pytest.approx(400 * 4)
    assert queue.expect("m", 20) == pytest.approx(800 * 4)
    assert queue.take() is running
    assert running.future.set_running_or_notify_cancel()
    running._started = clock.now
    clock.now += 50
    running.advance(5, 10)
    assert queue.progress(running) == (5, 10 + 30)
    assert queue.seconds_left(running) == pytest.approx(50 + 300)
    clock.now += 50
    running.advance(10, 10)
    clock.now += 150
    finished, total = queue.progress(running)
    assert 10 + 0.4 * (total - 10) <= finished <= 10 + 0.5 * (total - 10)
    assert queue.seconds_left(running) == pytest.approx(150)
    clock.now += 300
    assert queue.progress(running) == (total - 1, total)
    assert queue.seconds_left(running) is None, "it takes longer than ever"


def test_endless_small_jobs_do_not_starve_a_huge_one() -> None:
    """Only those that come within the time that the huge one takes by itself may pass it."""
    queue = JobQueue(limit=4)
    timed(queue, "m", windows=100, seconds=10)
    huge = Job("m", done, windows=300)
    queue.offer(huge)
    passed = 0
    while True:
        small = Job("m", done, windows=20)
        # As if each came when the one before it was done.
        small.created = huge.created + passed * 2
        queue.offer(small)
        taken = queue.take()
        if taken is huge:
            break
        passed += 1
        taken.run()
    assert 14 <= passed <= 15


def test_job_that_is_not_ready_keeps_its_place_and_lets_others_pass() -> None:
    queue = JobQueue(limit=2)
    unready, other = Job("m", done, windows=1, ready=False), Job("m", done, windows=9)
    offer(queue, unready, other)
    assert queue.position(unready) == 1
    assert queue.take() is other
    queue.release(unready)
    assert queue.take() is unready


def test_job_that_cannot_become_ready_fails_and_leaves() -> None:
    queue = JobQueue(limit=2)
    broken, given_up = Job("m", done, ready=False), Job("m", done, ready=False)
    queue.offer(broken)
    broken.refuse(BadFile("cut short"))
    assert (queue.waiting, broken.state) == (0, "failed")
    given_up.cancel()
    given_up.refuse(BadFile("cut short"))
    assert given_up.state == "cancelled"


def test_closed_queue_refuses_gives_away_what_waits_and_ends_once_what_is_not_ready_is_given_up() -> None:
    queue, taken = JobQueue(limit=2), [object()]
    unready, waiting = Job("m", done, ready=False), Job("m", done)
    offer(queue, unready, waiting)
    queue.close()
    with pytest.raises(NotReady):
        queue.offer(Job("late", done))
    assert queue.take() is waiting
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    unready.cancel()
    thread.join(10)
    assert taken[1] is None


def test_time_left_counts_what_runs_and_what_comes_before() -> None:
    queue = JobQueue(limit=4)
    unknown = Job("m", done, windows=10)
    queue.offer(unknown)
    assert queue.seconds_left(unknown) is None, "a model that was never timed"
    unknown.cancel()
    clock = Clock()
    timed(queue, "m", windows=10, seconds=10)
    first, second = Job("m", done, windows=10, clock=clock), Job("m", done, windows=20, clock=clock)
    offer(queue, first, second)
    assert queue.seconds_left(second) == pytest.approx(30)
    assert queue.take() is first
    assert first.future.set_running_or_notify_cancel()
    first._started = clock.now
    clock.now += 3
    first.advance(3, 10)
    assert (queue.seconds_left(first), queue.seconds_left(second)) == pytest.approx((7, 27))
    offer(queue, *(Job("m", done) for _ in range(3)))
    clock.now += 0.1
    with pytest.raises(QueueFull) as full:
        queue.check()
    assert full.value.retry_after == 8, "what the running one needs, rounded up"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_limit_counts_those_beyond_the_one_that_runs(limit: int) -> None:
    queue = JobQueue(limit)
    queue.offer(Job("runs", done))
    queue.take()
    offer(queue, *(Job("waits", done) for _ in range(limit)))
    with pytest.raises(QueueFull):
        queue.offer(Job("too many", done))
    with pytest.raises(QueueFull):
        queue.check()
    # Jobs of an earlier process are never refused.
    queue.put(Job("earlier", done))
    assert queue.waiting == limit + 1


def test_finished_job_makes_room_and_a_cancelled_one_does_at_once() -> None:
    queue = JobQueue(1)
    running, waiting = Job("runs", done), Job("waits", done)
    offer(queue, running, waiting)
    queue.take().run()
    assert queue.running == ()
    queue.offer(Job("next", done))
    waiting.cancel()
    assert queue.waiting == 1
    queue.offer(Job("last", done))


def test_retry_after_follows_the_recent_durations() -> None:
    queue, clock = JobQueue(0), Clock()
    # None is known, then the median of those before.
    for seconds, expected in ((0, 5), (1.2, 1), (1.3, 1), (0, 2)):

        def work(_job: Job[None], seconds: float = seconds) -> None:
            clock.now += seconds

        job = Job("timed", work, clock=clock)
        queue.offer(job)
        assert queue.take() is job
        with pytest.raises(QueueFull) as full:
            queue.check()
        assert full.value.retry_after == expected
        job.run()


def test_owners_take_turns_and_those_of_one_owner_come_as_they_are_due() -> None:
    queue = JobQueue(limit=30)
    many = [owned("ada", windows) for windows in (3, 1, 2)]
    few = [owned("bob", 100), owned("cleo", 200)]
    offer(queue, *many, *few)
    assert [queue.take() for _ in range(2)] == [many[1], few[0]]
    # Both run one; whose first it is comes before.
    late = owned("dora", 1000)
    queue.put(late)
    expected = [few[1], late, many[2], many[0]]
    assert [queue.position(job) for job in expected] == [1, 2, 3, 4]
    many[1].run()
    assert queue.position(many[2]) == 1, "nothing of hers runs any more"


@given(st.lists(st.sampled_from("abcdef"), max_size=200), st.integers(0, 40))
def test_no_owner_takes_more_places_than_are_left_for_the_others(owners: list[str], limit: int) -> None:
    queue, held = JobQueue(limit, shared=True), Counter[str]()
    for owner in owners:
        left = limit + 1 - held.total()
        assert queue.full(owner) == (held[owner] >= left)
        try:
            queue.offer(owned(owner))
        except QueueFull:
            assert held[owner] > 0 or left == 0
        else:
            held[owner] += 1
    if held:
        assert held.most_common(1)[0][1] <= limit // 2 + 1


def test_last_place_among_those_that_run_is_for_an_owner_who_has_none() -> None:
    queue = JobQueue(30, at_once=2, shared=True)
    first, second, other = owned("ada", batch=9), owned("ada", batch=9), owned("bob", batch=9)
    offer(queue, first, second)
    assert takes(queue, first)
    queue.offer(other)
    assert takes(queue, other)
    first.run()
    assert takes(queue, second)
    alone = JobQueue(30, at_once=1, shared=True)
    alone.offer(only := owned("ada"))
    assert takes(alone, only)


def test_cancel_all_reaches_those_that_wait_and_the_one_that_runs() -> None:
    queue = JobQueue(4)
    running, waiting = Job("runs", done), Job("waits", done)
    offer(queue, running, waiting)
    queue.take()
    assert (queue.running, queue.position(running), queue.position(waiting)) == ((running,), None, 1)
    assert running.future.set_running_or_notify_cancel()
    queue.cancel_all()
    assert running.cancelled()
    assert (waiting.state, queue.waiting) == ("cancelled", 0)
