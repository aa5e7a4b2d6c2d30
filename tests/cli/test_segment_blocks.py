"""Messages of the command line about runs in blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from service.cli.segment_blocks import find_doubt, read_facts
from service.core.volume import Options, Steering
from tests.block_runs import begin, segment_blocks
from tests.segmenters import settings_of
from tests.zarr_files import write_zarr


def test_a_run_that_has_found_nothing_is_doubtful(tmp_path: Path, write_model, random_nuclei_content) -> None:
    spec = write_model(random_nuclei_content)
    source = write_zarr(tmp_path / "in.zarr", np.full((8, 16, 16), 7, np.uint8), chunks=(8, 16, 16))
    options = Options(steering=Steering(min_confidence=1.0))
    folder = begin(tmp_path / "run", source, spec, options, settings_of())
    assert not segment_blocks(folder, tmp_path / "out.zarr").any()
    assert "may have dropped them" in (find_doubt(folder, read_facts(folder, spec), spec) or "")
