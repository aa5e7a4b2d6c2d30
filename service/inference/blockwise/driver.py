"""Driver of a block-wise run: which block is next, and which of what was handed on nobody needs any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from service.formats import zarr_writer
from service.inference.blockwise import output
from service.inference.blockwise.run_folder import BlockTask, RunFolder, Step, open_run
from service.inference.blockwise.workers import Workers

Progress = Callable[[str, int, int], None]
"""Called with a step, and how many of how many blocks of it are done."""


class Driver:
    """Has all blocks of a run done that are not done yet, in an order that keeps little on disk."""

    def __init__(
        self, folder: RunFolder, workers: Workers, progress: Progress = lambda _step, _done, _total: None
    ) -> None:
        self._folder, self._workers, self._progress = folder, workers, progress
        self._run = open_run(str(folder.path))
        self._layout = self._run.plan.layout

    def run(self, out: Path, describe: Callable[[], Mapping[str, str]]) -> None:
        """Do everything, and write the result to `out`, which appears once it is complete.

        `describe` returns facts about the result for the store, once all but that is there. Raises what `run_block`
        raises.
        """
        self._do("survey", [0])
        self._score_and_decode()
        if self._run.plan.output == "labels":
            self._do("join", [0])
        if not self._folder.done("labels") or not zarr_writer.partial_path(out).exists():
            self._folder.forget("labels")
            output.create_store(self._run, out, describe())
        for numbers in output.blocks_of_levels(self._run):
            self._do("labels", numbers)
        zarr_writer.finish(out)

    def _do(self, step: Step, numbers: Iterable[int]) -> None:
        wanted = list(numbers)
        left = [number for number in wanted if number not in self._folder.done(step)]
        done = len(wanted) - len(left)
        self._progress(step, done, len(wanted))
        for future in self._as_done({(step, number): None for number in left}):
            future.result()
            done += 1
            self._progress(step, done, len(wanted))

    def _as_done(self, tasks: Mapping[tuple[Step, int], None]) -> Iterable[Future[dict[str, Any]]]:
        running = {self._submit(step, number) for step, number in tasks}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from ended

    def _submit(self, step: Step, number: int) -> Future[dict[str, Any]]:
        return self._workers.submit(BlockTask(str(self._folder.path), step, number))

    def _score_and_decode(self) -> None:
        """Score groups of windows in order, decode each tile once what it needs is there, and then drop scores."""
        total = self._layout.count
        decoded = self._folder.done("tile")
        needs = {tile: set(self._layout.needs(tile)) for tile in range(total) if tile not in decoded}
        readers = Counter(group for groups in needs.values() for group in groups)
        scored = {group for group in self._folder.done("scores") if self._has_scores(group)}
        to_score = [group for group in range(total) if readers[group] and group not in scored]
        waiting = dict(needs)
        running: dict[Future[dict[str, Any]], tuple[Step, int]] = {}
        done = len(decoded)
        self._progress("tile", done, total)
        while waiting or running:
            # No more than are done soon: a tile that becomes ready comes before further groups.
            while len(running) < 2 * self._workers.count:
                ready = next((tile for tile, groups in waiting.items() if groups <= scored), None)
                if ready is not None:
                    del waiting[ready]
                    running[self._submit("tile", ready)] = ("tile", ready)
                elif to_score:
                    group = to_score.pop(0)
                    running[self._submit("scores", group)] = ("scores", group)
                else:
                    break
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                step, number = running.pop(future)
                future.result()
                if step == "scores":
                    scored.add(number)
                    continue
                done += 1
                self._progress("tile", done, total)
                for group in needs[number]:
                    readers[group] -= 1
                    if not readers[group]:
                        (self._folder.path / f"scores/{group}.raw").unlink(missing_ok=True)

    def _has_scores(self, group: int) -> bool:
        """Return whether the scores of a group that is done were not dropped yet."""
        is_there = (self._folder.path / f"scores/{group}.raw").exists()
        return is_there or not self._folder.read_record("scores", group)["windows"]
