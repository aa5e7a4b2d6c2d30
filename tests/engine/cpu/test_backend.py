from dataclasses import replace

import pytest
import torch
from torch import nn

from service.core.sections.computing import Engine
from service.engine.backends import BACKENDS, build
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


def test_buffers_of_every_stream_are_counted():
    network = ShuffleUNet(1, 2, (16, 32))
    module = prepare(network, CPU, torch.float32, torch.channels_last_3d)
    weight_bytes = count_weight_bytes(BACKENDS["winograd"].transform(module))
    one_stream, four_streams = (
        build(module, EXAMPLE, replace(make_config("winograd"), streams=streams), Engine()) for streams in (1, 4)
    )
    # At least the input and the output of a convolution at full resolution.
    stream_bytes = one_stream.nbytes - weight_bytes
    assert stream_bytes >= 2 * 16 * EXAMPLE[:, :, ::2, ::2, ::2].nbytes
    assert four_streams.nbytes - weight_bytes == 4 * stream_bytes
    with torch.inference_mode():
        assert one_stream.score_bytes == four_streams.score_bytes == one_stream.network(EXAMPLE)[0].nbytes
    assert build(module, EXAMPLE, make_config("eager"), Engine()).score_bytes is None
