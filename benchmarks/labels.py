"""Labels of stacks made in two ways, side by side: two devices, two engines, or MONAI's sliding windows and ours.

python benchmarks/labels.py STACK... --one device.name=cpu --other device.name=cuda [--model nuclei] [--channel 0]
    [--tolerance 0.001]

The first way is in eager FP32 unless a key says otherwise. The row of each stack is printed as soon as it is measured:
the number of objects, whether every voxel has the same number, and the share of voxels that differ after matching
objects get the same number. The exit status is 1 if that share exceeds the tolerance, or if a stack fails.
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
from service.inference.runner.label_agreement import fraction_differing
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.windows.batching.batcher import open_batcher

Segment = Callable[[Volume], Segmentation]

FAILURES = (StackSegError, *backends.ENGINE_ERRORS)

EAGER = {"kind": "eager", "precision": "fp32"}
COLUMNS = (
    "stack",
    "shape",
    "objects",
    "numbers are the same",
    "share of voxels that differ",
    "within tolerance",
    "seconds",
)


@dataclass(frozen=True)
class Row:
    """Comparison of the labels of one stack.

    difference  share of voxels that differ; NaN if the stack failed
    same        whether every voxel has the same number
    problem     why there are no labels to compare
    """

    stack: str
    shape: str = ""
    objects: str = ""
    same: bool = False
    difference: float = math.nan
    seconds: str = ""
    problem: str | None = None

    def is_within(self, tolerance: float) -> bool:
        """Return whether the labels differ in at most this share of voxels; a NaN is never within it."""
        return self.difference <= tolerance

    def format(self, tolerance: float) -> str:
        """Return the row of the Markdown table."""
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
    parser.add_argument("--one", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the first way")
    parser.add_argument(
        "--other", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the second way"
    )
    parser.add_argument("--model", help="the default model if not given")
    parser.add_argument("--diameter", help="as in requests; none leaves out estimates, which may round differently")
    parser.add_argument("--channel", help="of stacks with several", default=None)
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="share of voxels that may differ (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    channel = int(options.channel) if options.channel and options.channel.isdecimal() else options.channel
    print(f"| {' | '.join(COLUMNS)} |", flush=True)
    print("|---" * len(COLUMNS) + "|", flush=True)
    passed = True
    with ExitStack() as stack:
        ways = [
            stack.enter_context(open_way(options.model, settings_of(keys), Options(diameter=options.diameter)))
            for keys in (options.one, options.other)
        ]
        for path in options.stacks:
            row = compare(path, Selection(channel), ways)
            passed = passed and row.is_within(options.tolerance)
            print(row.format(options.tolerance), flush=True)
    return 0 if passed else 1


def settings_of(keys: list[str]) -> Settings:
    """Return the settings that the environment gives, with these keys in place of its own."""
    settings = override_settings(read_settings(), "engine", EAGER)
    for key in keys:
        name, _, text = key.partition("=")
        section, _, field = name.partition(".")
        settings = override_settings(settings, section, {field: yaml.safe_load(text)})
    return settings


@contextmanager
def open_way(model: str | None, settings: Settings, options: Options) -> Iterator[Segment]:
    """Load a model; yield a function that segments volumes in the threads of the device."""
    with open_batcher(settings) as batcher:
        runner = ModelRunner(choose_model(model, settings), settings)
        batcher.call(runner.warm_up)
        yield lambda volume: segment(runner, volume, options, callbacks=Callbacks(batcher.run)).segmentation


def compare(path: Path, selection: Selection, ways: Sequence[Segment]) -> Row:
    """Segment a stack in both ways, and compare the labels. A stack that fails has a row with the reason."""
    name = f"{path.parent.name}/{path.name}"
    try:
        volume = stack_reader.read(path, selection, 2**40)
        found, seconds = [], []
        for segment in ways:
            began = time.perf_counter()
            found.append(segment(volume))
            seconds.append(f"{time.perf_counter() - began:.1f}")
    except FAILURES as error:
        return Row(name, problem=backends.get_first_line(error))
    one, other = found
    return Row(
        name,
        "x".join(map(str, volume.shape[1:])),
        ", ".join(map(str, dict.fromkeys([one.count, other.count]))),
        bool((one.pixels == other.pixels).all()),
        fraction_differing(one, other),
        ", ".join(seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
