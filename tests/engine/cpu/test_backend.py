from dataclasses import replace

import pytest
import torch
from torch import nn

from service.core.sections.computing import Engine
from service.engine.backends import BACKENDS, build
from service.engine.cpu.winograd import pack_weights
from service.engine.precision import DTYPES
from service.engine.prepare import prepare
from service.engine.tuning.plans import EngineConfig
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.network import count_weight_bytes

EXAMPLE = torch.zeros(2, 1, 8, 8, 8)
CPU = torch.device("cpu")


def make_config(engine, precision="fp32", memory_format="contiguous"):
    return EngineConfig(engine, precision, memory_format, 2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@torch.inference_mode()
def test_winograd_engine_accepts_any_batch_size_and_returns_scores_in_its_precision(precision):
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, padding=1), nn.PReLU()),
        *(nn.Conv3d(16, 32, 2, stride=2), nn.ReLU(), nn.Conv3d(32, 2, 1)),
    )
    module = prepare(network, CPU, DTYPES[precision], torch.channels_last_3d)
    example = torch.rand(2, 8, 8, 8, 8).to(DTYPES[precision], memory_format=torch.channels_last_3d)
    built_network = build(
        module, example, make_config("winograd", precision, memory_format="channels_last_3d"), Engine()
    )
    assert built_network.accepts_partial_batches
    scores, expected = built_network.network(example), module.float()(example.float())
    assert scores.dtype == DTYPES[precision]
    assert (scores.float() - expected).abs().max() <= {"bf16": 0.02, "fp32": 1e-5}[precision] * expected.abs().max()


def test_weights_packed_for_large_tiles_are_counted():
    convolution = nn.Conv3d(8, 16, 3, padding=1)
    module = prepare(convolution, CPU, torch.float32, torch.channels_last_3d)
    example = torch.zeros(1, 8, 32, 32, 32).contiguous(memory_format=torch.channels_last_3d)
    exact, fast = (
        build(module, example, make_config("winograd"), Engine(matmul_precision=precision))
        for precision in ("highest", "high")
    )
    assert fast.nbytes - exact.nbytes == pack_weights(convolution.weight, (8, 8, 4)).values.nbytes


def test_buffers_of_every_stream_are_counted():
    network = ShuffleUNet(1, 2, (16, 32))
    module = prepare(network, CPU, torch.float32, torch.channels_last_3d)
    weight_bytes = count_weight_bytes(BACKENDS["winograd"].transform(module, Engine()))
    settings = Engine(matmul_precision="highest")
    one_stream, four_streams = (
        build(module, EXAMPLE, replace(make_config("winograd"), streams=streams), settings) for streams in (1, 4)
    )
    # At least the input and the output of a convolution at full resolution.
    stream_bytes = (four_streams.nbytes - one_stream.nbytes) / 3
    assert stream_bytes >= 2 * 16 * EXAMPLE[:, :, ::2, ::2, ::2].nbytes
    # Packed weights and biases are padded to whole vectors.
    assert one_stream.nbytes - stream_bytes == pytest.approx(weight_bytes, rel=1e-3)
    with torch.inference_mode():
        assert one_stream.score_bytes == four_streams.score_bytes == one_stream.network(EXAMPLE)[0].nbytes
    assert build(module, EXAMPLE, make_config("eager"), Engine()).score_bytes is None
