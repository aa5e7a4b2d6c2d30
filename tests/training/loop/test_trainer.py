import copy
import csv
import io
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from monai.networks.nets.dynunet import DynUNet
from new_models import make_new_spec
from safetensors.torch import load_file
from torch import nn

from scripts.recipes.sources import PercentileNormalization
from scripts.recipes.synthetic_nuclei import synthesize
from service.core.errors import BadParameter
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.training.examples import Pair
from service.training.loop.plan import CURVE_COLUMNS, TrainingPlan, ValidationScores
from service.training.loop.trainer import (
    CHECKPOINT_FILE,
    CURVE_FILE,
    TIME_TOLERANCE,
    Trainer,
    TrainingData,
    TrainingPlacement,
)
from service.training.loop.validation import Validator
from service.training.model_folder import save_weights
from service.training.stacks.blocks import BlockDataset
from service.training.stacks.parts import StackPart, split_part
from service.training.targets.choice import BOUNDARY_DECODING, choose_targets
from service.training.targets.instances import instance_loss

CPU = torch.device("cpu")
SPEC = make_new_spec()
PLAN = TrainingPlan(steps=6, batch_size=1, edge=16, every=2, pool=2, statistics=2, learning_rate=3e-3)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return synthesize(np.random.default_rng(0), (16, 32, 48))


def make_trainer(pair: Pair, folder: Path, network=None, dtype=torch.float32, spec=SPEC, **options) -> Trainer:
    """Create a trainer with the options of `PLAN`, overridden by `options`."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    plan = TrainingPlan(**{**PLAN.model_dump(), **options})
    part = StackPart("stack", PercentileNormalization()(pair[0]), pair[1], pair[1])
    training_part, validation_part = split_part(part, 0.25)
    dataset = BlockDataset([training_part], plan.edge, plan.seed, choose_targets(spec).compute)
    data = TrainingData(dataset, Validator([validation_part], spec, plan.edge))
    return Trainer(network or ShuffleUNet(1, 2, (4, 8)), data, plan, folder, TrainingPlacement(CPU, dtype))


def is_equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(first_value, second_value) for first_value, second_value in pairs)


def read_curve(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / CURVE_FILE).read_text())))


def test_resumed_training_gives_the_same_result_as_uninterrupted_training(pair, tmp_path, monkeypatch) -> None:
    uninterrupted = make_trainer(pair, tmp_path / "uninterrupted")
    expected = uninterrupted.run()
    interrupted = make_trainer(pair, tmp_path / "interrupted")
    original_loss, calls = interrupted._loss, []

    def interrupt(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original_loss(scores, targets)

    monkeypatch.setattr(interrupted, "_loss", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    resumed = make_trainer(pair, tmp_path / "interrupted")
    resumed.resume()
    assert 0 < resumed.state.step < PLAN.steps
    assert is_equal(resumed.run(), expected)
    assert read_curve(tmp_path / "interrupted") == read_curve(tmp_path / "uninterrupted")
    assert [row["step"] for row in read_curve(tmp_path / "uninterrupted")] == ["0", "2", "4", "6"]
    assert tuple(read_curve(tmp_path / "uninterrupted")[0]) == CURVE_COLUMNS


def test_training_on_boundaries_is_resumed_with_the_chosen_decoding(pair, tmp_path) -> None:
    spec = make_new_spec(outputs=["boundary"], decoding=BOUNDARY_DECODING.model_dump(), input={"diameter": None})
    options = {"network": ShuffleUNet(1, 1, (4, 8)), "spec": spec}
    trainer = make_trainer(pair, tmp_path, **options)
    trainer.run()
    resumed = make_trainer(pair, tmp_path, **options)
    resumed.resume()
    assert resumed.best_scores.voi == trainer.best_scores.voi < trainer.state.get_scores(0).voi
    assert resumed.best_decoding.kind == "boundaries"


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, targets: instance_loss(scores, targets) * (math.nan if scores.requires_grad else 1),
        # A finite loss with a non-finite gradient.
        lambda scores, _targets: (scores * 0).abs().sqrt().sum(),
    ],
    ids=["losses", "gradients"],
)
def test_non_finite_steps_are_skipped_and_counted(pair, tmp_path, monkeypatch, loss) -> None:
    trainer = make_trainer(pair, tmp_path, steps=2)
    initial_weights = copy.deepcopy(trainer._network.state_dict())
    monkeypatch.setattr(trainer, "_loss", loss)
    trainer.run()
    assert trainer.state.skipped == trainer.state.step == 2
    weights = trainer._network.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in initial_weights.items() if "weight" in name)


def test_scaler_backs_off_and_its_state_is_resumed(pair, tmp_path, monkeypatch) -> None:
    trainer = make_trainer(pair, tmp_path, dtype=torch.float16)
    monkeypatch.setattr(trainer, "_loss", lambda scores, _targets: scores.sum() * math.nan)
    initial_scale = trainer._scaler.get_scale()
    for _ in range(2):
        trainer.step(*trainer.get_example_batch())
    assert trainer.state.skipped == 2
    assert trainer._scaler.get_scale() == initial_scale / 4
    monkeypatch.setattr(trainer, "_loss", lambda scores, _targets: (scores * 0).abs().sqrt().sum())
    trainer.step(*trainer.get_example_batch())
    assert (trainer.state.skipped, trainer._scaler.get_scale()) == (3, initial_scale / 8)
    trainer.save()
    resumed = make_trainer(pair, tmp_path, dtype=torch.float16)
    resumed.resume()
    assert resumed._scaler.state_dict() == trainer._scaler.state_dict()
    assert resumed._scaler.get_scale() == initial_scale / 8


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"channels_last": False}, {"workers": 1}])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_execution_options_do_not_change_the_curve(pair, tmp_path, options: dict[str, object]) -> None:
    make_trainer(pair, tmp_path / "reference", steps=4).run()
    make_trainer(pair, tmp_path / "other", steps=4, **options).run()
    reference, other = (
        [[float(value or 0) for value in row.values()] for row in read_curve(tmp_path / name)]
        for name in ("reference", "other")
    )
    np.testing.assert_allclose(other, reference, rtol=0 if "workers" in options else 1e-3)


def test_compiled_network_has_the_same_losses(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Capture and differentiate the graph, but skip the C++ compiler, which takes most of the time.
    original_compile, compiled_networks = torch.compile, []

    def compile_quickly(network: nn.Module, **options: object) -> object:
        compiled_networks.append(network)
        return original_compile(network, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    losses, network = [], nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2))
    for is_compiled in (False, True):
        trainer, step_losses = make_trainer(pair, tmp_path, copy.deepcopy(network), compile=is_compiled), []
        for _ in range(3):
            trainer.step(*trainer.get_example_batch())
            step_losses.append(trainer._latest_loss)
        losses.append(step_losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][2] != losses[0][0]
    assert len(compiled_networks) == 1


def test_progress_bar_is_shown_only_on_a_terminal(pair, tmp_path, monkeypatch) -> None:
    for is_terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr("sys.stderr", stream)
        make_trainer(pair, tmp_path, steps=2).run()
        assert ("2/2" in stream.getvalue()) == is_terminal


def test_training_stops_when_validation_no_longer_improves(pair: Pair, tmp_path: Path) -> None:
    trainer = make_trainer(pair, tmp_path, steps=40, every=1, patience=2, learning_rate=1e-30, weight_decay=0.0)
    trainer._averaged_network.requires_grad_(requires_grad=False)
    for norm in (module for module in trainer._network.modules() if isinstance(module, torch.nn.BatchNorm3d)):
        norm.momentum = 0.0
    trainer.run()
    assert trainer.state.step < 5


def test_training_with_enough_time_gives_the_same_result_as_without_a_time_limit(pair: Pair, tmp_path: Path) -> None:
    expected = make_trainer(pair, tmp_path / "unlimited").run()
    trainer, times = make_trainer(pair, tmp_path / "limited", minutes=1), itertools.count(0, 0.05)
    trainer.clock = lambda: next(times)
    assert is_equal(trainer.run(), expected)


@pytest.mark.parametrize(
    ("durations", "step_count"),
    [([0.5] * 12, 12), ([2.0] * 6, 6), ([3.0] * 2 + [0.25] * 10, 12), ([0.5] * 6 + [3.0] * 3, 9)],
    ids=["idle", "busy", "busy at first", "busy later"],
)
def test_learning_rate_decays_before_the_steps_or_the_time_are_used_up(
    pair: Pair, tmp_path: Path, durations: list[float], step_count: int
) -> None:
    trainer = make_trainer(pair, tmp_path, steps=12, minutes=0.2)
    remaining_durations, rates, seconds = iter(durations), [], [100.0]

    def finish_step(_: Trainer) -> None:
        if trainer.state.step > len(rates):
            rates.append(trainer._optimizer.param_groups[0]["lr"])
            seconds.append(seconds[-1] + next(remaining_durations))

    trainer.clock, trainer.on_progress = lambda: seconds[-1], finish_step
    trainer.run()
    fractions = [
        max(step / 12, time_fraction if (time_fraction := (time - 100) / 12) >= step / 12 + TIME_TOLERANCE else 0)
        for step, time in enumerate(seconds)
    ]
    assert len(rates) == trainer.state.step == step_count
    assert rates == pytest.approx([trainer.plan.get_learning_rate(fraction) for fraction in fractions[:-1]])
    assert rates[-1] < 0.25 * max(rates)
    assert trainer.state.curve[-1][0] == step_count
    assert trainer.state.seconds == pytest.approx(sum(durations))


@pytest.mark.parametrize(
    ("during", "final", "expected"),
    [
        ((0.1, 0.7, 0.6), (0.6, 0.3, 0.7), (3, 0.5)),
        ((0.1, 0.9, 0.6), (0.6, 0.3, 0.7), (1, 0.5)),
        ((0.7, 0.3, 0.2), (0.2, 0.3, 0.2), (0, 0.5)),
        ((0.1, 0.3, 0.1), (0.1, 0.3, 0.7), (3, 1.0)),
        ((0.1, 0.3, 0.1), (0.1, 0.7, 0.3), (3, 0.75)),
    ],
    ids=["latest", "clearly better earlier", "initial", "complete change", "larger change"],
)
def test_latest_weights_closest_to_the_initial_ones_are_used_unless_others_are_clearly_better(
    pair: Pair, tmp_path: Path, during: tuple[float, ...], final: tuple[float, ...], expected: tuple[int, float]
) -> None:
    trainer = make_trainer(pair, tmp_path, steps=3, every=1, fractions=(0.5, 0.75), averaging=0.0)
    name = next(iter(trainer._averaged_network.state_dict()))
    snapshots = []

    def validate(_network: object) -> tuple[ValidationScores, object]:
        snapshots.append(trainer._averaged_network.state_dict()[name].clone())
        f1 = next(rows)
        return ValidationScores(1.0, None, f1, f1, f1, f1), SPEC.decoding

    # Validations before and after the first steps, and those of the latest weights at the end.
    rows = iter([*during, final[0], *final])
    trainer._validator = SimpleNamespace(object_count=20, validate=validate)
    weights = trainer.run().state_dict()[name]
    step, fraction = expected
    assert not any(torch.equal(first, second) for first, second in itertools.pairwise(snapshots[:4]))
    assert torch.allclose(weights, snapshots[0].lerp(snapshots[step], fraction), rtol=1e-6)
    assert next(rows, None) is None


def test_network_with_shared_layers_can_be_trained_and_saved(pair: Pair, tmp_path: Path) -> None:
    network = DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 6, 8])
    initial_network = copy.deepcopy(network)
    trained_network = make_trainer(pair, tmp_path, network, steps=2, checkpointing=True).run()
    save_weights(trained_network, tmp_path)
    assert not is_equal(initial_network, trained_network)
    initial_network.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert is_equal(initial_network, trained_network)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_short_training_improves_the_validation_loss(pair: Pair, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # The lowest level has two planes, for which oneDNN's BF16 gradients are wrong.
    network = ShuffleUNet(1, 2, (4, 16, 16))
    trainer = make_trainer(pair, tmp_path, network, dtype, steps=40, every=20, batch_size=2, learning_rate=0.01)
    assert all(value.isfinite().all() for value in trainer.run().state_dict().values())
    assert trainer.state.skipped == 0
    assert trainer.state.best
    summary = trainer.state.summarize()
    assert summary.startswith("40 steps, F1 on the validation parts ")
    assert "skipped" not in summary
    assert "nan" not in summary + (tmp_path / CURVE_FILE).read_text()
    rows = read_curve(tmp_path)
    assert float(rows[-1]["validation"]) < float(rows[0]["validation"])
    assert rows[0]["loss"] == ""


def test_old_checkpoints_are_loaded_and_incompatible_checkpoints_are_rejected(pair: Pair, tmp_path: Path) -> None:
    trainer = make_trainer(pair, tmp_path)
    trainer.save()
    content = torch.load(tmp_path / CHECKPOINT_FILE, weights_only=True)
    del content["scaler"], content["plan"]["clip"], content["plan"]["checkpointing"]
    torch.save(content, tmp_path / CHECKPOINT_FILE)
    make_trainer(pair, tmp_path).resume()
    with pytest.raises(BadParameter, match="different options"):
        make_trainer(pair, tmp_path, seed=7).resume()
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"nothing")
    with pytest.raises(BadParameter, match="cannot be resumed from"):
        make_trainer(pair, tmp_path).resume()
