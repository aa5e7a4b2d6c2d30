from __future__ import annotations

from fakes import until

from service.serving.devices.local.malloc_trim import MIN_CPU_SECONDS, MallocTrimmer


class Process:
    """The processor time of a process, and when memory was given back."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.worked = 5.0
        self.given_back: list[float] = []
        self.trimmer = MallocTrimmer(lambda: self.given_back.append(self.worked), lambda: self.worked, seconds)


def test_memory_is_given_back_after_work_and_not_again_before_there_was_more() -> None:
    """Starting is work."""
    process = Process()
    process.trimmer.check()
    process.trimmer.check()
    assert process.given_back == [5.0]
    process.worked += MIN_CPU_SECONDS / 2
    process.trimmer.check()
    assert process.given_back == [5.0]
    process.worked += MIN_CPU_SECONDS / 2
    process.trimmer.check()
    assert process.given_back == [5.0, 6.0]


def test_a_thread_looks_until_it_is_stopped() -> None:
    Process().trimmer.stop()
    process = Process(seconds=0.01)
    process.trimmer.start()
    until(lambda: process.given_back == [5.0])
    process.trimmer.stop()
    process.trimmer.stop()
    process.worked += MIN_CPU_SECONDS
    assert process.given_back == [5.0]
