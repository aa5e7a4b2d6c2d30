from __future__ import annotations

from pathlib import Path

from runtimes import FAKE_FACTORIES, settings

from service.serving.build import build
from service.serving.metrics import GAUGES, LABELED_GAUGES


def test_all_gauges_are_exposed(bands_repository: Path, tmp_path: Path) -> None:
    service = build(settings(bands_repository, tmp_path), FAKE_FACTORIES)
    service.runtime.start()
    try:
        metrics = service.runtime.metrics.format_exposition().decode()
        assert all(f"# TYPE {name} gauge" in metrics for name in GAUGES | LABELED_GAUGES)
        assert 'stackseg_trainings{state="waiting"} 0.0' in metrics
        assert {"requests", "results", "annotations", "trained-models"} <= service.runtime.measure_disks().keys()
    finally:
        service.runtime.stop()
