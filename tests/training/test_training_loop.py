import copy
import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.networks.nets.dynunet import DynUNet
from safetensors.torch import load_file
from torch import nn

from scripts.recipes.sources import Percentiles
from scripts.recipes.synthetic_nuclei import synthesise
from service.core.errors import BadParameter
from service.models.architectures import ShuffleUNet
from service.training import training_loop as trainer_module
from service.training.examples import Pair, split_pairs
from service.training.instance_targets import instance_loss
from service.training.model_folder import save_weights
from service.training.training_loop import CHECKPOINT, COLUMNS, CURVE, Placement, Plan, State, Trainer, TrainingData

CPU = torch.device("cpu")
PLAN = Plan(steps=6, batch_size=1, edge=16, every=2, pool=2, statistics=2, learning_rate=3e-3)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return synthesise(np.random.default_rng(0), (16, 32, 48))


def trainer(pair: Pair, folder: Path, network=None, dtype=torch.float32, **options) -> Trainer:
    """A trainer as by `PLAN`, but for some options."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    data, plan = TrainingData(*split_pairs([pair], 0.25), Percentiles()), Plan(**{**PLAN.model_dump(), **options})
    return Trainer(network or ShuffleUNet(1, 2, (4, 8)), data, plan, folder, Placement(CPU, dtype))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def curve(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / CURVE).read_text())))


def test_an_interrupted_training_ends_as_an_uninterrupted_one(pair, tmp_path, monkeypatch) -> None:
    whole = trainer(pair, tmp_path / "whole")
    expected = whole.run()
    broken = trainer(pair, tmp_path / "broken")
    real, calls = trainer_module.instance_loss, []

    def interrupting(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(scores, targets)

    monkeypatch.setattr(trainer_module, "instance_loss", interrupting)
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    monkeypatch.setattr(trainer_module, "instance_loss", real)
    resumed = trainer(pair, tmp_path / "broken")
    resumed.resume()
    assert 0 < resumed.state.step < PLAN.steps
    assert same(resumed.run(), expected)
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")
    assert [row["step"] for row in curve(tmp_path / "whole")] == ["0", "2", "4", "6"]
    assert tuple(curve(tmp_path / "whole")[0]) == COLUMNS


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, targets: instance_loss(scores, targets) * (math.nan if scores.requires_grad else 1),
        # Finite itself, with a derivative that is not.
        lambda scores, _targets: (scores * 0).abs().sqrt().sum(),
    ],
    ids=["losses", "gradients"],
)
def test_steps_that_are_not_finite_are_skipped_and_counted(pair, tmp_path, monkeypatch, loss) -> None:
    made = trainer(pair, tmp_path, steps=2)
    before = copy.deepcopy(made._network.state_dict())
    monkeypatch.setattr(trainer_module, "instance_loss", loss)
    made.run()
    assert made.state.skipped == made.state.step == 2
    after = made._network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if "weight" in name)


def test_the_scaler_backs_off_and_goes_on_where_it_stood(pair, tmp_path, monkeypatch) -> None:
    made = trainer(pair, tmp_path, dtype=torch.float16)
    monkeypatch.setattr(trainer_module, "instance_loss", lambda scores, _targets: scores.sum() * math.nan)
    began = made._scaler.get_scale()
    for _ in range(2):
        made.step(*made.example())
    assert made.state.skipped == 2
    assert made._scaler.get_scale() == began / 4
    monkeypatch.setattr(trainer_module, "instance_loss", lambda scores, _targets: (scores * 0).abs().sqrt().sum())
    made.step(*made.example())
    assert (made.state.skipped, made._scaler.get_scale()) == (3, began / 8)
    made.save()
    resumed = trainer(pair, tmp_path, dtype=torch.float16)
    resumed.resume()
    assert resumed._scaler.state_dict() == made._scaler.state_dict()
    assert resumed._scaler.get_scale() == began / 8


@pytest.mark.parametrize("changed", [{"checkpointing": True}, {"channels_last": False}, {"workers": 1}])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_how_the_network_is_computed_does_not_change_the_curve(pair, tmp_path, changed: dict[str, object]) -> None:
    trainer(pair, tmp_path / "usual", steps=4).run()
    trainer(pair, tmp_path / "other", steps=4, **changed).run()
    usual, other = (
        [[float(value or 0) for value in row.values()] for row in curve(tmp_path / name)] for name in ("usual", "other")
    )
    np.testing.assert_allclose(other, usual, rtol=0 if "workers" in changed else 1e-3)


def test_a_compiled_network_takes_the_same_steps(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Captured and differentiated as always, but without the compiler of C++ that takes most of the time.
    compiling, compiled_ones = torch.compile, []

    def compile_quickly(network: nn.Module, **options: object) -> object:
        compiled_ones.append(network)
        return compiling(network, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    losses, network = [], nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2))
    for compiled in (False, True):
        made, taken = trainer(pair, tmp_path, copy.deepcopy(network), compile=compiled), []
        for _ in range(3):
            made.step(*made.example())
            taken.append(made._recent)
        losses.append(taken)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][2] != losses[0][0]
    assert len(compiled_ones) == 1


def test_progress_is_shown_on_a_terminal_and_nowhere_else(pair, tmp_path, monkeypatch) -> None:
    for shown in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda shown=shown: shown
        monkeypatch.setattr("sys.stderr", stream)
        trainer(pair, tmp_path, steps=2).run()
        assert ("2/2" in stream.getvalue()) == shown


def test_training_stops_when_validation_no_longer_improves(pair: Pair, tmp_path: Path) -> None:
    made = trainer(pair, tmp_path, steps=40, every=1, patience=2, learning_rate=1e-30, weight_decay=0.0)
    made._average.requires_grad_(requires_grad=False)
    for norm in (module for module in made._network.modules() if isinstance(module, torch.nn.BatchNorm3d)):
        norm.momentum = 0.0
    made.run()
    assert made.state.step < 5


def test_a_network_with_shared_layers_trains_and_is_saved(pair: Pair, tmp_path: Path) -> None:
    network = DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 6, 8])
    before = copy.deepcopy(network)
    trained = trainer(pair, tmp_path, network, steps=2, checkpointing=True).run()
    save_weights(trained, tmp_path)
    assert not same(before, trained)
    before.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert same(before, trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_small_training_gets_better_and_says_so(pair: Pair, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # The lowest level has two planes, of which oneDNN's gradients in BF16 are wrong.
    network = ShuffleUNet(1, 2, (4, 16, 16))
    made = trainer(pair, tmp_path, network, dtype, steps=40, every=20, batch_size=2, learning_rate=0.01)
    assert all(value.isfinite().all() for value in made.run().state_dict().values())
    assert made.state.skipped == 0
    assert made.state.describe_failure() is None
    summary = made.state.summarise()
    assert summary.startswith("40 steps, validation loss ")
    assert "skipped" not in summary
    assert "nan" not in summary + (tmp_path / CURVE).read_text()
    rows = curve(tmp_path)
    assert float(rows[-1]["validation"]) < float(rows[0]["validation"])
    assert rows[0]["loss"] == ""


def test_a_training_that_got_no_better_says_what_to_try() -> None:
    rows: list[list[float | None]] = [[0, 0.1, None, 0.5, 0, None], [25, 0.1, 0.4, 0.6, 0, 0.7]]
    state = State(step=25, best=0.5, curve=rows)
    failure = state.describe_failure() or ""
    assert "after 25 steps no better than before: validation loss 0.5000 at the start, 0.6000" in failure
    assert "--learning-rate" in failure
    assert state.summarise() == "25 steps, validation loss 0.5000 before, 0.5000 at best, Dice score - before, - there"
    skipping = State(step=25, skipped=20, curve=[[0, 0.1, None, math.nan, 0, None]])
    failure = skipping.describe_failure() or ""
    assert "engine.precision: fp32" in failure
    assert "20 steps skipped" in skipping.summarise()
    assert "nan" not in failure + skipping.summarise()
    assert "inf" not in failure + skipping.summarise().replace("finite", "")
    better = State(step=25, best=0.4, curve=[rows[0], [25, 0.1, 0.4, 0.4, 0, 0.7]])
    assert better.describe_failure() is None


def test_checkpoints_without_a_scaler_still_load_and_others_are_refused(pair: Pair, tmp_path: Path) -> None:
    made = trainer(pair, tmp_path)
    made.save()
    content = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    del content["scaler"], content["plan"]["clip"], content["plan"]["checkpointing"]
    torch.save(content, tmp_path / CHECKPOINT)
    trainer(pair, tmp_path).resume()
    with pytest.raises(BadParameter, match="other options"):
        trainer(pair, tmp_path, seed=7).resume()
    (tmp_path / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises(BadParameter, match="cannot be resumed from"):
        trainer(pair, tmp_path).resume()


def test_the_end_of_every_stack_is_kept_for_validation() -> None:
    image = np.arange(4 * 5 * 10).reshape(4, 5, 10)
    ((first, _),), ((last, labels),) = split_pairs([(image, np.ones_like(image))], 0.2)
    assert (first.shape, last.shape, labels.shape) == ((4, 5, 8), (4, 5, 2), (4, 5, 2))
    assert np.array_equal(np.concatenate([first, last], axis=2), image)
    with pytest.raises(BadParameter, match="Stack 1: the part for validation has no object"):
        split_pairs([(image, (image % 10 < 8) & (image >= 0))], 0.2)
