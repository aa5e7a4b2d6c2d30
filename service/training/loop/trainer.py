"""The training loop: steps, validation, and checkpoints from which training can be resumed with the same result."""

from __future__ import annotations

import copy
import csv
import logging
import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

from service.core.errors import BadParameter
from service.core.files.atomic_files import write_atomically
from service.models.spec_parts import Decoding
from service.training.examples import STEPS_PER_REFRESH, Example, ExamplePool, draw_batch, prefetch_batches
from service.training.loop.checkpointing import checkpoint_blocks
from service.training.loop.object_scores import prefer_first
from service.training.loop.plan import CURVE_COLUMNS, TrainerState, TrainingPlan, ValidationScores, format_number
from service.training.loop.safe_convolutions import make_convolutions_safe
from service.training.loop.weight_averaging import interpolate_weights, recompute_statistics, update_average

if TYPE_CHECKING:
    from service.training.loop.validation import Validator

log = logging.getLogger("service.train")

CHECKPOINT_FILE = "checkpoint.pt"
CURVE_FILE = "training.csv"
_Candidate = tuple[float, dict[str, Any], Decoding]
"""Weights that may be chosen: their F1 score in the validation parts, the weights, and their decoding."""
# Minimum time between validations as a multiple of the duration of a validation, if the time is limited.
VALIDATION_INTERVAL_RATIO = 4.0
# Minimum difference between the completed fractions of the time and of the steps for the time to count. Otherwise, the
# learning rate of the first steps, and so the result, would depend on milliseconds even if there is enough time.
TIME_TOLERANCE = 0.02


class TrainingData(NamedTuple):
    """The source of examples for training, and the validation of networks."""

    examples: Dataset[Example]
    validator: Validator


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
        self._averaged_network, self._candidate = copy.deepcopy(network).eval(), copy.deepcopy(network).eval()
        self._initial_weights = copy.deepcopy(self._averaged_network.state_dict())
        self._best_weights = self._initial_weights
        self._forward = self._prepare_network()
        self._latest_loss: float | None = None
        # Whether all steps are done, so that only the final weights remain to be chosen.
        self.is_finishing = False
        # Returns the time in seconds. Tests replace it.
        self.clock: Callable[[], float] = time.monotonic
        # Called after each step, after each validation, and at the end of the steps.
        self.on_progress: Callable[[Trainer], None] = _ignore_progress
        self._optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=plan.get_learning_rate(0.0),
            weight_decay=plan.weight_decay,
            fused=device.type == "cuda",
        )
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self._examples, self._validator = data
        self._loss = data.validator.targets.loss
        # Decoding with which the best weights have the best scores.
        self.best_decoding = data.validator.spec.decoding
        # Time when training would have started without interruptions, and the end and duration of the last validation.
        self._start_time = self.clock()
        self._last_validation = (-math.inf, 0.0)

    def run(self) -> nn.Module:
        """Train as planned. Return the averaged network with the best validation scores, on the CPU."""
        plan, state = self.plan, self.state
        first_example_number = state.step // STEPS_PER_REFRESH
        pool = ExamplePool(self._examples, plan.pool, first_number=first_example_number, worker_count=plan.workers)
        batches = prefetch_batches(pool, plan, state.step, pin_memory=self._device.type == "cuda")
        self._start_time = self.clock() - state.seconds
        try:
            if not state.curve:
                self._validate()
            # With `disable=None`, the progress bar is shown only on a terminal.
            with tqdm(total=plan.steps, initial=state.step, unit="step", disable=None) as bar:
                while self.progress < 1 and (plan.minutes is not None or state.stale < plan.patience):
                    previous_progress = self.progress
                    self.step(*next(batches))
                    self.on_progress(self)
                    if self._is_validation_due(previous_progress):
                        self._validate()
                        self.save()
                    bar.set_postfix(loss=format_number(self._latest_loss), refresh=False)
                    bar.update()
            batches.close()
            self.is_finishing = True
            self.on_progress(self)
            if plan.fractions:
                self._choose_weights()
            else:
                self._recompute_statistics(pool)
        finally:
            batches.close()
            pool.close()
        self._candidate.load_state_dict(self._best_weights)
        return self._candidate.cpu()

    def _recompute_statistics(self, pool: ExamplePool) -> None:
        """Recompute the batch normalization statistics of the best weights, unless that decreases the scores."""
        plan, rng = self.plan, np.random.default_rng([self.plan.seed, 3])
        self._candidate.load_state_dict(self._best_weights)
        images = (draw_batch(pool, rng, plan.batch_size, plan.edge)[0] for _ in range(plan.statistics))
        recompute_statistics(self._candidate, images)
        scores, decoding = self._validator.validate(self.compute_candidate_scores)
        if not self.best_scores.is_better_than(scores):
            self._best_weights, self.best_decoding = copy.deepcopy(self._candidate.state_dict()), decoding

    def _choose_weights(self) -> None:
        """Choose the step, and then the distance from the initial weights.

        A few annotated objects cannot show which step is best, nor what a network has forgotten about other stacks.
        Therefore, the latest weights, trained with the lowest learning rate, are preferred to the best earlier ones,
        and the weights closest to the initial ones to those further away, unless the others are clearly better.
        """
        latest, *distant = [self._rate_latest_weights(fraction) for fraction in (*self.plan.fractions, 1.0)]
        log.info("F1 by distance from the base model: %s", ", ".join(f"{f1:.2f}" for f1, *_ in (latest, *distant)))
        chosen = self._prefer_first(latest, (self.best_scores.f1, self._best_weights, self.best_decoding))
        _, self._best_weights, self.best_decoding = self._prefer_first(chosen, *distant)

    def _prefer_first(self, *candidates: _Candidate) -> _Candidate:
        return candidates[prefer_first([f1 for f1, *_ in candidates], self._validator.object_count)]

    def _rate_latest_weights(self, fraction: float) -> _Candidate:
        """Validate a fraction of the change of the averaged weights."""
        self._load_candidate(fraction)
        scores, decoding = self._validator.validate(self.compute_candidate_scores)
        return scores.f1, copy.deepcopy(self._candidate.state_dict()), decoding

    def _load_candidate(self, fraction: float) -> None:
        """Load a fraction of the change of the averaged weights into the network that is validated."""
        weights = interpolate_weights(self._initial_weights, self._averaged_network.state_dict(), fraction)
        self._candidate.load_state_dict(weights)

    @property
    def progress(self) -> float:
        """Completed fraction of the training: of the steps or, if it is clearly larger, of the time.

        How many steps fit into the time is not predicted, because other processes may become busy, or idle.
        """
        step_fraction = self.state.step / self.plan.steps
        if self.plan.minutes is None:
            return step_fraction
        time_fraction = (self.clock() - self._start_time) / (60 * self.plan.minutes)
        return time_fraction if time_fraction >= min(step_fraction + TIME_TOLERANCE, 1) else step_fraction

    @property
    def best_scores(self) -> ValidationScores:
        """Scores of the best weights so far."""
        return self.state.get_scores(self.state.best or 0)

    def _is_validation_due(self, previous_progress: float) -> bool:
        """Return whether to validate after a step. Validations must not take most of a limited time."""
        plan, progress = self.plan, self.progress
        if progress >= 1:
            return True
        if plan.minutes is None:
            return self.state.step % plan.every == 0
        interval = plan.every / plan.steps
        end_time, duration = self._last_validation
        is_affordable = self.clock() - end_time > VALIDATION_INTERVAL_RATIO * duration
        return is_affordable and int(progress / interval) > int(previous_progress / interval)

    @property
    def latest_loss(self) -> float | None:
        """The latest finite loss of a step."""
        return self._latest_loss

    def get_example_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch of the planned shape from the validation stacks. Each call returns the same batch."""
        images, targets = self._validator.tiles[0]
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
            group["lr"] = plan.get_learning_rate(self.progress)
        self._optimizer.zero_grad(set_to_none=True)
        scores = self._compute_scores(self._forward, images)
        loss = self._loss(scores, targets.to(self._device, non_blocking=True))
        scaled_loss = scaler.scale(loss)
        loss_value = float(loss.detach())
        if not math.isfinite(loss_value):
            state.skipped += 1
            if scaler.is_enabled():
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        else:
            self._latest_loss = loss_value
            if self._update_weights(scaled_loss):
                decay = min(plan.averaging, (state.step + 1) / (state.step + 11))
                update_average(self._averaged_network, self._network, decay, decay)
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

    def compute_candidate_scores(self, images: Tensor) -> Tensor:
        """Return the raw scores [B, K, z, y, x] of the network that is validated for images [B, 1, z, y, x]."""
        return self._compute_scores(self._candidate, images)

    def _validate(self) -> None:
        """Validate the averaged weights, copy them if they are the best so far, and write the loss curve."""
        state, start_time = self.state, self.clock()
        self._load_candidate(min(self.plan.fractions, default=1.0))
        scores, decoding = self._validator.validate(self.compute_candidate_scores)
        state.seconds = self.clock() - self._start_time
        if state.add_row(self.plan.get_learning_rate(self.progress), self._latest_loss, scores):
            self._best_weights, self.best_decoding = copy.deepcopy(self._candidate.state_dict()), decoding
        self._last_validation = (self.clock(), self.clock() - start_time)
        loss_text = f"  loss {format_number(self._latest_loss)}" if state.step else ""
        log.info(
            "%5.1f%%  step %d%s  validation loss %s  F1 %.2f (at IoU 0.7 %.2f)  precision %.2f  recall %.2f",
            100 * min(self.progress, 1.0),
            state.step,
            loss_text,
            format_number(scores.loss),
            scores.f1,
            scores.f1_strict,
            scores.precision,
            scores.recall,
        )
        with (self.folder / CURVE_FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(CURVE_COLUMNS)
            writer.writerows(state.curve)
        self.on_progress(self)

    def save(self) -> None:
        """Write a checkpoint, which atomically replaces the previous one."""
        content = {
            "plan": self.plan.select_options_affecting_result(),
            "state": vars(self.state),
            "network": self._network.state_dict(),
            "average": self._averaged_network.state_dict(),
            "best": self._best_weights,
            "optimiser": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "decoding": self.best_decoding.model_dump(),
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
            defaults = TrainingPlan().select_options_affecting_result()
            if defaults | content["plan"] != self.plan.select_options_affecting_result():
                raise BadParameter(
                    f"{path} was written with different options. Use the same options, or start training from scratch"
                    " in a new folder."
                )
            self._network.load_state_dict(content["network"])
            self._averaged_network.load_state_dict(content["average"])
            self._optimizer.load_state_dict(content["optimiser"])
            self._best_weights, self.state = content["best"], TrainerState(**content["state"])
            if "decoding" in content:
                self.best_decoding = type(self.best_decoding).model_validate(content["decoding"])
            # Older checkpoints, and checkpoints from training in full precision, contain no scaler state.
            if content.get("scaler") and self._scaler.is_enabled():
                self._scaler.load_state_dict(content["scaler"])
        except (OSError, KeyError, RuntimeError, pickle.UnpicklingError, TypeError, ValueError) as error:
            raise BadParameter(f"Training cannot be resumed from {path}: {error}") from error
        log.info("resumed at step %d", self.state.step)


def _ignore_progress(_: Trainer) -> None:
    """Ignore a progress report."""
