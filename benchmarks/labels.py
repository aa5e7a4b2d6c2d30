"""Compare the labels of stacks under two configurations, such as two devices, two engines or two inferers.

python benchmarks/labels.py STACK... --one device.name=cpu --other device.name=cuda [--model nuclei] [--channel 0]
    [--tolerance 0.001]

Both configurations use eager FP32 unless a key overrides it. A row is printed for each stack as soon as it is measured:
the number of objects, whether all labels are identical, and the fraction of voxels that differ after matching objects
have been given the same label. The exit status is 1 if this fraction exceeds the tolerance, or if a stack fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from service.cli.models import choose_model
from service.core.config import Settings, override_settings, read_settings
from service.core.errors import StackSegError
from service.core.types import Options, Segmentation, Selection, Volume
from service.engine import backends
from service.formats import stack_reader
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.label_agreement import compute_label_difference
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.windows.batching.batcher import open_batcher

SegmentFunction = Callable[[Volume], Segmentation]

SEGMENT_ERRORS = (StackSegError, *backends.ENGINE_ERRORS)

EAGER_ENGINE = {"kind": "eager", "precision": "fp32"}
COLUMNS = (
    "stack",
    "shape",
    "objects",
    "identical",
    "fraction of voxels that differ",
    "within tolerance",
    "seconds",
)


@dataclass(frozen=True)
class Row:
    """Comparison of the labels of one stack.

    difference  fraction of voxels that differ after matching objects; NaN if the stack failed
    same        whether all labels are identical
    problem     error message if the stack failed
    """

    stack: str
    shape: str = ""
    objects: str = ""
    same: bool = False
    difference: float = math.nan
    seconds: str = ""
    problem: str | None = None

    def is_within(self, tolerance: float) -> bool:
        """Return whether at most this fraction of voxels differs; False if the stack failed."""
        return self.difference <= tolerance

    def format(self, tolerance: float) -> str:
        """Format the row for a Markdown table."""
        within = "yes" if self.is_within(tolerance) else "no"
        if self.problem is not None:
            cells: Sequence[str] = (self.stack, self.problem, "", "", "", within, "")
        else:
            same = "yes" if self.same else "no"
            cells = (self.stack, self.shape, self.objects, same, f"{self.difference:.2e}", within, self.seconds)
        return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path, nargs="+", metavar="STACK")
    parser.add_argument(
        "--one", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the first configuration"
    )
    parser.add_argument(
        "--other", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the second configuration"
    )
    parser.add_argument("--model", help="name of the model; default: the default model")
    parser.add_argument("--diameter", help="as in requests; none skips the estimate")
    parser.add_argument("--channel", help="channel of stacks with several channels", default=None)
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="fraction of voxels that may differ (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    channel = int(options.channel) if options.channel and options.channel.isdecimal() else options.channel
    print(f"| {' | '.join(COLUMNS)} |", flush=True)
    print("|---" * len(COLUMNS) + "|", flush=True)
    passed = True
    with ExitStack() as stack:
        segmenters = [
            stack.enter_context(open_segmenter(options.model, make_settings(keys), Options(diameter=options.diameter)))
            for keys in (options.one, options.other)
        ]
        for path in options.stacks:
            row = compare(path, Selection(channel), segmenters)
            passed = passed and row.is_within(options.tolerance)
            print(row.format(options.tolerance), flush=True)
    return 0 if passed else 1


def make_settings(keys: list[str]) -> Settings:
    """Return the settings from the environment, in eager FP32, overridden by keys like `device.name=cpu`."""
    settings = override_settings(read_settings(), "engine", EAGER_ENGINE)
    for key in keys:
        name, _, text = key.partition("=")
        section, _, field = name.partition(".")
        settings = override_settings(settings, section, {field: yaml.safe_load(text)})
    return settings


@contextmanager
def open_segmenter(model: str | None, settings: Settings, options: Options) -> Iterator[SegmentFunction]:
    """Load a model, and start the threads of its device; yield a function that segments a volume."""
    with open_batcher(settings) as batcher:
        runner = ModelRunner(choose_model(model, settings), settings)
        batcher.call(runner.warm_up)
        yield lambda volume: segment(runner, volume, options, callbacks=Callbacks(batcher.run)).segmentation


def compare(path: Path, selection: Selection, segmenters: Sequence[SegmentFunction]) -> Row:
    """Segment a stack with both configurations, and compare the labels; return a row, also if the stack fails."""
    name = f"{path.parent.name}/{path.name}"
    try:
        volume = stack_reader.read(path, selection, 2**40)
        segmentations, seconds = [], []
        for segment in segmenters:
            began = time.perf_counter()
            segmentations.append(segment(volume))
            seconds.append(f"{time.perf_counter() - began:.1f}")
    except SEGMENT_ERRORS as error:
        return Row(name, problem=backends.get_first_line(error))
    one, other = segmentations
    return Row(
        name,
        "x".join(map(str, volume.shape[1:])),
        ", ".join(map(str, dict.fromkeys([one.count, other.count]))),
        bool((one.pixels == other.pixels).all()),
        compute_label_difference(one, other),
        ", ".join(seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
