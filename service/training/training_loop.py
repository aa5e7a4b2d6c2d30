"""The training loop: steps, validation, and checkpoints from which training can be resumed with the same result."""

from __future__ import annotations

import copy
import csv
import logging
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from monai.metrics.meandice import compute_dice
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from tqdm import tqdm

from service.core.errors import BadParameter
from service.core.files.atomic_files import write_atomically
from service.core.sections.computing import Training
from service.training.examples import (
    STEPS_PER_REFRESH,
    ExampleDataset,
    ExamplePool,
    Normalizer,
    Pair,
    RandomlyZoomedStacks,
    cut_tiles,
    draw_batch,
    prefetch_batches,
)
from service.training.instance_targets import instance_loss
from service.training.techniques import checkpoint_blocks, make_convolutions_safe, recompute_statistics, update_average

log = logging.getLogger("service.train")

CHECKPOINT_FILE = "checkpoint.pt"
CURVE_FILE = "training.csv"
CURVE_COLUMNS = ("step", "learning_rate", "loss", "validation", "skipped", "dice")


class TrainingPlan(Training):
    """Training options: the settings and two additional options.

    Durations are in steps, so that the same seed gives the same result on machines of different speed. The learning
    rate has a linear warm-up during the first twentieth of the steps, and then a cosine decay. Checkpoints contain the
    options by name, so renaming a field would prevent resuming from older checkpoints.

    averaging   decay per step of the moving average of the weights, which is used for the new model
    statistics  number of batches from which the batch normalization statistics of the averaged network are computed
    """

    averaging: Annotated[float, Field(ge=0, lt=1)] = 0.99
    statistics: PositiveInt = 40

    def get_learning_rate(self, step: int) -> float:
        """Return the learning rate of a zero-based step."""
        progress, warm_up_fraction = step / self.steps, 0.05
        if progress < warm_up_fraction:
            return self.learning_rate * (0.1 + 0.9 * progress / warm_up_fraction)
        return self.learning_rate * max(
            0.5 * (1 + math.cos(math.pi * (progress - warm_up_fraction) / (1 - warm_up_fraction))), 1e-3
        )


@dataclass
class TrainerState:
    """The progress of training: the content of a checkpoint except for tensors. Checkpoints contain the field names.

    step     number of completed steps
    best     lowest validation loss
    stale    number of validations since the validation loss last improved
    skipped  number of skipped steps
    curve    a row with the columns `CURVE_COLUMNS` for each validation, the first one before any step; missing values
             are None
    """

    step: int = 0
    best: float = math.inf
    stale: int = 0
    skipped: int = 0
    curve: list[list[float | None]] = field(default_factory=list)

    def summarize(self) -> str:
        """Return a summary of the changes in validation loss and Dice score."""
        best_row = next((row for row in self.curve if row[3] == self.best), self.curve[0])
        (_, _, _, initial_loss, _, initial_dice), (_, _, _, best_loss, _, best_dice) = self.curve[0], best_row
        loss_text = f"validation loss {_format_number(initial_loss)} before, {_format_number(best_loss)} at best"
        dice_text = f", Dice score {_format_number(initial_dice)} before, {_format_number(best_dice)} at that point"
        skip_text = f", {self.skipped} steps skipped because of a non-finite loss or gradient" if self.skipped else ""
        return f"{self.step} steps, {loss_text}{dice_text}{skip_text}"

    def describe_failure(self) -> str | None:
        """Return a message with advice if no validation loss was lower than before the first step, else None."""
        initial_loss, *later_losses = (
            row[3] if row[3] is not None and math.isfinite(row[3]) else math.inf for row in self.curve
        )
        if self.best < initial_loss:
            return None
        advice = "more --steps or --minutes, a lower --learning-rate, or more annotated stacks"
        if self.skipped > self.step / 10:
            advice = "engine.precision: fp32 in the configuration file, or a lower --learning-rate"
        return (
            f"no improvement after {self.step} steps: validation loss {_format_number(initial_loss)} at the start, "
            f"{_format_number(min(later_losses, default=None))} at best, so the initial weights are used. Try {advice}."
            " Also check that each --labels file belongs to its image."
        )


class TrainingData(NamedTuple):
    """The stacks and labels for training and for validation, and the function that normalizes images."""

    training_pairs: Sequence[Pair]
    validation_pairs: Sequence[Pair]
    normalize: Normalizer


class TrainingPlacement(NamedTuple):
    """The training device, and the dtype for mixed precision (float32 for full precision)."""

    device: torch.device
    dtype: torch.dtype


class Trainer:
    """A trainer for a network on one device. The loss curve and the checkpoints are written to `folder`."""

    def __init__(
        self, network: nn.Module, data: TrainingData, plan: TrainingPlan, folder: Path, placement: TrainingPlacement
    ) -> None:
        self.plan, self.folder, self.state = plan, folder, TrainerState()
        self._device, self._dtype = device, dtype = placement
        self._network = network.to(device).train().requires_grad_(requires_grad=True)
        self._averaged_network = copy.deepcopy(network).eval()
        self._best_weights = copy.deepcopy(self._averaged_network.state_dict())
        self._forward = self._prepare_network()
        self._latest_loss: float | None = None
        # Whether all steps are done, so that only the statistics of the averaged network remain to be computed.
        self.is_finishing = False
        # Called after each step, after each validation, and at the end of the steps.
        self.on_progress: Callable[[Trainer], None] = _ignore_progress
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=device.type == "cuda"
        )
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self._dataset = ExampleDataset(RandomlyZoomedStacks(data.training_pairs), data.normalize, plan.seed)
        self._validation_tiles = [cut_tiles(pair, data.normalize, plan.edge) for pair in data.validation_pairs]

    def run(self) -> nn.Module:
        """Train as planned. Return the averaged network with the lowest validation loss, on the CPU."""
        plan, state = self.plan, self.state
        first_example_number = state.step // STEPS_PER_REFRESH
        pool = ExamplePool(self._dataset, plan.pool, first_number=first_example_number, worker_count=plan.workers)
        batches = prefetch_batches(pool, plan, state.step, pin_memory=self._device.type == "cuda")
        start_time = time.monotonic()
        try:
            if not state.step:
                self._validate()
            # With `disable=None`, the progress bar is shown only on a terminal.
            with tqdm(total=plan.steps, initial=state.step, unit="step", disable=None) as bar:
                while state.step < plan.steps and state.stale < plan.patience:
                    if plan.minutes is not None and time.monotonic() - start_time > 60 * plan.minutes:
                        log.info("time limit reached after %d of %d steps", state.step, plan.steps)
                        break
                    self.step(*next(batches))
                    self.on_progress(self)
                    if state.step % plan.every == 0 or state.step == plan.steps:
                        self._validate()
                        self.save()
                    bar.set_postfix(
                        loss=_format_number(self._latest_loss), best=_format_number(state.best), refresh=False
                    )
                    bar.update()
            batches.close()
            self.is_finishing = True
            self.on_progress(self)
            self._averaged_network.load_state_dict(self._best_weights)
            rng = np.random.default_rng([plan.seed, 3])
            images = (draw_batch(pool, rng, plan.batch_size, plan.edge)[0] for _ in range(plan.statistics))
            recompute_statistics(self._averaged_network, images)
            if self._score_averaged_network()[0] > state.best:
                self._averaged_network.load_state_dict(self._best_weights)
        finally:
            batches.close()
            pool.close()
        return self._averaged_network.cpu()

    @property
    def latest_loss(self) -> float | None:
        """The latest finite loss of a step."""
        return self._latest_loss

    def get_example_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch of the planned shape from the validation stacks. Each call returns the same batch."""
        images, targets = self._validation_tiles[0]
        indices = [number % len(images) for number in range(self.plan.batch_size)]
        return images[indices], targets[indices]

    def measure_step(self) -> float:
        """Run a training step on the example batch, and return its duration in seconds."""
        start_time = time.perf_counter()
        self.step(*self.get_example_batch())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start_time

    def step(self, images: Tensor, targets: Tensor) -> None:
        """Run a training step. A step with a non-finite loss or gradient is skipped and counted."""
        plan, state, scaler = self.plan, self.state, self._scaler
        for group in self._optimizer.param_groups:
            group["lr"] = plan.get_learning_rate(state.step)
        self._optimizer.zero_grad(set_to_none=True)
        loss = instance_loss(self._compute_scores(self._forward, images), targets.to(self._device, non_blocking=True))
        scaled_loss = scaler.scale(loss)
        loss_value = float(loss.detach())
        if not math.isfinite(loss_value):
            state.skipped += 1
            if scaler.is_enabled():
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        else:
            self._latest_loss = loss_value
            if self._update_weights(scaled_loss):
                update_average(
                    self._averaged_network, self._network, min(plan.averaging, (state.step + 1) / (state.step + 11))
                )
            else:
                state.skipped += 1
        state.step += 1

    def _update_weights(self, scaled_loss: Tensor) -> bool:
        """Update the weights with the gradients of a scaled loss. Return whether the gradients were finite."""
        scaled_loss.backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self._optimizer)
        gradient_norm = nn.utils.clip_grad_norm_(self._network.parameters(), self.plan.clip)
        is_finite = math.isfinite(float(gradient_norm))
        # An enabled scaler skips a non-finite update itself and reduces the scale.
        if is_finite or self._scaler.is_enabled():
            self._scaler.step(self._optimizer)
            self._scaler.update()
        return is_finite

    def _prepare_network(self) -> Callable[[Tensor], Tensor]:
        """Apply the planned memory format and activation checkpointing. Return the network, compiled if planned."""
        if self.plan.channels_last:
            for parameter in self._network.parameters():
                if parameter.dim() == 5:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
        if self._dtype == torch.bfloat16 and self._device.type == "cpu":
            make_convolutions_safe(self._network)
        if self.plan.checkpointing:
            checkpoint_blocks(self._network)
        return torch.compile(self._network, dynamic=False) if self.plan.compile else self._network

    def _compute_scores(self, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        layout = torch.channels_last_3d if self.plan.channels_last else torch.contiguous_format
        images = images.to(self._device, memory_format=layout, non_blocking=True)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            scores = network(images)
        return scores.float()

    @torch.no_grad()
    def _score_averaged_network(self) -> tuple[float, float | None]:
        """Return the mean validation loss and the foreground Dice score (None if undefined) of the averaged network."""
        losses, dice_scores = list[float](), list[Tensor]()
        for images, targets in self._validation_tiles:
            scores, truth = self._compute_scores(self._averaged_network, images), targets.to(self._device)
            losses.append(float(instance_loss(scores, truth)))
            dice_scores.append(compute_dice((scores[:, :1] > 0).float(), truth[:, :1]))
        mean_dice = float(torch.cat(dice_scores).nanmean())
        return sum(losses) / len(losses), mean_dice if math.isfinite(mean_dice) else None

    def _validate(self) -> None:
        """Validate the averaged network, copy its weights if they are the best so far, and write the loss curve."""
        state, (loss, dice) = self.state, self._score_averaged_network()
        if loss < state.best:
            state.best, state.stale = loss, 0
            self._best_weights = copy.deepcopy(self._averaged_network.state_dict())
        else:
            state.stale += 1
        learning_rate = self.plan.get_learning_rate(max(state.step - 1, 0))
        state.curve.append([state.step, learning_rate, self._latest_loss, loss, state.skipped, dice])
        percentage = 100 * state.step / self.plan.steps
        loss_text = f"  loss {_format_number(self._latest_loss)}" if state.step else ""
        score_texts = (_format_number(loss), _format_number(state.best), _format_number(dice))
        log.info("%5.1f%%  step %d%s  validation %s  best %s  Dice %s", percentage, state.step, loss_text, *score_texts)
        with (self.folder / CURVE_FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(CURVE_COLUMNS)
            writer.writerows(state.curve)
        self.on_progress(self)

    def save(self) -> None:
        """Write a checkpoint, which atomically replaces the previous one."""
        content = {
            "plan": _select_options_affecting_result(self.plan),
            "state": vars(self.state),
            "network": self._network.state_dict(),
            "average": self._averaged_network.state_dict(),
            "best": self._best_weights,
            "optimiser": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }
        with write_atomically(self.folder / CHECKPOINT_FILE) as partial_path:
            torch.save(content, partial_path)

    def resume(self) -> None:
        """Continue from the checkpoint in the folder.

        Raises BadParameter if the checkpoint is missing or was written with different options.
        """
        path = self.folder / CHECKPOINT_FILE
        try:
            content: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
            if {
                **_select_options_affecting_result(TrainingPlan()),
                **content["plan"],
            } != _select_options_affecting_result(self.plan):
                raise BadParameter(
                    f"{path} was written with different options. Use the same options, or start training from scratch"
                    " in a new folder."
                )
            self._network.load_state_dict(content["network"])
            self._averaged_network.load_state_dict(content["average"])
            self._optimizer.load_state_dict(content["optimiser"])
            self._best_weights, self.state = content["best"], TrainerState(**content["state"])
            # Older checkpoints, and checkpoints from training in full precision, contain no scaler state.
            if content.get("scaler") and self._scaler.is_enabled():
                self._scaler.load_state_dict(content["scaler"])
        except (OSError, KeyError, RuntimeError, pickle.UnpicklingError, TypeError, ValueError) as error:
            raise BadParameter(f"Training cannot be resumed from {path}: {error}") from error
        log.info("resumed at step %d", self.state.step)


def _ignore_progress(_: Trainer) -> None:
    """Ignore a progress report."""


def _format_number(value: float | None) -> str:
    """Format a number for users. Format missing values as a dash."""
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "-"


def _select_options_affecting_result(plan: TrainingPlan) -> dict[str, Any]:
    """Return the options that must not change, so that resumed training gives the same result."""
    return {name: value for name, value in plan.model_dump().items() if name not in {"minutes", "patience", "workers"}}
