from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from service.core.errors import BadParameter
from service.core.volume import Segmentation
from service.formats import tiff_writer
from service.models.architectures import ShuffleUNet
from service.training.examples import Percentiles, Pool, batch
from service.training.recipes.synthetic_nuclei import synthesise
from service.training.train import (
    DICE,
    KINDS,
    Schedule,
    begin_with,
    loss,
    main,
    measure_statistics,
    read_pairs,
    save,
    train,
)


def network() -> ShuffleUNet:
    torch.manual_seed(0)
    return ShuffleUNet(1, 2, widths=(8, 12))


def perfect(targets: torch.Tensor) -> torch.Tensor:
    """Scores whose sigmoid is the target."""
    return torch.logit(targets, eps=1e-6)


@pytest.fixture
def targets() -> torch.Tensor:
    foreground = torch.zeros(1, 1, 8, 8, 8)
    foreground[..., 2:6, 2:6, 2:6] = 1
    return torch.cat([foreground, foreground * 0.6], dim=1)


def test_the_loss_vanishes_for_a_perfect_prediction(targets: torch.Tensor) -> None:
    assert loss(perfect(targets), targets) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("channel", [0, 1])
def test_the_loss_rises_when_either_output_is_wrong(targets: torch.Tensor, channel: int) -> None:
    scores = perfect(targets)
    scores[:, channel] *= -1
    assert loss(scores, targets) > 0.1


def test_the_overlap_is_counted_over_the_whole_batch(targets: torch.Tensor) -> None:
    scores = torch.zeros_like(targets)
    empty = torch.cat([targets, torch.zeros_like(targets)])
    foreground, half = empty[:, :1].sum(), 0.5 * empty[:, :1].numel()
    dice = 1 - (2 * 0.5 * foreground + 1) / (half + foreground + 1)
    assert DICE(torch.cat([scores, scores])[:, :1], empty[:, :1]) == pytest.approx(dice)


def test_the_learning_rate_rises_and_then_falls() -> None:
    schedule = Schedule(learning_rate=1e-2)
    rates = [schedule.rate(progress) for progress in (0, 0.02, 0.05, 0.5, 0.9, 1)]
    assert rates[2] == max(rates) == 1e-2
    assert rates[:3] == sorted(rates[:3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] > 0


def test_a_few_steps_on_one_batch_lower_the_loss() -> None:
    pool = Pool(lambda rng: synthesise(rng, (16, 24, 24)), Percentiles(), 1, 0)
    images, targets = batch(pool, np.random.default_rng(0), 2, 16)
    pool.close()
    model = network()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for _ in range(16):
        optimiser.zero_grad()
        value = loss(model(images), targets)
        value.backward()
        optimiser.step()
        values.append(float(value.detach()))
    assert values[-1] < 0.8 * values[0]


def test_batch_statistics_are_plain_means_over_the_batches() -> None:
    pool = Pool(lambda rng: synthesise(rng, (16, 24, 24)), Percentiles(), 2, 0)
    norm = torch.nn.BatchNorm3d(1).eval()
    norm.running_mean.fill_(7)
    schedule = Schedule(batch_size=2, edge=16, statistics=5)
    measure_statistics(norm, pool, schedule, np.random.default_rng(3))
    rng = np.random.default_rng(3)
    means = [float(batch(pool, rng, 2, 16)[0].mean()) for _ in range(5)]
    pool.close()
    assert float(norm.running_mean) == pytest.approx(np.mean(means), abs=1e-5)
    assert not norm.training
    assert norm.momentum == torch.nn.BatchNorm3d(1).momentum


def test_training_saves_the_averaged_network(tmp_path: Path) -> None:
    pool = Pool(lambda rng: synthesise(rng, (16, 24, 24)), Percentiles(), 2, 0)
    start = network()
    before = {name: value.clone() for name, value in start.state_dict().items()}
    trained = train(start, pool, Schedule(minutes=0.01, batch_size=1, edge=16, statistics=2), 0, tmp_path)
    pool.close()
    assert not trained.training
    stored = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in trained.state_dict().items())
    assert not torch.equal(stored["head.weight"], before["head.weight"])
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_training_may_keep_the_statistics_it_begins_with(tmp_path: Path) -> None:
    pool = Pool(lambda rng: synthesise(rng, (16, 24, 24)), Percentiles(), 2, 0)
    start = network()
    for norm in (module for module in start.modules() if isinstance(module, torch.nn.BatchNorm3d)):
        norm.running_mean.fill_(0.25)
    before = start.head.weight.detach().clone()
    trained = train(start, pool, Schedule(minutes=0.01, batch_size=1, edge=16, statistics=0), 0, tmp_path)
    pool.close()
    stored = load_file(tmp_path / "weights.safetensors")
    means = [value for name, value in stored.items() if name.endswith("running_mean")]
    assert means
    assert all((mean == 0.25).all() for mean in means)
    assert not torch.equal(trained.head.weight, before)


def test_the_command_trains_each_kind_and_goes_on_from_its_weights(tmp_path: Path) -> None:
    image, labels = synthesise(np.random.default_rng(0), (16, 24, 24))
    stack, truth = tmp_path / "stack.tif", tmp_path / "truth.tif"
    tiff_writer.write(Segmentation(image, "labels"), stack)
    tiff_writer.write(Segmentation(labels, "labels"), truth)
    common = ["--kind", "membranes", "--minutes", "0.001", "--pool", "1", "--batch-size", "1", "--keep-statistics"]
    main([*common, "--out", str(tmp_path / "first")])
    first = tmp_path / "first" / "weights.safetensors"
    recorded = ["--images", str(stack), "--labels", str(truth), "--share", "1"]
    main([*common, *recorded, "--out", str(tmp_path / "second"), "--init", str(first)])
    before, after = load_file(first), load_file(tmp_path / "second" / "weights.safetensors")
    ShuffleUNet(1, 2, KINDS["membranes"].widths).load_state_dict(after)
    assert all(torch.equal(after[name], before[name]) for name in before if "running" in name)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_network_with_other_outputs_begins_with_the_weights_below_its_head(tmp_path: Path) -> None:
    first = network()
    second = ShuffleUNet(1, 3, widths=(8, 12))
    head = second.head.weight.detach().clone()
    begin_with(second, first.state_dict())
    assert torch.equal(second.stem[0].weight, first.stem[0].weight)
    assert torch.equal(second.head.weight, head)
    with pytest.raises(RuntimeError, match="size mismatch"):
        begin_with(ShuffleUNet(1, 2, widths=(8, 16)), first.state_dict())


def test_the_command_trains_classes(tmp_path: Path) -> None:
    common = ["--kind", "tissue", "--minutes", "0.001", "--pool", "1", "--batch-size", "1"]
    init = tmp_path / "weights.safetensors"
    save(ShuffleUNet(1, 2, KINDS["membranes"].widths), tmp_path)
    main([*common, "--keep-statistics", "--init", str(init), "--out", str(tmp_path / "tissue")])
    ShuffleUNet(1, 3, KINDS["tissue"].widths).load_state_dict(load_file(tmp_path / "tissue" / "weights.safetensors"))


def test_saved_weights_load_again(tmp_path: Path) -> None:
    model = network()
    save(model, tmp_path)
    ShuffleUNet(1, 2, widths=(8, 12)).load_state_dict(load_file(tmp_path / "weights.safetensors"))


def test_layers_that_are_listed_twice_are_stored_twice(tmp_path: Path) -> None:
    network = torch.nn.ModuleDict({"one": torch.nn.Conv3d(1, 2, 3)})
    network["other"] = network["one"]
    save(network, tmp_path)
    network.load_state_dict(load_file(tmp_path / "weights.safetensors"))


def test_pairs_must_fit(tmp_path: Path) -> None:
    paths = []
    for depth in (4, 5):
        paths.append(tmp_path / f"{depth}.tif")
        tiff_writer.write(Segmentation(np.ones((depth, 6, 7), np.uint16), "labels"), paths[-1])
    (image, labels), *_ = read_pairs(paths[:1], paths[:1])
    assert image.shape == labels.shape == (4, 6, 7)
    with pytest.raises(BadParameter, match="differ in shape"):
        read_pairs(paths[:1], paths[1:])
    with pytest.raises(BadParameter, match="2 images and 1 labels"):
        read_pairs(paths, paths[:1])
