from __future__ import annotations

from fakes import wait_until

from service.serving.devices.local.malloc_trim import MIN_CPU_SECONDS, MallocTrimmer


class Process:
    """A fake process with its CPU time, and the CPU times at which memory was trimmed."""

    def __init__(self, interval_seconds: float = 30.0) -> None:
        self.cpu_seconds = 5.0
        self.trims: list[float] = []
        self.trimmer = MallocTrimmer(
            lambda: self.trims.append(self.cpu_seconds), lambda: self.cpu_seconds, interval_seconds
        )


def test_memory_is_trimmed_after_enough_cpu_time() -> None:
    """The first check trims, because starting the process takes CPU time."""
    process = Process()
    process.trimmer.trim_if_needed()
    process.trimmer.trim_if_needed()
    assert process.trims == [5.0]
    process.cpu_seconds += MIN_CPU_SECONDS / 2
    process.trimmer.trim_if_needed()
    assert process.trims == [5.0]
    process.cpu_seconds += MIN_CPU_SECONDS / 2
    process.trimmer.trim_if_needed()
    assert process.trims == [5.0, 6.0]


def test_trimmer_checks_until_it_is_stopped() -> None:
    Process().trimmer.stop()
    process = Process(interval_seconds=0.01)
    process.trimmer.start()
    wait_until(lambda: process.trims == [5.0])
    process.trimmer.stop()
    process.trimmer.stop()
    process.cpu_seconds += MIN_CPU_SECONDS
    assert process.trims == [5.0]
