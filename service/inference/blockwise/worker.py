"""Work on one block of a run after the other, in any process of any host that has the folder of the run."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from service.core.timing import Stages
from service.inference.blockwise import join, links, output, survey, tiles, window_scores
from service.inference.blockwise.run_folder import BlockTask, OpenRun, open_run
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.blending import Blending


def run_block(task: BlockTask) -> dict[str, Any]:
    """Do one block of a run, and write its record once all that it makes is safe on disk; return the record.

    The model is loaded with the first block that needs it, and stays. A process calls this from one thread alone.
    Raises what `ModelRunner` and `segment` raise; a block may be done again at any time.
    """
    run = open_run(task.folder, surveyed=task.step not in {"count", "survey"})
    stages, began, cpu = Stages(), time.time(), time.process_time()
    facts = _STEPS[task.step](run, task, stages)
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


def _count(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    with stages.measure("count"):
        survey.count_part(run, task.number)
    return {}


def _survey(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    runner = load_runner(task.folder)
    with stages.measure("survey"):
        return survey.merge_counts(run, runner, task.number)


def _score(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    return window_scores.score_group(run, task, load_runner(task.folder), stages)


def _decode(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    windows = run.folder.settings.windows
    blending = Blending(windows.blending, windows.sigma)
    return tiles.decode_tile(run, task, blending, load_runner(task.folder).device, stages)


def _link(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    with stages.measure("link"):
        return links.link_tile(run, task.number)


def _join(run: OpenRun, _task: BlockTask, stages: Stages) -> dict[str, Any]:
    with stages.measure("join"):
        return join.join_tiles(run)


def _write(run: OpenRun, task: BlockTask, stages: Stages) -> dict[str, Any]:
    with stages.measure("write"):
        return output.write_block(run, task.number)


_STEPS = {
    "count": _count,
    "survey": _survey,
    "scores": _score,
    "tile": _decode,
    "link": _link,
    "join": _join,
    "labels": _write,
}
