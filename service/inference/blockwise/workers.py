"""Workers of a block-wise run: the function that processes one block, and local processes that call this function."""

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
from service.inference.blockwise import counting, output, survey, tiles, window_scores
from service.inference.blockwise.objects import join, labels
from service.inference.blockwise.run_folder import BlockTask, OpenRun, Step, open_run
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.blending import Blending

# Number of workers that may die while processing one block before the run fails. The block itself may be the cause.
MAX_WORKER_DEATHS = 3
# Interval at which a worker checks whether its parent is alive.
PARENT_CHECK_SECONDS = 1.0

BlockFunction = Callable[[BlockTask], dict[str, Any]]


def run_block(task: BlockTask) -> dict[str, Any]:
    """Run one block, write its record once all its output is on disk, and return the record.

    Any process with access to the folder of the run can call this function, but only from a single thread. The model is
    loaded for the first block that needs it, and stays loaded. A block may be repeated at any time. Raises the same
    exceptions as `ModelRunner` and `segment`.
    """
    run = open_run(task.folder, has_survey=task.step not in {"count", "survey"})
    stages, start_time, start_cpu_time = Stages(), time.time(), time.process_time()
    results = _run_step(run, task, stages)
    timing = {
        "seconds": stages.seconds,
        "began": start_time,
        "ended": time.time(),
        "cpu": time.process_time() - start_cpu_time,
    }
    record = results | timing
    run.folder.write_record(task, record)
    return record


@lru_cache(maxsize=1)
def load_runner(folder: str) -> ModelRunner:
    """Load and warm up the model of a run."""
    run = open_run(folder)
    runner = ModelRunner(run.spec, run.folder.settings)
    runner.warm_up()
    return runner


def _run_step(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    """Run a block, measure its time in `stages`, and return the fields of its record."""
    if task.step == "scores":
        return window_scores.score_group(run, task, load_runner(task.folder), stages)
    if task.step == "tile":
        windows, device = run.folder.settings.windows, load_runner(task.folder).device
        blending = Blending(windows.blending, windows.sigma, run.spec.tiling)
        return tiles.decode_tile(run, task, blending, device, stages)
    if task.step == "survey":
        # Load the model first, so that the measured time does not include loading.
        load_runner(task.folder)
    with stages.measure("write" if task.step == "labels" else task.step):
        return _STEP_FUNCTIONS[task.step](run, task.number)


_STEP_FUNCTIONS: dict[Step, Callable[[OpenRun, int], dict[str, Any]]] = {
    "count": counting.count_part,
    "survey": lambda run, round_number: survey.merge_counts(run, load_runner(str(run.folder.path)), round_number),
    "region": join.join_region,
    "join": lambda run, _number: join.join_regions(run),
    "holes": labels.find_holes,
    "objects": lambda run, _number: labels.choose_objects(run),
    "labels": output.write_block,
}


class Workers(Protocol):
    """Processes that each run one block at a time with `run_block`. They need access to the folder of the run."""

    @property
    def count(self) -> int:
        """Number of blocks that run concurrently."""

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        """Run a block. The future returns its record, or raises the exception of `run_block`.

        A worker that dies is replaced.
        """

    def close(self) -> None:
        """Stop the workers, and discard their unfinished blocks."""


class LocalWorkers:
    """Processes on this host, each with its own model."""

    def __init__(self, count: int, block_function: BlockFunction = run_block) -> None:
        self.count = count
        self._block_function = block_function
        # Each thread owns one process, so a process that dies affects no other block.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="block-worker")
        self._thread_local = threading.local()
        self._processes = set[ProcessPoolExecutor]()
        self._lock, self._is_closed = threading.Lock(), False

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        return self._threads.submit(self._run, task)

    def _run(self, task: BlockTask) -> dict[str, Any]:
        for _ in range(MAX_WORKER_DEATHS):
            try:
                return self._get_process().submit(self._block_function, task).result()
            except BrokenProcessPool:
                with self._lock:
                    self._processes.discard(self._thread_local.process)
                self._thread_local.process = None
        raise InternalError(
            f"{MAX_WORKER_DEATHS} workers died in succession on block {task.number} of step {task.step}. Resume the run"
            " with fewer workers or smaller windows, which need less memory."
        )

    def _get_process(self) -> ProcessPoolExecutor:
        process: ProcessPoolExecutor | None = getattr(self._thread_local, "process", None)
        if process is None:
            with self._lock:
                if self._is_closed:
                    raise Cancelled("The workers have stopped.")
                process = self._thread_local.process = ProcessPoolExecutor(
                    1, get_context("spawn"), initializer=exit_with_parent, initargs=(os.getpid(),)
                )
                self._processes.add(process)
        return process

    def close(self) -> None:
        with self._lock:
            self._is_closed, processes = True, list(self._processes)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            for child in list((process._processes or {}).values()):
                child.terminate()
            process.shutdown(wait=False, cancel_futures=True)


def exit_with_parent(parent_pid: int) -> None:
    """End this process soon after its parent process ends, even if the parent is killed."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
