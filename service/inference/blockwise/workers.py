"""Work on the blocks of a run, in any process that has its folder; and the workers that do it on this machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, Protocol

from service.core.errors import Cancelled, InternalError
from service.core.telemetry import Stages
from service.inference.blockwise import counting, join, output, survey, tiles, window_scores
from service.inference.blockwise.run_folder import BlockTask, OpenRun, Step, open_run
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.blending import Blending

# Workers that may die over one block before the run gives up: it may be the block that kills them.
MOST_DEATHS = 3
PARENT_SECONDS = 1.0

Work = Callable[[BlockTask], dict[str, Any]]


def run_block(task: BlockTask) -> dict[str, Any]:
    """Do one block of a run, and write its record once all that it makes is safe on disk; return the record.

    The model is loaded with the first block that needs it, and stays. A process calls this from one thread alone.
    Raises what `ModelRunner` and `segment` raise; a block may be done again at any time.
    """
    run = open_run(task.folder, surveyed=task.step not in {"count", "survey"})
    stages, began, cpu = Stages(), time.time(), time.process_time()
    facts = _do(run, task, stages)
    spent = {"seconds": stages.seconds, "began": began, "ended": time.time(), "cpu": time.process_time() - cpu}
    record = facts | spent
    run.folder.write_record(task, record)
    return record


@lru_cache(maxsize=1)
def load_runner(folder: str) -> ModelRunner:
    """Return the model of a run, loaded and warm."""
    run = open_run(folder)
    runner = ModelRunner(run.spec, run.folder.settings)
    runner.warm_up()
    return runner


def _do(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    """Do a block; return facts for its record, with the time that it takes in `stages`."""
    if task.step == "scores":
        return window_scores.score_group(run, task, load_runner(task.folder), stages)
    if task.step == "tile":
        windows, device = run.folder.settings.windows, load_runner(task.folder).device
        return tiles.decode_tile(run, task, Blending(windows.blending, windows.sigma), device, stages)
    if task.step == "survey":
        # Loading the model does not count.
        load_runner(task.folder)
    with stages.measure("write" if task.step == "labels" else task.step):
        return _STEPS[task.step](run, task.number)


_STEPS: dict[Step, Callable[[OpenRun, int], dict[str, Any]]] = {
    "count": counting.count_part,
    "survey": lambda run, turn: survey.merge_counts(run, load_runner(str(run.folder.path)), turn),
    "link": join.link_tile,
    "join": lambda run, _number: join.join_tiles(run),
    "labels": output.write_block,
}


class Workers(Protocol):
    """Processes that do blocks: `run_block`, each in one process at a time, where the folder of the run is mounted."""

    @property
    def count(self) -> int:
        """How many blocks are done at a time; more of them wait."""

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        """Have a block done; return its record, or what `run_block` raises. A worker that dies is replaced."""

    def close(self) -> None:
        """End the workers; what they were doing is given up."""


class LocalWorkers:
    """Processes on this machine, each with a model of its own."""

    def __init__(self, count: int, work: Work = run_block) -> None:
        self.count = count
        self._work = work
        # Each thread owns one process, so that a process that dies takes no other block with it.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="block-worker")
        self._own = threading.local()
        self._processes = set[ProcessPoolExecutor]()
        self._lock, self._closed = threading.Lock(), False

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        return self._threads.submit(self._run, task)

    def _run(self, task: BlockTask) -> dict[str, Any]:
        for _ in range(MOST_DEATHS):
            try:
                return self._process().submit(self._work, task).result()
            except BrokenProcessPool:
                with self._lock:
                    self._processes.discard(self._own.process)
                self._own.process = None
        raise InternalError(
            f"{MOST_DEATHS} workers died one after the other over {task.step} {task.number}; with less memory taken, by"
            " fewer workers or smaller windows, the run can be resumed."
        )

    def _process(self) -> ProcessPoolExecutor:
        process: ProcessPoolExecutor | None = getattr(self._own, "process", None)
        if process is None:
            with self._lock:
                if self._closed:
                    raise Cancelled("the workers have ended")
                process = self._own.process = ProcessPoolExecutor(
                    1, get_context("spawn"), initializer=end_with, initargs=(os.getpid(),)
                )
                self._processes.add(process)
        return process

    def close(self) -> None:
        with self._lock:
            self._closed, processes = True, list(self._processes)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            for each in list((process._processes or {}).values()):
                each.terminate()
            process.shutdown(wait=False, cancel_futures=True)


def end_with(parent: int) -> None:
    """End this process soon after its parent, however that ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
