from __future__ import annotations

import pytest

from service.core.telemetry import Stages
from service.serving.metrics import Metrics


def test_stages_add_up_in_the_order_in_which_they_happened_failed_ones_too() -> None:
    stages = Stages()
    with pytest.raises(ValueError, match="broken"), stages.measure("read"):
        raise ValueError("broken")
    stages.update({"windows": 2.0, "decode": 0.5})
    stages.add("windows", 1.0)
    assert list(stages.seconds) == ["read", "windows", "decode"]
    assert stages.seconds["windows"] == 3.0
    assert 0 < stages.seconds["read"] <= stages.total


def test_exposition_tells_what_was_counted() -> None:
    metrics = Metrics()
    waiting = 3
    metrics.watch("stackseg_waiting", lambda: waiting)
    metrics.count_request("/segment", 200, caller="ada")
    metrics.count_request("/segment", 422, caller="ada", problem="bad-file")
    metrics.fallbacks("nuclei").inc(2)
    metrics.count_segmentation("nuclei", 1000, 12, {"windows": 0.7})
    metrics.count_segmentation("tissue", 10, None, {"windows": 0.7})
    lines = metrics.exposition().decode().splitlines()
    assert 'stackseg_requests_total{route="/segment",status="200"} 1.0' in lines
    assert 'stackseg_voxels_total{model="nuclei"} 1000.0' in lines
    assert 'stackseg_objects_total{model="nuclei"} 12.0' in lines
    assert not any(line.startswith('stackseg_objects_total{model="tissue"}') for line in lines)
    assert 'stackseg_stage_seconds_bucket{le="0.5",stage="windows"} 0.0' in lines
    assert 'stackseg_stage_seconds_bucket{le="1.0",stage="windows"} 2.0' in lines
    assert "stackseg_waiting 3.0" in lines
    assert 'stackseg_caller_requests_total{caller="ada"} 2.0' in lines
    assert 'stackseg_errors_total{type="bad-file"} 1.0' in lines
    assert 'stackseg_memory_fallbacks_total{model="nuclei"} 2.0' in lines


def test_windows_are_counted_with_the_room_that_their_batches_had() -> None:
    metrics = Metrics()
    # Two requests share a batch of four, of which one slot stays empty; then one has a batch for itself.
    metrics.count_batch("nuclei", "cpu", 1, 4 / 3, 0.25)
    metrics.count_batch("nuclei", "cpu", 2, 8 / 3, 0.5)
    metrics.count_batch("nuclei", "cpu", 4, 4, 0.5)
    lines = metrics.exposition().decode().splitlines()
    assert 'stackseg_windows_total{model="nuclei"} 7.0' in lines
    assert 'stackseg_batch_slots_total{model="nuclei"} 8.0' in lines
    assert 'stackseg_device_seconds_total{device="cpu"} 1.25' in lines


def test_each_of_a_kind_is_looked_up_when_asked_for() -> None:
    metrics, there = Metrics(), {"0": 5.0}
    metrics.watch_each("stackseg_gpu_memory_used_bytes", lambda: there)
    assert 'stackseg_gpu_memory_used_bytes{gpu="0"} 5.0' in metrics.exposition().decode()
    there["1"] = 7.0
    assert 'stackseg_gpu_memory_used_bytes{gpu="1"} 7.0' in metrics.exposition().decode()
