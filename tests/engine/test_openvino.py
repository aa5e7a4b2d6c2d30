import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from service.core.errors import BadParameter
from service.core.sections.computing import Engine as EngineSettings
from service.engine.openvino import OpenVinoBackend
from service.engine.tuning.plans import EngineConfig

pytestmark = pytest.mark.skipif(
    OpenVinoBackend().explain_unavailability() is not None, reason="openvino is not installed"
)


def build(module, example, streams=1):
    config = EngineConfig("openvino", "fp32", "contiguous", len(example), streams=streams)
    return OpenVinoBackend().build(module, example, config, EngineSettings())


@pytest.fixture(scope="module")
def module():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 1))
    return network.eval().requires_grad_(requires_grad=False)


@torch.inference_mode()
def test_scores_match_the_module_and_other_shapes_are_rejected(module):
    batch, other_batch = torch.rand(2, 2, 1, 8, 12, 16).unbind()
    root = logging.getLogger()
    logging_before = (root.level, list(root.filters), list(root.handlers))
    network = build(module, batch)
    assert (root.level, root.filters, root.handlers) == logging_before, "the logging of the service is unchanged"
    for x in (batch, batch.uniform_(), other_batch):
        torch.testing.assert_close(network(x), module(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(BadParameter, match="was built for batches"):
        network(batch[:1])


def test_streams_can_compute_concurrently(module):
    batches = [torch.rand(1, 1, 8, 12, 16) for _ in range(3)]
    network = build(module, batches[0], streams=3)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            for batch, scores in zip(batches, pool.map(network, batches), strict=True):
                torch.testing.assert_close(scores, module(batch), atol=1e-5, rtol=1e-5)


def test_vendor_telemetry_is_not_loaded():
    code = "from service.engine import openvino as e; import sys, openvino; print(sys.modules['openvino_telemetry'])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "None"
