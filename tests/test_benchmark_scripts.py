"""The benchmark scripts that compare configurations, engines, and StackSeg with a plain script."""

import itertools
from contextlib import nullcontext

import engines
import labels
import numpy as np
import plain
import pytest
import tifffile
import torch

from service.cli.benchmark import timing
from service.cli.benchmark.engine_comparison import DevicePeak, TimedNetwork, TimedNetworkBuilder
from service.core.errors import NonFiniteScores
from service.core.types import Segmentation, Selection


def make_segmenter(*planes):
    """Return a segmenter that returns these label planes for every stack."""
    pixels = np.array(planes, np.uint16)
    return lambda _volume: Segmentation(pixels, "labels")


@pytest.fixture
def stack(tmp_path):
    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((1, 1, 10), np.uint16), metadata={"axes": "ZYX"})
    return tmp_path / "stack.tif"


REFERENCE = make_segmenter([[1, 1, 1, 1, 1, 0, 2, 2, 2, 2]])


@pytest.mark.parametrize(
    ("other", "difference", "same"),
    [
        (REFERENCE, 0.0, True),
        (make_segmenter([[5, 5, 5, 5, 5, 0, 3, 3, 3, 3]]), 0.0, False),
        (make_segmenter([[1, 1, 1, 1, 0, 0, 2, 2, 2, 2]]), 0.1, False),
    ],
)
def test_tolerance_is_compared_with_the_fraction_of_voxels_that_differ(stack, other, difference, same):
    row = labels.compare(stack, Selection(), [REFERENCE, other])
    assert (row.difference, row.same) == (pytest.approx(difference), same)
    assert row.is_within(0.0) is (difference == 0)
    assert row.is_within(0.1 + 1e-9)
    assert row.is_within(0.05) is (difference == 0)
    cells = [cell.strip() for cell in row.format(0.0).strip("|").split("|")]
    assert len(cells) == len(labels.COLUMNS)
    assert dict(zip(labels.COLUMNS, cells, strict=True))["within tolerance"] == ("no" if difference else "yes")


@pytest.mark.parametrize("error", [NonFiniteScores("scores are NaN"), RuntimeError("CUDA error\nmore")])
def test_row_of_a_failed_stack_has_the_error_and_is_never_within_the_tolerance(stack, error):
    def fail(_volume):
        raise error

    row = labels.compare(stack, Selection(), [REFERENCE, fail])
    assert not row.is_within(1.0)
    assert f"| {str(error).splitlines()[0]} |" in row.format(1.0)


@pytest.fixture
def _two_segmenters(monkeypatch):
    """Replace the two segmenters with ones whose labels differ in a tenth of the voxels."""
    segmenters = itertools.cycle([REFERENCE, make_segmenter([[1, 1, 1, 1, 0, 0, 2, 2, 2, 2]])])
    monkeypatch.setattr(labels, "open_segmenter", lambda *_: nullcontext(next(segmenters)))


@pytest.mark.usefixtures("_two_segmenters")
@pytest.mark.parametrize(("tolerance", "status"), [([], 1), (["--tolerance", "0.05"], 1), (["--tolerance", "0.11"], 0)])
def test_exit_status_is_1_if_labels_exceed_the_tolerance(stack, capsys, tolerance, status):
    assert labels.main([str(stack), *tolerance]) == status
    assert "| within tolerance |" in capsys.readouterr().out


@pytest.mark.usefixtures("_two_segmenters")
def test_exit_status_is_1_if_a_stack_fails_but_later_stacks_are_compared(stack, capsys):
    assert labels.main([str(stack.with_name("absent.tif")), str(stack), "--tolerance", "1"]) == 1
    failed, compared = capsys.readouterr().out.splitlines()[2:]
    assert "No such file" in failed
    assert "| 1.00e-01 | yes |" in compared


def test_engines_that_cannot_be_built_are_listed_first_with_the_error(monkeypatch):
    def fail():
        raise RuntimeError("too large\nmore")

    monkeypatch.setattr(timing, "MATRIX_EDGE", 256)
    working = TimedNetwork("working", 1, "fp32", lambda: None)
    builders = [TimedNetworkBuilder("working", 1, lambda: working), TimedNetworkBuilder("broken", 2, fail)]
    peak = DevicePeak(torch.device("cpu"), 1.0, {"fp32": 1.0})
    rows = engines.compare_twice([working._replace(name="first")], builders, peak)
    assert [(row.name, row.problem) for row in rows] == [("broken", "too large"), ("first", None), ("working", None)]


def test_plain_script_uses_torchs_default_for_tf32_on_gpus_that_support_it(monkeypatch):
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda supported=supported: supported)
        assert plain.allows_tf32(torch.device("cuda")) is (supported and torch.backends.cudnn.allow_tf32)
    assert plain.allows_tf32(torch.device("cpu")) is False
