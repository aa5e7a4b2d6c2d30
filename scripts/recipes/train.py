"""Train a bundled model: `python -m scripts.recipes.train --kind nuclei --out FOLDER --minutes 30`.

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
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.recipes.class_targets import CLASSES, class_loss, class_targets
from scripts.recipes.sources import Percentiles, TurnedStacks, mix, random_size, resample_to_diameter
from scripts.recipes.synthetic_nuclei import synthesise
from scripts.recipes.synthetic_tissue import synthesise_tissue
from service.models.architectures import ShuffleUNet
from service.training.averaging import measure_statistics, update_average
from service.training.examples import ExampleDataset, ExamplePool, Source, Targets, draw_batch, read_pairs
from service.training.instance_targets import instance_loss, instance_targets
from service.training.model_folder import save_weights

log = logging.getLogger(__name__)

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
    statistics      batches over which the statistics of batch normalisation are measured at the end; 0: the initial
                    statistics stay, and the weights are trained with them
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


MEMBRANES = Recipe(random_size(synthesise_tissue), 32.0, (16, 32, 64, 64), 4)
RECIPES = {
    "nuclei": Recipe(random_size(synthesise), 20.0, (32, 48, 96, 96), 2),
    "membranes": MEMBRANES,
    "tissue": MEMBRANES._replace(outputs=len(CLASSES), targets=class_targets, loss=class_loss),
}


def train(  # noqa: PLR0913, PLR0917
    network: nn.Module, pool: ExamplePool, schedule: Schedule, seed: int, folder: Path, loss: Loss = instance_loss
) -> nn.Module:
    """Train until the budget is spent; return the averaged network in evaluation mode, which is saved in `folder`."""
    rng = np.random.default_rng([seed, 2])
    average = copy.deepcopy(network).eval()
    optimiser = torch.optim.AdamW(network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    network.train()
    if not schedule.statistics:
        freeze_statistics(network)
    began = saved = time.monotonic()
    step, recent = 0, float("nan")
    while (progress := (time.monotonic() - began) / (60 * schedule.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(progress)
        images, targets = draw_batch(pool, rng, schedule.batch_size, schedule.edge)
        scores = network(images.to(memory_format=torch.channels_last_3d))
        value = _update_weights(network, optimiser, loss(scores, targets))
        recent = value if math.isnan(recent) else 0.98 * recent + 0.02 * value
        step += 1
        update_average(average, network, min(schedule.averaging, step / (step + 20)))
        if step % schedule.steps_per_volume == 0:
            pool.refresh()
        if time.monotonic() - saved > 60:
            saved = time.monotonic()
            save_weights(average, folder)
            log.info("%5.1f %%  step %d  loss %.4f", 100 * progress, step, recent)
    if schedule.statistics:
        batches = range(schedule.statistics)
        measure_statistics(average, (draw_batch(pool, rng, schedule.batch_size, schedule.edge)[0] for _ in batches))
    save_weights(average, folder)
    log.info("done  step %d  loss %.4f", step, recent)
    return average


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
    recipe = RECIPES[options.kind]
    network = ShuffleUNet(1, recipe.outputs, recipe.widths).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if options.init:
        load_matching(network, load_file(options.init))
    dataset = ExampleDataset(_make_source(recipe, options), Percentiles(), options.seed, recipe.targets)
    pool = ExamplePool(dataset, options.pool)
    schedule = Schedule(
        options.minutes,
        options.learning_rate,
        batch_size=options.batch_size,
        steps_per_volume=recipe.steps_per_volume * 4 // options.batch_size,
        statistics=0 if options.keep_statistics else Schedule.statistics,
    )
    try:
        train(network, pool, schedule, options.seed, options.out, recipe.loss)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
