"""One warm segmenter in this process, and the CPU seconds of what it segments: for benchmarks that need no server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from service.core.config import overruled, read_settings
from service.core.volume import Options, Volume
from service.models.repository import read_spec
from service.segmenter import Result, Segmenter

ROOT = Path(__file__).resolve().parent.parent


def parser(description: str | None, *, stacks: str, repeats: int) -> argparse.ArgumentParser:
    """What such a benchmark is told; `stacks` is how many argparse wants of them."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("stacks", type=Path, nargs=stacks, metavar="STACK", help="TIFF of one channel, ZYX")
    made.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument("--threads", type=int, default=1)
    return made


def warm_segmenter(options: argparse.Namespace) -> Segmenter:
    """The model on so many threads of the CPU, as the environment says otherwise."""
    settings = overruled(read_settings(None), "device", {"name": "cpu", "threads": options.threads})
    segmenter = Segmenter(read_spec(options.model), settings)
    segmenter.warm_up()
    return segmenter


def timed(segmenter: Segmenter, volume: Volume, options: Options) -> tuple[Result, float]:
    began = time.process_time()
    result = segmenter.segment(volume, options)
    return result, time.process_time() - began
