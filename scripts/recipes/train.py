"""Train a bundled model: `python -m scripts.recipes.train --kind nuclei --out FOLDER --minutes 30`.

The command writes `weights.safetensors` and a checkpoint to FOLDER every minute. If it is run again, it resumes from
the checkpoint, or does nothing if the time budget has been used up. The last line of the log reports the minutes and
the training steps.
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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.recipes import synthetic_nuclei, synthetic_tissue
from scripts.recipes.class_targets import CLASSES, class_loss, class_targets
from scripts.recipes.device_pool import DevicePool
from scripts.recipes.sources import (
    UNKNOWN_LABEL,
    AugmentedStacks,
    FlatStacks,
    PercentileNormalization,
    clear_unknown,
    enlarge_spots,
    mix_sources,
    normalize_volumes,
    resample_flat,
    resample_to_diameter,
    with_random_size,
)
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.training.examples import (
    ExampleDataset,
    ExamplePool,
    Floats,
    StackSource,
    TargetFunction,
    draw_batch,
    read_pairs,
)
from service.training.loop.safe_convolutions import make_convolutions_safe
from service.training.loop.weight_averaging import recompute_statistics, update_average
from service.training.model_folder import save_weights
from service.training.targets.instances import compute_instance_targets, instance_loss

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
# Attributes of `TrainingRun` whose state is stored in the checkpoint.
CHECKPOINT_ATTRIBUTES = ("network", "average", "optimizer")

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the scalar loss of scores [B, K, z, y, x] and targets [B, T, z, y, x]."""


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of a training run.

    minutes             wall-clock time budget; after a warm-up of 5 % of the budget, the learning rate decays along a
                        cosine
    steps               number of training steps, which replaces the time budget; None for none
    learning_rate       maximum learning rate
    weight_decay        weight decay of the AdamW optimizer
    batch_size          crops per step
    edge                edge length of a crop in voxels
    ema_decay           decay per step of the moving average of the weights; the average is saved
    steps_per_volume    steps after which one volume in the pool is replaced
    statistics_batches  batches for measuring the batch normalization statistics at the end; 0 keeps the initial
                        statistics and uses them in training
    bf16                whether to compute convolutions in BF16, which halves the time on processors that support it
    """

    minutes: float = 30.0
    steps: int | None = None
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    batch_size: int = 4
    edge: int = 48
    ema_decay: float = 0.998
    steps_per_volume: int = 4
    statistics_batches: int = 80
    bf16: bool = False

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate after a fraction `progress` (0 to 1) of the budget."""
        warm_up = 0.05
        if progress < warm_up:
            return self.learning_rate * (0.1 + 0.9 * progress / warm_up)
        return self.learning_rate * max(0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))), 1e-3)


class Recipe(NamedTuple):
    """Training data, network and loss of a bundled model.

    synthetic          source of synthetic stacks
    diameter           `input.diameter` in `model.yaml`, in voxels
    widths             number of features in each level of the network
    steps_per_volume   steps after which one volume in the pool is replaced, for batches of 4 crops
    outputs            number of scores per voxel
    targets            function that converts labels to training targets
    loss               loss function
    """

    synthetic: StackSource
    diameter: float
    widths: tuple[int, ...]
    steps_per_volume: int
    outputs: int = 2
    targets: TargetFunction = compute_instance_targets
    loss: Loss = instance_loss


WIDTHS = (32, 48, 96, 96)
MEMBRANES = Recipe(with_random_size(synthetic_tissue.synthesize_varied, 128), 32.0, WIDTHS, 8)
RECIPES = {
    "nuclei": Recipe(with_random_size(synthetic_nuclei.synthesize_varied), 20.0, WIDTHS, 4),
    "membranes": MEMBRANES,
    "tissue": MEMBRANES._replace(widths=(16, 32, 64, 64), outputs=len(CLASSES), targets=class_targets, loss=class_loss),
}


FLAT_NUCLEI = with_random_size(synthetic_nuclei.synthesize_flat, shallow_share=1.0)
SPOTS = with_random_size(synthetic_nuclei.synthesize_spots)


class TrainingRun:
    """A training run, which resumes from the checkpoint in `folder` if there is one.

    network   network that is trained
    average   copy of the network with the moving average of its weights
    step      number of completed steps
    seconds   wall-clock time of the run so far, including the time before it was resumed
    loss      moving average of the loss
    """

    def __init__(self, network: nn.Module, schedule: Schedule, folder: Path) -> None:
        self.device = next(network.parameters()).device
        if schedule.bf16 and self.device.type == "cpu":
            make_convolutions_safe(network)
        self.network, self.average = network.train(), copy.deepcopy(network).eval()
        if not schedule.statistics_batches:
            freeze_statistics(network)
        self.schedule, self.folder = schedule, folder
        self.step, self.seconds, self.loss = 0, 0.0, torch.full((), math.nan, device=self.device)
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True
        )
        if (folder / CHECKPOINT).exists():
            self._load_checkpoint()

    @property
    def progress(self) -> float:
        """Fraction of the budget that has been used. At least 1 if the run is complete."""
        if self.schedule.steps is not None:
            return self.step / self.schedule.steps
        return self.seconds / (60 * self.schedule.minutes)

    def train_step(self, images: Tensor, targets: Tensor, loss: Loss) -> None:
        """Run one training step on images [B, 1, z, y, x] and targets [B, T, z, y, x]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate_at(self.progress)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.bf16):
            scores = self.network(images.to(memory_format=torch.channels_last_3d))
        value = _update_weights(self.network, self.optimizer, loss(scores.float(), targets))
        # Reading the value would wait for the device.
        self.loss = torch.where(self.loss.isnan(), value, self.loss.lerp(value, 0.02))
        self.step += 1
        update_average(self.average, self.network, min(self.schedule.ema_decay, self.step / (self.step + 20)))

    def save(self) -> None:
        """Save the averaged weights and the checkpoint, and log the progress."""
        save_weights(self.average, self.folder)
        partial = self.folder / f"{CHECKPOINT}.part"
        states = {name: getattr(self, name).state_dict() for name in CHECKPOINT_ATTRIBUTES}
        torch.save({**states, "step": self.step, "seconds": self.seconds, "loss": float(self.loss)}, partial)
        partial.replace(self.folder / CHECKPOINT)
        log.info("%5.1f %%  %.1f minutes  step %d  loss %.4f", *self._progress_values())

    def _progress_values(self) -> tuple[float, float, int, float]:
        return 100 * min(self.progress, 1), self.seconds / 60, self.step, float(self.loss)

    def _load_checkpoint(self) -> None:
        content = torch.load(self.folder / CHECKPOINT, self.device, weights_only=True)
        for name in CHECKPOINT_ATTRIBUTES:
            getattr(self, name).load_state_dict(content[name])
        self.step, self.seconds = content["step"], content["seconds"]
        self.loss = torch.tensor(content["loss"], device=self.device)


class Pool(Protocol):
    """A pool of training volumes: `HostPool`, or `DevicePool` for a GPU."""

    def draw(self, rng: np.random.Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
        """Draw images [size, 1, edge, edge, edge] and targets [size, T, edge, edge, edge], float32."""

    def refresh(self) -> None:
        """Replace a volume."""

    def close(self) -> None:
        """Stop the processes or the thread that create volumes."""


class HostPool(ExamplePool):
    """A pool in the memory of the host."""

    def draw(self, rng: np.random.Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
        """Draw images [size, 1, edge, edge, edge] and targets [size, T, edge, edge, edge], float32."""
        return draw_batch(self, rng, size, edge)


def train(run: TrainingRun, pool: Pool, seed: int, loss: Loss = instance_loss) -> nn.Module:
    """Train until the time budget is used up; save and return the averaged network in evaluation mode."""
    schedule, saved_at, started = run.schedule, run.seconds, time.monotonic() - run.seconds
    while run.progress < 1:
        rng = np.random.default_rng([seed, 2, run.step])
        run.train_step(*pool.draw(rng, schedule.batch_size, schedule.edge), loss)
        if run.step % schedule.steps_per_volume == 0:
            pool.refresh()
        run.seconds = time.monotonic() - started
        if run.seconds - saved_at > 60:
            saved_at = run.seconds
            run.save()
    if schedule.statistics_batches:
        rng = np.random.default_rng([seed, 3])
        batches = range(schedule.statistics_batches)
        recompute_statistics(run.average, (pool.draw(rng, schedule.batch_size, schedule.edge)[0] for _ in batches))
    run.save()
    return run.average


def _update_weights(network: nn.Module, optimizer: torch.optim.Optimizer, value: Tensor) -> Tensor:
    """Run one optimizer step; return the loss."""
    optimizer.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 2.0)
    optimizer.step()
    return value.detach()


def load_matching_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a network. The head keeps its own weights if its number of outputs differs.

    Raises RuntimeError if the shapes of other weights differ.
    """
    own = network.state_dict()
    skipped = {n for n in own if n.startswith("head.") and n in weights and weights[n].shape != own[n].shape}
    network.load_state_dict({name: own[name] if name in skipped else value for name, value in weights.items()})


def widen_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of a narrower network to weights for `network`, which then computes the same output.

    The existing features ignore the additional ones, which start with random weights. Training then decides how they
    are used. This is similar to Net2Net (Chen et al., 2016), but with random features instead of copies. Weights that
    have the same shape in both networks are copied.
    """
    widened = {name: value.clone() for name, value in network.state_dict().items()}
    for name, narrow in weights.items():
        wide = widened[name]
        if wide.ndim == 5 and wide.shape != narrow.shape:
            # In transposed convolutions, the input channels are the first dimension.
            inputs, outputs = (0, 1) if name.startswith("up.") else (1, 0)
            wide.narrow(inputs, narrow.shape[inputs], wide.shape[inputs] - narrow.shape[inputs]).narrow(
                outputs, 0, narrow.shape[outputs]
            ).zero_()
        wide[tuple(slice(size) for size in narrow.shape)] = narrow
    return widened


def freeze_statistics(network: nn.Module) -> None:
    """Use the running statistics of batch normalization in training, too.

    The statistics of a small batch of different stacks are far from the running mean. A network that was trained with
    batch statistics detects false objects in dim regions when it is used with the running mean.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.eval()


def _make_source(recipe: Recipe, options: argparse.Namespace) -> StackSource:
    """Return the source of normalized training volumes that the command line specifies."""
    pairs = read_pairs(options.images, options.labels)
    source = mix_sources(recipe.synthetic, AugmentedStacks(pairs), options.share) if pairs else recipe.synthetic
    source = resample_to_diameter(source, recipe.diameter, options.stated)
    source = mix_sources(source, enlarge_spots(SPOTS, recipe.diameter), options.spot_share)
    source = normalize_volumes(
        mix_sources(source, resample_flat(FLAT_NUCLEI, recipe.diameter), options.flat_share), PercentileNormalization()
    )
    organoids = read_pairs(options.organoids, options.organoid_labels)
    return mix_sources(source, FlatStacks(organoids, recipe.diameter), options.organoid_share) if organoids else source


def _as_float32(image: NDArray[Any]) -> Floats:
    return image.astype(np.float32)


def include_unknown(compute: TargetFunction) -> TargetFunction:
    """Return a function with a mask of unknown voxels as an additional target, which is 0 outside the volume."""

    def compute_with_mask(labels: NDArray[Any]) -> Floats:
        return np.concatenate([compute(clear_unknown(labels)), (labels == UNKNOWN_LABEL)[None]]).astype(np.float32)

    return compute_with_mask


def exclude_unknown(loss: Loss) -> Loss:
    """Return a loss that excludes the voxels of the mask that `include_unknown` adds to the targets."""
    return lambda scores, targets: loss(scores, torch.cat([targets[:, :-1], 1 - targets[:, -1:]], dim=1))


def _make_pool(dataset: ExampleDataset, options: argparse.Namespace, first_number: int) -> Pool:
    if options.device.type == "cpu":
        return HostPool(dataset, options.pool, first_number=first_number, worker_count=options.workers)
    return DevicePool(dataset, options.pool, options.device, first_number=first_number, worker_count=options.workers)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.train", description=__doc__)
    parser.add_argument("--kind", choices=RECIPES, default="nuclei", help="bundled model to train")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall-clock time budget")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="maximum learning rate")
    parser.add_argument("--widths", type=int, nargs="+", help="features per level (default: the widths of the kind)")
    parser.add_argument(
        "--init",
        type=Path,
        help="initial weights; they may be for a narrower network if --widths is given, and a head with a different "
        "number of outputs is not loaded",
    )
    parser.add_argument("--images", type=Path, nargs="*", default=[], help="recorded stacks with one channel")
    parser.add_argument("--labels", type=Path, nargs="*", default=[], help="labels, in the same order as the stacks")
    parser.add_argument("--share", type=float, default=0.25, help="fraction of volumes drawn from recorded stacks")
    parser.add_argument(
        "--stated", type=float, default=0.6, help="fraction of volumes that are resampled to the diameter of the model"
    )
    parser.add_argument(
        "--spot-share", type=float, default=0.0, help="fraction of the other volumes with spots, most of them enlarged"
    )
    parser.add_argument(
        "--flat-share",
        type=float,
        default=0.0,
        help="fraction of the other volumes with synthetic nuclei that are a few planes deep",
    )
    parser.add_argument("--organoids", type=Path, nargs="*", default=[], help="recorded stacks with flat nuclei")
    parser.add_argument(
        "--organoid-labels",
        type=Path,
        nargs="*",
        default=[],
        help=f"labels, in the same order as the stacks; {UNKNOWN_LABEL} means unknown",
    )
    parser.add_argument(
        "--organoid-share", type=float, default=0.33, help="fraction of volumes with recorded organoids"
    )
    parser.add_argument("--steps", type=int, help="number of training steps instead of --minutes")
    parser.add_argument("--ema-decay", type=float, default=Schedule.ema_decay, help="decay of the averaged weights")
    parser.add_argument("--batch-size", type=int, default=4, help="crops per step")
    parser.add_argument("--edge", type=int, default=48, help="edge length of a crop in voxels")
    parser.add_argument(
        "--keep-statistics", action="store_true", help="keep the batch normalization statistics of the initial weights"
    )
    parser.add_argument("--pool", type=int, default=64, help="number of volumes in memory")
    parser.add_argument("--bf16", action="store_true", help="use BF16, for processors with BF16 instructions")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="device to train on")
    parser.add_argument("--workers", type=int, default=0, help="processes that create volumes, for a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model with the options of the command line."""
    options = _parse_options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[options.kind]
    widths = options.widths or recipe.widths
    network = ShuffleUNet(1, recipe.outputs, widths).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if options.init:
        weights = load_file(options.init)
        load_matching_weights(network, widen_weights(network, weights) if options.widths else weights)
    targets, loss = recipe.targets, recipe.loss
    if options.organoids:
        targets, loss = include_unknown(targets), exclude_unknown(loss)
    dataset = ExampleDataset(_make_source(recipe, options), _as_float32, options.seed, targets)
    network.to(options.device)
    schedule = Schedule(
        options.minutes,
        options.steps,
        options.learning_rate,
        batch_size=options.batch_size,
        edge=options.edge,
        ema_decay=options.ema_decay,
        steps_per_volume=max(recipe.steps_per_volume * 4 // options.batch_size, 1),
        statistics_batches=0 if options.keep_statistics else Schedule.statistics_batches,
        bf16=options.bf16,
    )
    run = TrainingRun(network, schedule, options.out)
    if run.progress >= 1:
        log.info("%s: already complete, %.1f minutes, step %d", options.out, run.seconds / 60, run.step)
        return
    pool = _make_pool(dataset, options, run.step // schedule.steps_per_volume)
    try:
        train(run, pool, options.seed, loss)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
