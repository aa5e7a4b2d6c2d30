"""Child processes that read files, and the threads that wait for them."""

from __future__ import annotations

from service.core.config import Settings
from service.core.hardware import host
from service.formats.sandbox.reader import Reader
from service.serving.storage.threads import FairThreadPool

# Memory of a reader process in addition to its share of the decoded volume: codec tables and one decoded page.
READER_MEMORY_BYTES = 2 * 2**30
# Maximum numbers of large files and of small files that are read concurrently. A large file is decoded with several
# threads for part of the time. A single client cannot occupy all readers for small files.
LARGE_FILE_READER_COUNT = min(max(host.count_usable_cores() // 4, 1), 4)
SMALL_FILE_READER_COUNT = LARGE_FILE_READER_COUNT + 2
# Number of threads that read planes of decoded files for viewers.
PLANE_THREAD_COUNT = 4
# Number of threads that open and search files on the host.
HOST_FILE_THREAD_COUNT = 4


class FileReaders:
    """The processes and threads that read files. There is one thread per process, so no thread waits for a process.

    reader          reads files in child processes; available after `start`
    read_threads    threads for small files
    decode_threads  threads for large files, which take a long time to decode
    plane_threads   threads that read planes of decoded files
    host_threads    threads for files on the host. A file server that does not respond can block these threads, but no
                    other threads
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.reader: Reader
        self.read_threads = FairThreadPool(SMALL_FILE_READER_COUNT, "read")
        self.decode_threads = FairThreadPool(LARGE_FILE_READER_COUNT, "decode")
        self.plane_threads = FairThreadPool(PLANE_THREAD_COUNT, "planes")
        self.host_threads = FairThreadPool(HOST_FILE_THREAD_COUNT, "host-files")

    def start(self) -> None:
        """Start the processes."""
        limits = self._settings.limits
        self.reader = Reader(
            memory_bytes=READER_MEMORY_BYTES,
            time_limit_seconds=limits.read_seconds,
            max_decoded_bytes=limits.decoded_bytes,
            max_shared_bytes=self._settings.references.decoded_bytes,
            process_count=SMALL_FILE_READER_COUNT + LARGE_FILE_READER_COUNT,
        )
        # Wait in the background until the processes are ready, so that `reader.missing_layers` is set soon.
        self.read_threads.submit("", self.reader.wait_until_ready)

    def stop(self) -> None:
        """Stop the processes and threads."""
        self.reader.close()
        self.read_threads.shutdown()
        self.decode_threads.shutdown()
        self.plane_threads.shutdown()
        self.host_threads.shutdown()
