"""Scripts in `benchmarks/` that compare StackSeg with something else."""

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
from service.cli.benchmark.networks import DevicePeak, Runner, RunnerBuilder
from service.core.errors import NonFiniteScores
from service.core.types import Segmentation, Selection


def segment_as(*planes):
    """Return a way that finds these labels in every stack."""
    pixels = np.array(planes, np.uint16)
    return lambda _volume: Segmentation(pixels, "labels")


@pytest.fixture
def stack(tmp_path):
    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((1, 1, 10), np.uint16), metadata={"axes": "ZYX"})
    return tmp_path / "stack.tif"


ONE = segment_as([[1, 1, 1, 1, 1, 0, 2, 2, 2, 2]])


@pytest.mark.parametrize(
    ("other", "difference", "same"),
    [
        (ONE, 0.0, True),
        (segment_as([[5, 5, 5, 5, 5, 0, 3, 3, 3, 3]]), 0.0, False),
        (segment_as([[1, 1, 1, 1, 0, 0, 2, 2, 2, 2]]), 0.1, False),
    ],
)
def test_labels_are_within_the_tolerance_up_to_that_share(stack, other, difference, same):
    row = labels.compare(stack, Selection(), [ONE, other])
    assert (row.difference, row.same) == (pytest.approx(difference), same)
    assert row.is_within(0.0) is (difference == 0)
    assert row.is_within(0.1 + 1e-9)
    assert row.is_within(0.05) is (difference == 0)
    cells = [cell.strip() for cell in row.format(0.0).strip("|").split("|")]
    assert len(cells) == len(labels.COLUMNS)
    assert dict(zip(labels.COLUMNS, cells, strict=True))["within tolerance"] == ("no" if difference else "yes")


@pytest.mark.parametrize("error", [NonFiniteScores("scores are NaN"), RuntimeError("CUDA error\nmore")])
def test_a_stack_that_fails_has_a_row_with_the_reason_and_is_never_within_the_tolerance(stack, error):
    def fail(_volume):
        raise error

    row = labels.compare(stack, Selection(), [ONE, fail])
    assert not row.is_within(1.0)
    assert f"| {str(error).splitlines()[0]} |" in row.format(1.0)


@pytest.fixture
def _two_ways(monkeypatch):
    """Two ways whose labels differ in a tenth of the voxels."""
    ways = itertools.cycle([ONE, segment_as([[1, 1, 1, 1, 0, 0, 2, 2, 2, 2]])])
    monkeypatch.setattr(labels, "open_way", lambda *_: nullcontext(next(ways)))


@pytest.mark.usefixtures("_two_ways")
@pytest.mark.parametrize(("tolerance", "status"), [([], 1), (["--tolerance", "0.05"], 1), (["--tolerance", "0.11"], 0)])
def test_the_status_is_one_if_a_row_exceeds_the_tolerance(stack, capsys, tolerance, status):
    assert labels.main([str(stack), *tolerance]) == status
    assert "| within tolerance |" in capsys.readouterr().out


@pytest.mark.usefixtures("_two_ways")
def test_the_status_is_one_if_a_stack_fails_and_the_next_one_is_compared(stack, capsys):
    assert labels.main([str(stack.with_name("absent.tif")), str(stack), "--tolerance", "1"]) == 1
    failed, compared = capsys.readouterr().out.splitlines()[2:]
    assert "No such file" in failed
    assert "| 1.00e-01 | yes |" in compared


def test_engines_that_cannot_be_made_have_rows_with_the_reason_before_all_others(monkeypatch):
    def fail():
        raise RuntimeError("too large\nmore")

    monkeypatch.setattr(timing, "MATRIX_EDGE", 256)
    sound = Runner("sound", 1, "fp32", lambda: None)
    builders = [RunnerBuilder("sound", 1, lambda: sound), RunnerBuilder("broken", 2, fail)]
    peak = DevicePeak(torch.device("cpu"), 1.0, {"fp32": 1.0})
    rows = engines.compare_twice([sound._replace(name="first")], builders, peak)
    assert [(row.name, row.problem) for row in rows] == [("broken", "too large"), ("first", None), ("sound", None)]


def test_the_plain_script_allows_tf32_on_gpus_that_have_it_by_torchs_defaults(monkeypatch):
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda supported=supported: supported)
        assert plain.allows_tf32(torch.device("cuda")) is (supported and torch.backends.cudnn.allow_tf32)
    assert plain.allows_tf32(torch.device("cpu")) is False
