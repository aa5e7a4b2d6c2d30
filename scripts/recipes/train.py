"""Train a bundled model: `python -m scripts.recipes.train --kind nuclei --out FOLDER --minutes 30`.

Writes `weights.safetensors` and a checkpoint into the folder every minute. The same command goes on from the
checkpoint, and does nothing once the budget is spent. The last line has the minutes and the steps.
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
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.recipes import synthetic_nuclei, synthetic_tissue
from scripts.recipes.class_targets import CLASSES, class_loss, class_targets
from scripts.recipes.sources import Percentiles, TurnedStacks, mix, random_size, resample_to_diameter
from service.models.architectures import ShuffleUNet
from service.training.examples import ExampleDataset, ExamplePool, Source, Targets, draw_batch, read_pairs
from service.training.instance_targets import instance_loss, instance_targets
from service.training.model_folder import save_weights
from service.training.techniques import make_convolutions_safe, measure_statistics, update_average

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
STATEFUL = ("network", "average", "optimiser")

Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss of scores [B, K, z, y, x] against targets [B, T, z, y, x], a scalar."""


@dataclass(frozen=True)
class Schedule:
    """Duration and speed of a training.

    minutes         wall-clock budget; the learning rate rises for its first twentieth, then falls along a cosine
    learning_rate   at its highest
    batch_size      crops per step, cubes of `edge` voxels
    averaging       decay per step of the moving average of the weights, which is what is saved
    steps_per_volume   steps after which another volume replaces one of the pool
    bf16            whether convolutions are computed in BF16, which processors with units for it do in half the time
    statistics      batches over which the statistics of batch normalisation are measured at the end; 0: the initial
                    statistics stay, and the weights are trained with them
    """

    minutes: float = 30.0
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    batch_size: int = 4
    edge: int = 48
    averaging: float = 0.998
    steps_per_volume: int = 4
    statistics: int = 80
    bf16: bool = False

    def rate(self, progress: float) -> float:
        """Return the learning rate at `progress` (0 to 1) through the budget."""
        rise = 0.05
        if progress < rise:
            return self.learning_rate * (0.1 + 0.9 * progress / rise)
        return self.learning_rate * max(0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise))), 1e-3)


class Recipe(NamedTuple):
    """Ingredients of a bundled model.

    synthetic   source of synthetic stacks
    diameter    `input.diameter` of its model file; `widths`: features by level of the network
    outputs     scores per voxel; `targets` makes of labels what the network learns
    """

    synthetic: Source
    diameter: float
    widths: tuple[int, ...]
    steps_per_volume: int
    outputs: int = 2
    targets: Targets = instance_targets
    loss: Loss = instance_loss


WIDTHS = (32, 48, 96, 96)
MEMBRANES = Recipe(random_size(synthetic_tissue.synthesise_varied, 128), 32.0, WIDTHS, 8)
RECIPES = {
    "nuclei": Recipe(random_size(synthetic_nuclei.synthesise_varied), 20.0, WIDTHS, 4),
    "membranes": MEMBRANES,
    "tissue": MEMBRANES._replace(widths=(16, 32, 64, 64), outputs=len(CLASSES), targets=class_targets, loss=class_loss),
}


class Run:
    """Training of a network, which goes on from the checkpoint in `folder` if there is one.

    network, average   what is trained, and the moving average of its weights
    step, seconds      done so far; seconds are of wall-clock time
    """

    def __init__(self, network: nn.Module, schedule: Schedule, folder: Path) -> None:
        if schedule.bf16:
            make_convolutions_safe(network)
        self.network, self.average = network.train(), copy.deepcopy(network).eval()
        if not schedule.statistics:
            freeze_statistics(network)
        self.schedule, self.folder = schedule, folder
        self.step, self.seconds, self.loss = 0, 0.0, float("nan")
        self.optimiser = torch.optim.AdamW(
            network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay
        )
        if (folder / CHECKPOINT).exists():
            self._load()

    @property
    def progress(self) -> float:
        """Part of the budget that is spent; 1 and more: all of it."""
        return self.seconds / (60 * self.schedule.minutes)

    def learn(self, images: Tensor, targets: Tensor, loss: Loss) -> None:
        """Take one step on images [B, 1, z, y, x] and targets [B, T, z, y, x]."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.schedule.rate(self.progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.schedule.bf16):
            scores = self.network(images.to(memory_format=torch.channels_last_3d))
        value = _update_weights(self.network, self.optimiser, loss(scores.float(), targets))
        self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
        self.step += 1
        update_average(self.average, self.network, min(self.schedule.averaging, self.step / (self.step + 20)))

    def save(self) -> None:
        """Write the weights and the checkpoint."""
        save_weights(self.average, self.folder)
        partial = self.folder / f"{CHECKPOINT}.part"
        parts = {name: getattr(self, name).state_dict() for name in STATEFUL}
        torch.save({**parts, "step": self.step, "seconds": self.seconds, "loss": self.loss}, partial)
        partial.replace(self.folder / CHECKPOINT)
        log.info("%5.1f %%  %.1f minutes  step %d  loss %.4f", *self._figures())

    def _figures(self) -> tuple[float, float, int, float]:
        return 100 * min(self.progress, 1), self.seconds / 60, self.step, self.loss

    def _load(self) -> None:
        content = torch.load(self.folder / CHECKPOINT, weights_only=True)
        for name in STATEFUL:
            getattr(self, name).load_state_dict(content[name])
        self.step, self.seconds, self.loss = content["step"], content["seconds"], content["loss"]


def train(run: Run, pool: ExamplePool, seed: int, loss: Loss = instance_loss) -> nn.Module:
    """Train until the budget is spent; return the averaged network in evaluation mode, which is saved in its folder."""
    schedule, saved, began = run.schedule, run.seconds, time.monotonic() - run.seconds
    while run.progress < 1:
        rng = np.random.default_rng([seed, 2, run.step])
        run.learn(*draw_batch(pool, rng, schedule.batch_size, schedule.edge), loss)
        if run.step % schedule.steps_per_volume == 0:
            pool.refresh()
        run.seconds = time.monotonic() - began
        if run.seconds - saved > 60:
            saved = run.seconds
            run.save()
    if schedule.statistics:
        rng = np.random.default_rng([seed, 3])
        batches = range(schedule.statistics)
        measure_statistics(run.average, (draw_batch(pool, rng, schedule.batch_size, schedule.edge)[0] for _ in batches))
    run.save()
    return run.average


def _update_weights(network: nn.Module, optimiser: torch.optim.Optimizer, value: Tensor) -> float:
    """Take one step down the gradient of a loss; return the loss as a number."""
    optimiser.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 2.0)
    optimiser.step()
    return float(value.detach())


def load_matching(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights, but none of a head for another number of outputs. Raises RuntimeError for other shapes."""
    known = network.state_dict()
    fresh = {n for n in known if n.startswith("head.") and n in weights and weights[n].shape != known[n].shape}
    network.load_state_dict({name: known[name] if name in fresh else value for name, value in weights.items()})


def grow(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights for a wider network that compute what those of a narrower one do.

    Its own features read nothing from the new ones yet, which start at random, so that training decides what they add
    (Net2Net, Chen et al. 2016, with fresh features instead of copies). Weights of one shape in both stay as they are.
    """
    grown = {name: value.clone() for name, value in network.state_dict().items()}
    for name, narrow in weights.items():
        wide = grown[name]
        if wide.ndim == 5 and wide.shape != narrow.shape:
            # Those of transposed convolutions have the features that are read first.
            read, made = (0, 1) if name.startswith("up.") else (1, 0)
            wide.narrow(read, narrow.shape[read], wide.shape[read] - narrow.shape[read]).narrow(
                made, 0, narrow.shape[made]
            ).zero_()
        wide[tuple(slice(size) for size in narrow.shape)] = narrow
    return grown


def freeze_statistics(network: nn.Module) -> None:
    """Train batch normalisation with the statistics that it will be used with.

    Statistics of a small batch of unlike stacks differ much from the mean. A network trained with them finds objects
    in merely dim light once the mean is used.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.eval()


def _make_source(recipe: Recipe, options: argparse.Namespace) -> Source:
    pairs = read_pairs(options.images, options.labels)
    source = mix(recipe.synthetic, TurnedStacks(pairs), options.share) if pairs else recipe.synthetic
    return resample_to_diameter(source, recipe.diameter, options.stated)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.train", description=__doc__)
    parser.add_argument("--kind", choices=RECIPES, default="nuclei")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall-clock budget")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--widths", type=int, nargs="+", help="features by level, instead of those of the kind")
    parser.add_argument(
        "--init", type=Path, help="weights to start from, which may be narrower; a head for other outputs is made anew"
    )
    parser.add_argument("--images", type=Path, nargs="*", default=[], help="recorded stacks, one channel each")
    parser.add_argument("--labels", type=Path, nargs="*", default=[], help="their labels, in the same order")
    parser.add_argument("--share", type=float, default=0.25, help="part of the volumes that is drawn from them")
    parser.add_argument("--stated", type=float, default=0.6, help="part of them whose objects get the model's diameter")
    parser.add_argument("--batch-size", type=int, default=4, help="crops per step")
    parser.add_argument("--edge", type=int, default=48, help="voxels along each axis of a crop")
    parser.add_argument("--keep-statistics", action="store_true", help="of batch normalisation, as --init has them")
    parser.add_argument("--pool", type=int, default=64, help="volumes held in memory")
    parser.add_argument("--bf16", action="store_true", help="for processors with units for BF16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[options.kind]
    widths = options.widths or recipe.widths
    network = ShuffleUNet(1, recipe.outputs, widths).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if options.init:
        weights = load_file(options.init)
        load_matching(network, grow(network, weights) if options.widths else weights)
    schedule = Schedule(
        options.minutes,
        options.learning_rate,
        batch_size=options.batch_size,
        edge=options.edge,
        steps_per_volume=recipe.steps_per_volume * 4 // options.batch_size,
        statistics=0 if options.keep_statistics else Schedule.statistics,
        bf16=options.bf16,
    )
    run = Run(network, schedule, options.out)
    if run.progress >= 1:
        log.info("%s: done, %.1f minutes, step %d", options.out, run.seconds / 60, run.step)
        return
    dataset = ExampleDataset(_make_source(recipe, options), Percentiles(), options.seed, recipe.targets)
    pool = ExamplePool(dataset, options.pool, first=run.step // schedule.steps_per_volume)
    try:
        train(run, pool, options.seed, recipe.loss)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
