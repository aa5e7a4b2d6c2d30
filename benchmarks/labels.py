"""Labels of stacks made in two ways, side by side: two devices, two engines, or MONAI's sliding windows and ours.

python benchmarks/labels.py STACK... --one device.name=cpu --other device.name=cuda [--model nuclei] [--channel 0]

The first way is in eager FP32 unless a key says otherwise. Each stack is a row as soon as it is done: how many objects,
whether every voxel has the same number, and the share of voxels that differ once objects share theirs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from service.cli.models import choose_model
from service.core.config import Settings, override_settings, read_settings
from service.core.volume import Options, Segmentation, Selection, Volume
from service.formats import stack_reader
from service.inference.batcher import open_batcher
from service.inference.label_agreement import share_differing
from service.inference.segmenter import Segmenter

Segment = Callable[[Volume], Segmentation]

EAGER = {"kind": "eager", "precision": "fp32"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path, nargs="+", metavar="STACK")
    parser.add_argument("--one", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the first way")
    parser.add_argument(
        "--other", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the second way"
    )
    parser.add_argument("--model", help="the default model if not given")
    parser.add_argument("--channel", help="of stacks with several", default=None)
    options = parser.parse_args()
    channel = int(options.channel) if options.channel and options.channel.isdecimal() else options.channel
    print("| stack | shape | objects | numbers are the same | share of voxels that differ | seconds |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    alike = True
    with ExitStack() as stack:
        ways = [
            stack.enter_context(open_way(options.model, settings_of(keys))) for keys in (options.one, options.other)
        ]
        for path in options.stacks:
            difference, row = compare(path, Selection(channel), ways)
            alike = alike and difference == 0
            print(row, flush=True)
    return 0 if alike else 1


def settings_of(keys: list[str]) -> Settings:
    """Return the settings that the environment gives, with these keys in place of its own."""
    settings = override_settings(read_settings(), "engine", EAGER)
    for key in keys:
        name, _, text = key.partition("=")
        section, _, field = name.partition(".")
        settings = override_settings(settings, section, {field: yaml.safe_load(text)})
    return settings


@contextmanager
def open_way(model: str | None, settings: Settings) -> Iterator[Segment]:
    """Load a model; yield a function that segments volumes in the threads of the device."""
    with open_batcher(settings) as batcher:
        segmenter = Segmenter(choose_model(model, settings), settings)
        batcher.call(segmenter.warm_up)
        yield lambda volume: segmenter.segment(volume, Options(), run=batcher.run).segmentation


def compare(path: Path, selection: Selection, ways: Sequence[Segment]) -> tuple[float, str]:
    """Segment a stack in both ways; return the share of voxels that differ, and the row that says more."""
    volume = stack_reader.read(path, selection, 2**40)
    found, seconds = [], []
    for segment in ways:
        began = time.perf_counter()
        found.append(segment(volume))
        seconds.append(f"{time.perf_counter() - began:.1f}")
    one, other = found
    difference = share_differing(one, other)
    same = "yes" if (one.pixels == other.pixels).all() else "no"
    counts = ", ".join(map(str, dict.fromkeys([one.count, other.count])))
    shape = "x".join(map(str, volume.shape[1:]))
    cells = (f"{path.parent.name}/{path.name}", shape, counts, same, f"{difference:.2e}", ", ".join(seconds))
    return difference, f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
