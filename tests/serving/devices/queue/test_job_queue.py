from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from fakes import Clock
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import BadFile, NotReady, QueueFull
from service.serving.devices.queue.job import FreeMemory, Job, ResourceNeeds
from service.serving.devices.queue.job_queue import BATCHES_AHEAD, JobQueue
from service.serving.devices.queue.memory import JobMemory


def return_seven(_job: Job[int]) -> int:
    return 7


def make_job(windows: int, host: int = 0, batch: int = 1, owner: str | None = None) -> Job[int]:
    return Job(
        "m", return_seven, window_count=windows, needs=lambda: ResourceNeeds(host, batch_size=batch), owner=owner
    )


def make_owned_job(owner: str, windows: int = 1, batch: int = 1) -> Job[int]:
    return make_job(windows, batch=batch, owner=owner)


def offer(queue: JobQueue, *jobs: Job[Any]) -> None:
    for job in jobs:
        queue.offer(job)


def takes(queue: JobQueue, *jobs: Job[int]) -> bool:
    """Return whether exactly these jobs begin now, in this order."""
    for job in jobs:
        if queue._find_next_job() is not job or queue.take() is not job:
            return False
    return queue._find_next_job() is None


def run_timed_job(queue: JobQueue, name: str, windows: int, seconds: float) -> None:
    """Run a job, so that the queue learns the duration of jobs of this model."""
    clock = Clock()

    def work(job: Job[None]) -> None:
        job.advance(0, windows)
        clock.now += seconds
        job.advance(windows, windows)

    job = Job(name, work, window_count=windows, clock=clock)
    queue.put(job)
    assert queue.take() is job
    job.run()


def test_guaranteed_jobs_run_regardless_of_remaining_work() -> None:
    queue = JobQueue(max_waiting=30, guaranteed_job_count=3)
    jobs = [make_job(10_000) for _ in range(5)]
    offer(queue, *jobs)
    assert takes(queue, *jobs[:3])


def test_small_jobs_fill_the_next_batches() -> None:
    queue = JobQueue(max_waiting=30)
    jobs = [make_job(1, batch=2) for _ in range(10)]
    offer(queue, *jobs)
    slots = BATCHES_AHEAD * 2
    assert takes(queue, *jobs[:slots])
    # The window of the first job is computed, so another job may begin while the first one is decoded.
    jobs[0].advance(1, 1)
    assert takes(queue, jobs[slots])
    jobs[1].run()
    assert takes(queue, jobs[slots + 1])


def test_second_large_job_waits_until_the_first_is_nearly_done() -> None:
    queue = JobQueue(max_waiting=30)
    first, second, half, small = make_job(1000), make_job(1000), make_job(400), make_job(1)
    queue.offer(first)
    assert takes(queue, first)
    queue.offer(second)
    assert takes(queue)
    offer(queue, small, half)
    assert takes(queue, small, half), "jobs that will be done long before the first job begin"
    first.advance(1000 - BATCHES_AHEAD, 1000)
    assert takes(queue), "the job `half` keeps the device busy long enough"
    half.run()
    assert takes(queue)
    first.advance(1000 - BATCHES_AHEAD + 1, 1000)
    small.run()
    assert takes(queue, second)


def test_job_that_waits_for_memory_is_overtaken_by_jobs_that_fit() -> None:
    free = [100]
    queue = JobQueue(max_waiting=30, memory=JobMemory(lambda: FreeMemory(free[0])))
    large, next_large, small, tiny = make_job(1000, 60), make_job(100, 90), make_job(1, 15), make_job(1, 5)
    queue.offer(large)
    assert takes(queue, large)
    next_large.creation_time -= 100
    offer(queue, next_large, small, tiny)
    assert queue.get_position(next_large) == 1
    # `small` would fit now, but block `next_large` when `large` has ended: 90 + 15 > 100.
    assert takes(queue, tiny)
    large.run()
    assert takes(queue, next_large)
    tiny.run()
    next_large.run()
    assert takes(queue, small)


def test_free_memory_is_measured_again_when_a_job_ends() -> None:
    free = [80]
    queue = JobQueue(max_waiting=30, memory=JobMemory(lambda: FreeMemory(free[0]), 60))
    large, small, first, second = make_job(1, 40), make_job(1, 10), make_job(1, 30), make_job(1, 30)
    offer(queue, large, small)
    assert takes(queue, large, small)
    free[0] = 20
    small.run()
    offer(queue, first, second)
    assert queue._find_next_job() is None
    free[0] = 80
    large.run()
    assert takes(queue, first, second)


def test_job_too_large_for_memory_runs_alone() -> None:
    queue = JobQueue(max_waiting=30, memory=JobMemory(lambda: FreeMemory(10, 10)))
    oversized = make_job(10, 1000)
    queue.offer(oversized)
    assert takes(queue, oversized)
    device = Job("m", return_seven, window_count=1, needs=lambda: ResourceNeeds(0, 11))
    queue.offer(device)
    assert takes(queue)


def test_revised_needs_affect_other_jobs() -> None:
    queue = JobQueue(8, 4, JobMemory(lambda: FreeMemory(100, None)))
    jobs = [Job("nuclei", lambda _job: None, window_count=1, needs=lambda: ResourceNeeds(40, 0, 8)) for _ in range(3)]
    offer(queue, *jobs)
    assert queue.take() is jobs[0]
    queue.update_needs(jobs[0], ResourceNeeds(70, 0, 8))
    queue.update_needs(jobs[1], ResourceNeeds(1, 0, 8))
    assert queue._find_next_job() is None
    queue.update_needs(jobs[0], ResourceNeeds(20, 0, 8))
    assert queue.take() is jobs[1]
    assert queue.take() is jobs[2]


def test_short_jobs_are_ordered_by_time_not_by_windows() -> None:
    queue = JobQueue(max_waiting=4)
    run_timed_job(queue, "slow", windows=1, seconds=0.2)
    run_timed_job(queue, "quick", windows=1000, seconds=0.01)
    slow, quick = Job("slow", return_seven, window_count=10), Job("quick", return_seven, window_count=100)
    offer(queue, slow, quick)
    assert queue.take() is quick


def test_seconds_per_window_are_learned_from_device_time() -> None:
    queue = JobQueue(max_waiting=4)

    def work(job: Job[None]) -> None:
        job.advance(10, 10)
        job.device_seconds = 100.0

    job = Job("m", work, window_count=10)
    queue.offer(job)
    queue.take().run()
    waiting = make_job(5)
    queue.offer(waiting)
    assert queue.estimate_seconds_left(waiting) == pytest.approx(50)


def test_finishing_time_is_learned_and_part_of_estimates() -> None:
    queue, clock = JobQueue(max_waiting=4), Clock()

    def work(job: Job[None]) -> None:
        job.advance(0, 10)
        clock.now += 100
        job.advance(10, 10)
        clock.now += 300

    first = Job("m", work, window_count=10, clock=clock)
    queue.offer(first)
    queue.take().run()
    running = Job("m", return_seven, window_count=10, clock=clock)
    queue.offer(running)
    # A job takes 40 s per window including decoding, and decoding takes three times as long as the windows.
    assert queue.estimate_seconds_left(running) == pytest.approx(400 * 4)
    assert queue.take() is running
    assert running.future.set_running_or_notify_cancel()
    running._start_time = clock.now
    clock.now += 50
    running.advance(5, 10)
    assert queue.get_progress(running) == (5, 10 + 30)
    assert queue.estimate_seconds_left(running) == pytest.approx(50 + 300)
    clock.now += 50
    running.advance(10, 10)
    clock.now += 150
    finished, total = queue.get_progress(running)
    assert 10 + 0.4 * (total - 10) <= finished <= 10 + 0.5 * (total - 10)
    assert queue.estimate_seconds_left(running) == pytest.approx(150)
    clock.now += 300
    assert queue.get_progress(running) == (total - 1, total)
    assert queue.estimate_seconds_left(running) is None, "finishing takes longer than expected"


def test_duration_of_a_new_job_is_learned_from_jobs_of_similar_size() -> None:
    queue, clock = JobQueue(max_waiting=4), Clock()
    assert queue.estimate_new_job_seconds("m", 10) is None

    def run(windows: int, seconds: float) -> None:
        def work(job: Job[None]) -> None:
            job.advance(windows // 4, windows // 4)
            clock.now += seconds

        queue.offer(Job("m", work, window_count=windows, clock=clock))
        queue.take().run()

    run(10, 90.0)
    for _ in range(5):
        run(10, 20.0)
    for _ in range(5):
        run(1000, 500.0)
    run(1, 7.0)
    assert queue.estimate_new_job_seconds("m", 1) == pytest.approx(7)
    assert queue.estimate_new_job_seconds("m", 12) == pytest.approx(24)
    assert queue.estimate_new_job_seconds("m", 2000) == pytest.approx(1000)
    assert queue.estimate_new_job_seconds("other", 12) is None


def test_duration_of_a_new_job_excludes_the_time_for_jobs_that_ran_at_the_same_time() -> None:
    queue, clock = JobQueue(max_waiting=4, guaranteed_job_count=4), Clock()
    jobs = [Job("m", return_seven, window_count=10, clock=clock) for _ in range(4)]
    offer(queue, *jobs)
    for _ in jobs:
        queue.take()
    clock.now += 80
    for job in jobs:
        job.run()
    assert queue.estimate_new_job_seconds("m", 10) == pytest.approx(20)


def test_new_job_shares_the_device_with_larger_jobs_and_waits_for_smaller_ones() -> None:
    queue = JobQueue(max_waiting=4, max_running=3, guaranteed_job_count=3)
    run_timed_job(queue, "m", windows=10, seconds=10)
    assert queue.estimate_new_job_seconds("m", 10) == pytest.approx(10)
    offer(queue, make_job(1000))
    assert queue.estimate_new_job_seconds("m", 10) == pytest.approx(2 * 10), "the job overtakes the waiting one"
    assert queue.estimate_new_job_seconds("m", 2000) == pytest.approx(1000 + 2000)
    queue.take()
    offer(queue, make_job(4))
    queue.take()
    assert queue.estimate_new_job_seconds("m", 10) == pytest.approx(2 * (4 + 10))
    offer(queue, make_job(100))
    queue.take()
    assert queue.estimate_new_job_seconds("m", 10) == pytest.approx(10 + 1000 + 4 + 100), "no further job may start"


def test_endless_small_jobs_do_not_starve_a_huge_job() -> None:
    """Only jobs that are created within the duration of the huge job may overtake it."""
    queue = JobQueue(max_waiting=4)
    run_timed_job(queue, "m", windows=100, seconds=10)
    huge = Job("m", return_seven, window_count=300)
    queue.offer(huge)
    overtaken_by = 0
    while True:
        small = Job("m", return_seven, window_count=20)
        # Each job is created when the previous one is done.
        small.creation_time = huge.creation_time + overtaken_by * 2
        queue.offer(small)
        taken = queue.take()
        if taken is huge:
            break
        overtaken_by += 1
        taken.run()
    assert 14 <= overtaken_by <= 15


def test_job_that_is_not_ready_keeps_its_place_and_can_be_overtaken() -> None:
    queue = JobQueue(max_waiting=2)
    unready, other = Job("m", return_seven, window_count=1, is_ready=False), Job("m", return_seven, window_count=9)
    offer(queue, unready, other)
    assert queue.get_position(unready) == 1
    assert queue.take() is other
    queue.mark_ready(unready)
    assert queue.take() is unready


def test_job_that_fails_before_its_start_leaves_the_queue() -> None:
    queue = JobQueue(max_waiting=2)
    broken, cancelled = Job("m", return_seven, is_ready=False), Job("m", return_seven, is_ready=False)
    queue.offer(broken)
    broken.fail_before_start(BadFile("cut short"))
    assert (queue.waiting_count, broken.state) == (0, "failed")
    cancelled.cancel()
    cancelled.fail_before_start(BadFile("cut short"))
    assert cancelled.state == "cancelled"


def test_closed_queue_refuses_jobs_and_ends_after_the_last_waiting_job() -> None:
    queue, taken = JobQueue(max_waiting=2), [object()]
    unready, waiting = Job("m", return_seven, is_ready=False), Job("m", return_seven)
    offer(queue, unready, waiting)
    queue.close()
    with pytest.raises(NotReady):
        queue.offer(Job("late", return_seven))
    assert queue.take() is waiting
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    unready.cancel()
    thread.join(10)
    assert taken[1] is None


def test_seconds_left_include_running_and_earlier_jobs() -> None:
    queue = JobQueue(max_waiting=4)
    unknown = Job("m", return_seven, window_count=10)
    queue.offer(unknown)
    assert queue.estimate_seconds_left(unknown) is None, "the model was never timed"
    unknown.cancel()
    clock = Clock()
    run_timed_job(queue, "m", windows=10, seconds=10)
    first, second = (
        Job("m", return_seven, window_count=10, clock=clock),
        Job("m", return_seven, window_count=20, clock=clock),
    )
    offer(queue, first, second)
    assert queue.estimate_seconds_left(second) == pytest.approx(30)
    assert queue.take() is first
    assert first.future.set_running_or_notify_cancel()
    first._start_time = clock.now
    clock.now += 3
    first.advance(3, 10)
    assert (queue.estimate_seconds_left(first), queue.estimate_seconds_left(second)) == pytest.approx((7, 27))
    offer(queue, *(Job("m", return_seven) for _ in range(3)))
    clock.now += 0.1
    with pytest.raises(QueueFull) as full:
        queue.check_admission()
    assert full.value.retry_after == 8, "the remaining time of the running job, rounded up"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_limit_is_the_number_of_jobs_in_addition_to_the_running_job(limit: int) -> None:
    queue = JobQueue(limit)
    queue.offer(Job("runs", return_seven))
    queue.take()
    offer(queue, *(Job("waits", return_seven) for _ in range(limit)))
    with pytest.raises(QueueFull):
        queue.offer(Job("too many", return_seven))
    with pytest.raises(QueueFull):
        queue.check_admission()
    # Jobs that an earlier process accepted are never rejected.
    queue.put(Job("earlier", return_seven))
    assert queue.waiting_count == limit + 1


def test_finished_and_cancelled_jobs_free_their_places() -> None:
    queue = JobQueue(1)
    running, waiting = Job("runs", return_seven), Job("waits", return_seven)
    offer(queue, running, waiting)
    queue.take().run()
    assert queue.running_jobs == ()
    queue.offer(Job("next", return_seven))
    waiting.cancel()
    assert queue.waiting_count == 1
    queue.offer(Job("last", return_seven))


def read_retry_after(queue: JobQueue) -> int | None:
    with pytest.raises(QueueFull) as full:
        queue.check_admission()
    return full.value.retry_after


def test_retry_after_is_the_median_of_recent_durations() -> None:
    queue, clock = JobQueue(0), Clock()
    # No duration is known at first, then the median of the previous jobs.
    for seconds, expected in ((0, 5), (1.2, 1), (1.3, 1), (0, 2)):

        def work(_job: Job[None], seconds: float = seconds) -> None:
            clock.now += seconds

        job = Job("timed", work, clock=clock)
        queue.offer(job)
        assert queue.take() is job
        assert read_retry_after(queue) == expected
        job.run()


def test_retry_after_is_the_remaining_time_of_the_running_job_up_to_an_hour() -> None:
    queue, clock = JobQueue(0), Clock()
    retry_seconds = []

    def work(job: Job[None]) -> None:
        for done in (1, 5, 9):
            clock.now += 1200
            job.advance(done, 10)
            retry_seconds.append(read_retry_after(queue))

    job = Job("long", work, clock=clock)
    queue.offer(job)
    assert queue.take() is job
    job.run()
    # After 1 of 10 windows, three hours are left.
    assert retry_seconds == [3600, 2400, 400]


def test_owners_take_turns_and_jobs_of_an_owner_are_ordered_by_deadline() -> None:
    queue = JobQueue(max_waiting=30)
    many = [make_owned_job("ada", windows) for windows in (3, 1, 2)]
    few = [make_owned_job("bob", 100), make_owned_job("cleo", 200)]
    offer(queue, *many, *few)
    assert [queue.take() for _ in range(2)] == [many[1], few[0]]
    # Ada and Bob have a running job, so the first jobs of Cleo and Dora precede further jobs of Ada.
    late = make_owned_job("dora", 1000)
    queue.put(late)
    expected = [few[1], late, many[2], many[0]]
    assert [queue.get_position(job) for job in expected] == [1, 2, 3, 4]
    many[1].run()
    assert queue.get_position(many[2]) == 1, "Ada has no running job anymore"


@given(st.lists(st.sampled_from("abcdef"), max_size=200), st.integers(0, 40))
def test_no_owner_uses_more_places_than_it_leaves_free(owners: list[str], limit: int) -> None:
    queue, accepted = JobQueue(limit, is_shared=True), Counter[str]()
    for owner in owners:
        left = limit + 1 - accepted.total()
        assert queue.is_full(owner) == (accepted[owner] >= left)
        try:
            queue.offer(make_owned_job(owner))
        except QueueFull:
            assert accepted[owner] > 0 or left == 0
        else:
            accepted[owner] += 1
    if accepted:
        assert accepted.most_common(1)[0][1] <= limit // 2 + 1


def test_last_running_slot_is_reserved_for_an_owner_without_running_job() -> None:
    queue = JobQueue(30, max_running=2, is_shared=True)
    first, second, other = (
        make_owned_job("ada", batch=9),
        make_owned_job("ada", batch=9),
        make_owned_job("bob", batch=9),
    )
    offer(queue, first, second)
    assert takes(queue, first)
    queue.offer(other)
    assert takes(queue, other)
    first.run()
    assert takes(queue, second)
    alone = JobQueue(30, max_running=1, is_shared=True)
    alone.offer(only := make_owned_job("ada"))
    assert takes(alone, only)


def test_cancel_all_cancels_waiting_and_running_jobs() -> None:
    queue = JobQueue(4)
    running, waiting = Job("runs", return_seven), Job("waits", return_seven)
    offer(queue, running, waiting)
    queue.take()
    assert (queue.running_jobs, queue.get_position(running), queue.get_position(waiting)) == ((running,), None, 1)
    assert running.future.set_running_or_notify_cancel()
    queue.cancel_all()
    assert running.cancelled()
    assert (waiting.state, queue.waiting_count) == ("cancelled", 0)
