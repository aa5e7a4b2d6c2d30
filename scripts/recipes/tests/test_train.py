from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.recipes.sources import UNKNOWN_LABEL, PercentileNormalization
from scripts.recipes.synthetic_nuclei import synthesize
from scripts.recipes.train import (
    CHECKPOINT,
    RECIPES,
    HostPool,
    Schedule,
    TrainingRun,
    exclude_unknown,
    include_unknown,
    load_matching_weights,
    main,
    train,
    widen_weights,
)
from service.core.types import Segmentation
from service.formats.tiff import writer as tiff_writer
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.training.examples import ExampleDataset, draw_batch
from service.training.model_folder import save_weights
from service.training.targets.instances import compute_instance_targets, instance_loss


def small_pool(size: int) -> HostPool:
    return HostPool(ExampleDataset(lambda rng: synthesize(rng, (16, 24, 24)), PercentileNormalization(), 0), size)


def network() -> ShuffleUNet:
    torch.manual_seed(0)
    return ShuffleUNet(1, 2, widths=(8, 12))


def test_learning_rate_rises_and_then_falls() -> None:
    schedule = Schedule(learning_rate=1e-2)
    rates = [schedule.learning_rate_at(progress) for progress in (0, 0.02, 0.05, 0.5, 0.9, 1)]
    assert rates[2] == max(rates) == 1e-2
    assert rates[:3] == sorted(rates[:3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] > 0


def test_training_on_one_batch_reduces_the_loss() -> None:
    pool = small_pool(1)
    images, targets = draw_batch(pool, np.random.default_rng(0), 2, 16)
    pool.close()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for _ in range(16):
        optimizer.zero_grad()
        value = instance_loss(model(images), targets)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < 0.8 * values[0]


def test_training_saves_the_averaged_network(tmp_path: Path) -> None:
    pool = small_pool(2)
    start = network()
    before = {name: value.clone() for name, value in start.state_dict().items()}
    trained = train(
        TrainingRun(start, Schedule(minutes=0.01, batch_size=1, edge=16, statistics_batches=2), tmp_path), pool, 0
    )
    pool.close()
    assert not trained.training
    stored = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in trained.state_dict().items())
    assert not torch.equal(stored["head.weight"], before["head.weight"])
    assert {file.name for file in tmp_path.iterdir()} == {"weights.safetensors", CHECKPOINT}


def test_resumed_training_gives_the_same_weights_as_uninterrupted_training(tmp_path: Path) -> None:
    schedule, loss = Schedule(batch_size=1, edge=16), instance_loss
    pool = small_pool(1)
    batches = [draw_batch(pool, np.random.default_rng(seed), 1, 16) for seed in range(4)]
    pool.close()
    whole, parts = TrainingRun(network(), schedule, tmp_path / "whole"), tmp_path / "parts"
    parts.mkdir()
    for number, batch in enumerate(batches):
        whole.train_step(*batch, loss)
        run = TrainingRun(network(), schedule, parts)
        assert run.step == number
        run.train_step(*batch, loss)
        run.save()
    assert whole.step == run.step == 4
    assert all(torch.equal(run.average.state_dict()[name], value) for name, value in whole.average.state_dict().items())


def test_completed_training_is_not_run_again(tmp_path: Path) -> None:
    command = ["--kind", "membranes", "--minutes", "0.001", "--pool", "1", "--batch-size", "1", "--edge", "16"]
    command += ["--keep-statistics", "--out", str(tmp_path)]
    main(command)
    before = (tmp_path / "weights.safetensors").stat().st_mtime_ns
    main(command)
    assert (tmp_path / "weights.safetensors").stat().st_mtime_ns == before


def test_loss_in_bf16_is_close_to_float32(tmp_path: Path) -> None:
    pool = small_pool(1)
    batch = draw_batch(pool, np.random.default_rng(0), 2, 16)
    pool.close()
    runs = [TrainingRun(network(), Schedule(bf16=bf16), tmp_path) for bf16 in (False, True)]
    for run in runs:
        run.train_step(*batch, instance_loss)
    assert float(runs[1].loss) == pytest.approx(float(runs[0].loss), rel=0.05)
    assert float(runs[1].loss) != float(runs[0].loss)


def test_training_can_keep_the_initial_statistics(tmp_path: Path) -> None:
    pool = small_pool(2)
    start = network()
    for norm in (module for module in start.modules() if isinstance(module, torch.nn.BatchNorm3d)):
        norm.running_mean.fill_(0.25)
    before = start.head.weight.detach().clone()
    trained = train(
        TrainingRun(start, Schedule(minutes=0.01, batch_size=1, edge=16, statistics_batches=0), tmp_path), pool, 0
    )
    pool.close()
    stored = load_file(tmp_path / "weights.safetensors")
    means = [value for name, value in stored.items() if name.endswith("running_mean")]
    assert means
    assert all((mean == 0.25).all() for mean in means)
    assert not torch.equal(trained.head.weight, before)


def test_command_trains_from_initial_weights_and_recorded_stacks(tmp_path: Path) -> None:
    image, labels = synthesize(np.random.default_rng(0), (16, 24, 24))
    stack, truth = tmp_path / "stack.tif", tmp_path / "truth.tif"
    tiff_writer.write(Segmentation(image, "labels"), stack)
    tiff_writer.write(Segmentation(labels, "labels"), truth)
    common = ["--kind", "membranes", "--minutes", "0.001", "--pool", "1", "--batch-size", "1", "--edge", "16"]
    common += ["--keep-statistics"]
    main([*common, "--out", str(tmp_path / "first")])
    first = tmp_path / "first" / "weights.safetensors"
    recorded = ["--images", str(stack), "--labels", str(truth), "--share", "1"]
    main([*common, *recorded, "--out", str(tmp_path / "second"), "--init", str(first)])
    before, after = load_file(first), load_file(tmp_path / "second" / "weights.safetensors")
    ShuffleUNet(1, 2, RECIPES["membranes"].widths).load_state_dict(after)
    assert all(torch.equal(after[name], before[name]) for name in before if "running" in name)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_head_with_other_outputs_is_not_loaded(tmp_path: Path) -> None:
    first = network()
    second = ShuffleUNet(1, 3, widths=(8, 12))
    head = second.head.weight.detach().clone()
    load_matching_weights(second, first.state_dict())
    assert torch.equal(second.stem[0].weight, first.stem[0].weight)
    assert torch.equal(second.head.weight, head)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_matching_weights(ShuffleUNet(1, 2, widths=(8, 16)), first.state_dict())


def test_command_trains_a_model_of_classes(tmp_path: Path) -> None:
    common = ["--kind", "tissue", "--minutes", "0.001", "--pool", "1", "--batch-size", "1"]
    init = tmp_path / "weights.safetensors"
    save_weights(ShuffleUNet(1, 2, RECIPES["tissue"].widths), tmp_path)
    main([*common, "--keep-statistics", "--init", str(init), "--out", str(tmp_path / "tissue")])
    ShuffleUNet(1, 3, RECIPES["tissue"].widths).load_state_dict(load_file(tmp_path / "tissue" / "weights.safetensors"))


def test_widened_network_computes_the_same_output_and_trains_its_new_features() -> None:
    narrow, wide = network().eval(), ShuffleUNet(1, 2, widths=(12, 20)).eval()
    wide.load_state_dict(widen_weights(wide, narrow.state_dict()))
    images = torch.rand(1, 1, 16, 16, 16)
    scores = wide(images)
    assert torch.allclose(scores, narrow(images), atol=1e-5)
    scores.square().sum().backward()
    assert wide.merge[0][0].weight.grad[:8, 8:].any()


def test_unknown_voxels_do_not_change_the_loss() -> None:
    labels = np.zeros((8, 8, 8), np.uint16)
    labels[2:5, 2:5, 2:5], labels[6:] = 1, UNKNOWN_LABEL
    targets = torch.from_numpy(include_unknown(compute_instance_targets)(labels))[None]
    scores = torch.zeros((1, 2, 8, 8, 8))
    loss = exclude_unknown(instance_loss)
    before = loss(scores, targets)
    scores[:, :, 6:] = 5
    assert torch.equal(loss(scores, targets), before)
    scores[:, :, :1] = 5
    assert loss(scores, targets) > before
