"""Train a bundled model: `python -m service.training.train --kind nuclei --out FOLDER --minutes 30`.

Writes `weights.safetensors` into the folder every minute, so that the training may be stopped at any time.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from monai.losses.dice import DiceLoss
from numpy.random import Generator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from service.core.errors import BadParameter
from service.core.volume import Selection
from service.formats import tiff_reader
from service.models.architectures import ShuffleUNet
from service.training.class_targets import CLASSES, class_loss, class_targets
from service.training.examples import (
    Pair,
    Percentiles,
    Pool,
    Recorded,
    Source,
    Targets,
    batch,
    mixed,
    stated,
    synthetic,
)
from service.training.instance_targets import instance_targets
from service.training.recipes.synthetic_nuclei import synthesise
from service.training.recipes.synthetic_tissue import synthesise_tissue

log = logging.getLogger("stackseg.train")

LIMIT_BYTES = 4 * 2**30
# Of all crops of a batch together: one without objects has no overlap of its own.
DICE = DiceLoss(sigmoid=True, batch=True, smooth_nr=1.0, smooth_dr=1.0)


Loss = Callable[[Tensor, Tensor], Tensor]
"""Scores [B, K, z, y, x] and targets [B, T, z, y, x] -> scalar."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn.

    minutes         wall-clock budget; the learning rate rises for its first twentieth, then falls along a cosine
    learning_rate   at its highest
    batch_size      crops per step, cubes of `edge` voxels
    averaging       decay per step of the moving average of the weights, which is what is kept
    steps_per_volume   steps after which another volume replaces one of the pool
    statistics      batches over which the statistics of batch normalisation are measured at the end; 0: those that
                    training begins with are kept, and the weights learn to live with them
    """

    minutes: float = 30.0
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    batch_size: int = 4
    edge: int = 48
    averaging: float = 0.998
    steps_per_volume: int = 2
    statistics: int = 80

    def rate(self, progress: float) -> float:
        """Learning rate at `progress` (0 to 1) through the budget."""
        rise = 0.05
        if progress < rise:
            return self.learning_rate * (0.1 + 0.9 * progress / rise)
        return self.learning_rate * max(0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise))), 1e-3)


class Batches(Protocol):
    """How many crops of which size make a batch, and how many batches the statistics of batch normalisation."""

    @property
    def batch_size(self) -> int: ...
    @property
    def edge(self) -> int: ...
    @property
    def statistics(self) -> int: ...


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Scores [B, 2, z, y, x] against targets [B, 2, z, y, x] (foreground 0 or 1, distance 0 to 1) -> scalar.

    Cross entropy and Dice for the foreground; absolute error for the distance, which keeps the valleys between
    touching objects sharper than the squared error does, and counts outside the objects a fifth.
    """
    foreground, distance = targets[:, 0], targets[:, 1]
    dice: Tensor = DICE(scores[:, :1], targets[:, :1])
    entropy = functional.binary_cross_entropy_with_logits(scores[:, 0], foreground)
    error = (torch.sigmoid(scores[:, 1]) - distance).abs()
    inside = (error * foreground).sum() / (foreground.sum() + 1)
    outside = (error * (1 - foreground)).sum() / ((1 - foreground).sum() + 1)
    return entropy + 0.5 * dice + 2 * inside + 0.4 * outside


class Kind(NamedTuple):
    """What a bundled model finds: synthetic stacks of it, `input.diameter` and the widths of its model file, its task.

    The task is how many scores a voxel gets, and what they are to become of the labels.
    """

    synthetic: Source
    diameter: float
    widths: tuple[int, ...]
    steps_per_volume: int
    outputs: int = 2
    targets: Targets = instance_targets
    loss: Loss = loss


KINDS = {
    "nuclei": Kind(synthetic(synthesise), 20.0, (32, 48, 96, 96), 2),
    "membranes": Kind(synthetic(synthesise_tissue), 32.0, (16, 32, 64, 64), 4),
    "tissue": Kind(
        synthetic(synthesise_tissue), 32.0, (16, 32, 64, 64), 4, len(CLASSES), targets=class_targets, loss=class_loss
    ),
}


def train(  # noqa: PLR0913, PLR0917
    network: nn.Module, pool: Pool, schedule: Schedule, seed: int, folder: Path, loss: Loss = loss
) -> nn.Module:
    """Train until the budget is spent; returns the averaged network in evaluation mode, saved in `folder`."""
    rng = np.random.default_rng([seed, 2])
    average = copy.deepcopy(network).eval()
    optimiser = torch.optim.AdamW(network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    network.train()
    if not schedule.statistics:
        keep_statistics(network)
    begin = saved = time.monotonic()
    step, recent = 0, float("nan")
    while (progress := (time.monotonic() - begin) / (60 * schedule.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(progress)
        images, targets = batch(pool, rng, schedule.batch_size, schedule.edge)
        value = _step(network, optimiser, loss(network(images.to(memory_format=torch.channels_last_3d)), targets))
        recent = value if math.isnan(recent) else 0.98 * recent + 0.02 * value
        step += 1
        follow(average, network, min(schedule.averaging, step / (step + 20)))
        if step % schedule.steps_per_volume == 0:
            pool.refresh()
        if time.monotonic() - saved > 60:
            saved = time.monotonic()
            save(average, folder)
            log.info("%5.1f %%  step %d  loss %.4f", 100 * progress, step, recent)
    if schedule.statistics:
        measure_statistics(average, pool, schedule, rng)
    save(average, folder)
    log.info("done  step %d  loss %.4f", step, recent)
    return average


def _step(network: nn.Module, optimiser: torch.optim.Optimizer, value: Tensor) -> float:
    optimiser.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 2.0)
    optimiser.step()
    return float(value.detach())


def begin_with(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights; a head for another number of outputs stays as it is. Raises RuntimeError for what does not fit."""
    known = network.state_dict()
    fresh = {n for n in known if n.startswith("head.") and n in weights and weights[n].shape != known[n].shape}
    network.load_state_dict({name: known[name] if name in fresh else value for name, value in weights.items()})


def keep_statistics(network: nn.Module) -> None:
    """Let batch normalisation train with the statistics that it will be used with.

    Those of a small batch of unlike stacks differ so much from the mean that a network which always saw its input
    normalised by them finds objects in what is only dim light once the mean is used.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.eval()


@torch.no_grad()
def measure_statistics(network: nn.Module, pool: Pool, schedule: Batches, rng: Generator) -> None:
    """Set the statistics of batch normalisation to plain means over many batches, for the weights as they are now.

    What accumulates during training are means over the last ten batches or so, of weights that were not averaged: so
    noisy that outlines grow and shrink from one minute to the next (Izmailov et al. 2018 do the same).
    """
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm3d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    network.train()
    for _ in range(schedule.statistics):
        images, _ = batch(pool, rng, schedule.batch_size, schedule.edge)
        network(images.to(next(network.parameters()).device, memory_format=torch.channels_last_3d))
    network.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the network's; batch statistics are averages already and are copied."""
    for kept, new in zip(average.parameters(), network.parameters(), strict=True):
        kept.lerp_(new, 1 - decay)
    for statistic, now in zip(average.buffers(), network.buffers(), strict=True):
        statistic.copy_(now)


def save(network: nn.Module, folder: Path) -> None:
    """Write `weights.safetensors` in one move, so that a reader never meets half a file."""
    partial = folder / "weights.partial"
    # Some networks list a layer under several names, which the file does not take for one tensor.
    state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in network.state_dict().items()}
    save_file(state, partial)
    partial.replace(folder / "weights.safetensors")


def read_pairs(images: Sequence[Path], labels: Sequence[Path]) -> list[Pair]:
    """Stacks of one channel and their labels, all [Z, Y, X]. Raises BadFile, and BadParameter for unequal shapes."""
    if len(images) != len(labels):
        raise BadParameter(f"Every image needs its labels: there are {len(images)} images and {len(labels)} labels.")
    pairs = []
    for image, truth in zip(images, labels, strict=True):
        pixels, numbers = (tiff_reader.read(path, Selection(), LIMIT_BYTES, None).array()[0] for path in (image, truth))
        if pixels.shape != numbers.shape:
            raise BadParameter(f"{image} and {truth} differ in shape: {pixels.shape} and {numbers.shape}.")
        pairs.append((pixels, numbers))
    return pairs


def _source(kind: Kind, options: argparse.Namespace) -> Source:
    pairs = read_pairs(options.images, options.labels)
    source = mixed(kind.synthetic, Recorded(pairs, turning=True), options.share) if pairs else kind.synthetic
    return stated(source, kind.diameter, options.stated)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command line."""
    parser = argparse.ArgumentParser(prog="python -m service.training.train", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="nuclei")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall-clock budget")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--init", type=Path, help="weights to start from; a head for other outputs is made anew")
    parser.add_argument("--images", type=Path, nargs="*", default=[], help="recorded stacks, one channel each")
    parser.add_argument("--labels", type=Path, nargs="*", default=[], help="their labels, in the same order")
    parser.add_argument("--share", type=float, default=0.25, help="part of the volumes that is drawn from them")
    parser.add_argument("--stated", type=float, default=0.6, help="part of them whose objects get the model's diameter")
    parser.add_argument("--batch-size", type=int, default=4, help="crops per step")
    parser.add_argument("--keep-statistics", action="store_true", help="of batch normalisation, as --init has them")
    parser.add_argument("--pool", type=int, default=64, help="volumes held in memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    kind = KINDS[options.kind]
    network = ShuffleUNet(1, kind.outputs, kind.widths).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if options.init:
        begin_with(network, load_file(options.init))
    pool = Pool(_source(kind, options), Percentiles(), options.pool, options.seed, targets=kind.targets)
    schedule = Schedule(
        options.minutes,
        options.learning_rate,
        batch_size=options.batch_size,
        steps_per_volume=kind.steps_per_volume * 4 // options.batch_size,
        statistics=0 if options.keep_statistics else Schedule.statistics,
    )
    try:
        train(network, pool, schedule, options.seed, options.out, kind.loss)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
