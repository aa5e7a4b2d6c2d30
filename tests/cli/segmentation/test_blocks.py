"""Warnings and errors of block-wise segmentation on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.__main__ import main
from service.cli.segmentation.blocks import read_result_metadata
from service.core.types import Options, PostprocessingOptions
from tests.block_runs import create_run, segment_blocks, segment_whole
from tests.segmenters import make_settings
from tests.zarr_files import write_zarr

NOISE = np.random.default_rng(0).integers(0, 255, (8, 48, 48), np.uint8)
CONFIDENCE = {"intercept": -9, "certainty": 0, "peak": 0, "size": 0, "giants": 0, "threshold": 0.5, "sheets": "other"}


@pytest.mark.parametrize(
    ("pixels", "options", "message"),
    [
        (
            np.full((8, 16, 16), 7, np.uint8),
            Options(postprocessing=PostprocessingOptions(min_confidence=1.0)),
            "has the same gray value",
        ),
        (NOISE, Options(postprocessing=PostprocessingOptions(min_confidence=1.0)), "may exclude all objects"),
        (NOISE, Options(), "The labels may be wrong"),
    ],
)
def test_warnings_are_the_same_as_for_the_volume_in_one_piece(
    tmp_path: Path, write_model, random_nuclei_content, pixels: np.ndarray, options: Options, message: str
) -> None:
    model_input = random_nuclei_content["input"] | {"diameter": 8, "estimate_diameter": True}
    spec = write_model(random_nuclei_content | {"input": model_input, "confidence": CONFIDENCE})
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(8, 16, 16))
    folder = create_run(tmp_path / "run", source, spec, options, make_settings())
    segment_blocks(folder, tmp_path / "out.zarr")
    whole_result = segment_whole(source, spec, options, make_settings())
    assert whole_result.quality_warning is not None
    assert message in whole_result.quality_warning.detail
    assert read_result_metadata(folder, spec).warnings == whole_result.warnings


def test_unusable_cluster_is_reported_before_a_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_zarr(tmp_path / "in.zarr", NOISE, chunks=(8, 16, 16))
    assert main(["segment", str(source), str(tmp_path / "out.zarr"), "--workers", "1", "--ray", "127.0.0.1:1"]) == 2
    assert "luster" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.zarr"]
