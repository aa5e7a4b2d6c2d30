"""Code for devices with their own memory gives the same results as on a CPU, and never mixes devices."""

import numpy as np
import pytest
import torch
from fakes import SeparateMemoryDriver
from segmenters import make_settings, start_runner
from simulated_device import DEVICE, SimulatedDevice

from service.core.hardware import devices
from service.core.types import Options, Volume
from service.engine import backends
from service.engine.prepare import prepare
from service.inference.decoding.instances import InstanceDecoder
from service.inference.runner import engine_builder
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.windows.batching.window_request import FiniteFlag
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow

CPU = torch.device("cpu")


def test_simulated_device_refuses_mixed_devices_and_counts_waits():
    with SimulatedDevice() as device:
        values = torch.arange(4, device=DEVICE)
        values[1:] += torch.tensor(1)
        assert not device.waits
        assert values.cpu().tolist() == [0, 2, 3, 4]
        assert int(values.sum()) == 9
        assert device.waits == ["_to_copy", "_local_scalar_dense"]
        with pytest.raises(RuntimeError, match="different devices"):
            values + torch.ones(4)


@pytest.mark.parametrize("slab", [3, 16])
def test_objects_are_the_same_on_another_device_and_slabs_do_not_add_waits(random_nuclei, slab):
    size = (8, 16, 16)
    scores = torch.randn(1, 2, *size)
    scores[0, 0] += 1

    def decode(all_scores):
        decoder, row = InstanceDecoder(random_nuclei, random_nuclei.decoding, size, None), 0
        for part in torch.split(all_scores, slab, 3):
            decoder.add(0, row, part)
            row += part.shape[3]
        return decoder.finish()

    expected = decode(scores)
    with SimulatedDevice() as device:
        found = decode(scores.to(DEVICE))
    assert expected.count > 5
    assert np.array_equal(found.pixels, expected.pixels)
    assert np.array_equal(found.objects.confidence, expected.objects.confidence)
    # The number of pointer jumps depends on the scores.
    assert len([name for name in device.waits if name != "equal"]) == 10


def test_windows_do_not_wait_for_the_device():
    image, roi = torch.rand(1, 1, 6, 20, 22), (4, 8, 8)
    options = {"blending": Blending(), "accepts_partial_batches": True}

    def score(image, device):
        window = SlidingWindow(lambda x: torch.cat([x, 2 * x], 1), 1, roi, 3, device=device, **options)
        scan = window.scan(image, 0.5, FiniteFlag(device).record)
        slabs = []
        while scan.num_remaining:
            window_slice = scan.take(3)
            (scores,) = window.forward([window_slice])
            slabs += scan.blend(window_slice.positions, scores)
        return slabs

    with torch.inference_mode():
        expected = score(image, CPU)
        with SimulatedDevice() as device:
            found = score(image.to(DEVICE), DEVICE)
            assert not device.waits
            for slab, expected_slab in zip(found, expected, strict=True):
                torch.testing.assert_close(slab.scores.cpu(), expected_slab.scores, atol=1e-6, rtol=1e-5)


def test_labels_are_the_same_on_another_device(random_nuclei, monkeypatch):
    volume = Volume.from_array(np.random.default_rng(0).integers(0, 1000, (1, 12, 30, 34), np.uint16))
    expected = segment(start_runner(random_nuclei, make_settings()), volume, Options())
    monkeypatch.setitem(backends.BACKENDS["eager"].memory_formats, DEVICE.type, ("contiguous",))
    monkeypatch.setattr(devices, "choose_device", lambda _name: DEVICE)
    # The parameters stay on the CPU.
    monkeypatch.setattr(engine_builder, "prepare", lambda network, _device, *rest: prepare(network, CPU, *rest))
    with SimulatedDevice() as device:
        found = segment(ModelRunner(random_nuclei, make_settings(), SeparateMemoryDriver()), volume, Options())
    assert device.num_operations
    assert found.segmentation.count == expected.segmentation.count > 0
    assert np.mean(found.segmentation.pixels != expected.segmentation.pixels) < 1e-3
