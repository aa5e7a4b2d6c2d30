"""The child processes that read files, and the threads that wait for them."""

from __future__ import annotations

from service.core.config import Settings
from service.core.hardware import host
from service.formats.sandbox.reader import Reader
from service.serving.storage.threads import FairThreadPool

# Beyond its share of the decoded volume, a child that reads a file may need codec tables and one decoded page.
READER_BYTES = 2 * 2**30
# Files read at the same time: those that take long to decode, each in threads of its own for a part of the time, and
# small ones, one more than a client can occupy.
LARGE_READERS = min(max(host.usable_cores() // 4, 1), 4)
SMALL_READERS = LARGE_READERS + 2


class FileReaders:
    """The processes and threads that read files. There are as many threads as processes: no thread waits for one.

    reader          from `start` on
    read_threads    for small files
    decode_threads  for files that take long to decode
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.reader: Reader
        self.read_threads = FairThreadPool(SMALL_READERS, "read")
        self.decode_threads = FairThreadPool(LARGE_READERS, "decode")

    def start(self) -> None:
        """Start the processes."""
        limits = self._settings.limits
        self.reader = Reader(
            memory_bytes=READER_BYTES,
            seconds=limits.read_seconds,
            decoded_bytes=limits.decoded_bytes,
            shared_bytes=self._settings.references.decoded_bytes,
            processes=SMALL_READERS + LARGE_READERS,
        )
        # `reader.missing` is known then.
        self.read_threads.submit("", self.reader.await_start)

    def stop(self) -> None:
        """End the processes and threads."""
        self.reader.close()
        self.read_threads.shutdown()
        self.decode_threads.shutdown()
