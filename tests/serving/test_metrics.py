from __future__ import annotations

import pytest

from service.core.telemetry import Stages
from service.serving.metrics import Metrics


def test_stages_accumulate_in_order_including_failed_stages() -> None:
    stages = Stages()
    with pytest.raises(ValueError, match="broken"), stages.measure("read"):
        raise ValueError("broken")
    stages.update({"windows": 2.0, "decode": 0.5})
    stages.add("windows", 1.0)
    assert list(stages.seconds) == ["read", "windows", "decode"]
    assert stages.seconds["windows"] == 3.0
    assert 0 < stages.seconds["read"] <= stages.total_seconds


def test_exposition_contains_all_counters() -> None:
    metrics = Metrics()
    waiting = 3
    metrics.register_gauge("stackseg_waiting", lambda: waiting)
    metrics.count_request("/segment", 200, caller="ada")
    metrics.count_request("/segment", 422, caller="ada", problem="bad-file")
    metrics.memory_fallbacks("nuclei").inc(2)
    metrics.count_segmentation("nuclei", 1000, 12, {"windows": 0.7})
    metrics.count_segmentation("tissue", 10, None, {"windows": 0.7})
    lines = metrics.format_exposition().decode().splitlines()
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


def test_windows_are_counted_with_the_slots_of_their_batches() -> None:
    metrics = Metrics()
    # Two requests share a batch of four with an empty slot. Then one request has a batch of its own.
    metrics.count_batch("nuclei", "cpu", 1, 4 / 3, 0.25)
    metrics.count_batch("nuclei", "cpu", 2, 8 / 3, 0.5)
    metrics.count_batch("nuclei", "cpu", 4, 4, 0.5)
    lines = metrics.format_exposition().decode().splitlines()
    assert 'stackseg_windows_total{model="nuclei"} 7.0' in lines
    assert 'stackseg_batch_slots_total{model="nuclei"} 8.0' in lines
    assert 'stackseg_device_seconds_total{device="cpu"} 1.25' in lines


def test_labeled_gauge_is_evaluated_at_every_exposition() -> None:
    metrics, values = Metrics(), {"0": 5.0}
    metrics.register_labeled_gauge("stackseg_gpu_memory_used_bytes", lambda: values)
    assert 'stackseg_gpu_memory_used_bytes{gpu="0"} 5.0' in metrics.format_exposition().decode()
    values["1"] = 7.0
    assert 'stackseg_gpu_memory_used_bytes{gpu="1"} 7.0' in metrics.format_exposition().decode()
