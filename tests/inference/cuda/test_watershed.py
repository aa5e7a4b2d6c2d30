from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from landscapes import SyncCounter, aten, make_hills
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from service.inference.cuda.watershed import merge_basins_on_device
from service.inference.decoding.basin_merging import Persistence, merge_shallow_basins
from service.inference.decoding.streaming import Planes, TorchWatershed
from service.inference.decoding.watershed import MAX_BLOCK_VOXELS, Basins, Passes


class CountMasks(TorchDispatchMode):
    """Counts masks used as indices. A device converts masks to positions, and the host waits for their number."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = 0

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.overloadpacket in {aten.index, aten.index_put, aten.index_put_}:
            self.masks += sum(index is not None and index.dtype == torch.bool for index in arguments[1])
        return function(*arguments, **(keywords or {}))


def make_basins(peaks: Tensor, first: Tensor, second: Tensor, height: Tensor) -> Basins:
    """Return basins without voxels. Each pass is at most as high as the lower of its two peaks."""
    none = torch.zeros(len(peaks), dtype=torch.int64)
    lower = torch.minimum(peaks[first], peaks[second])
    passes = Passes(first, second, torch.minimum(height, lower))
    return Basins(none, torch.zeros(0, 0, 0, dtype=torch.int32), peaks, none, none, passes)


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 30),
    passes=st.integers(0, 90),
    levels=st.sampled_from([0, 1, 2, 5]),
    persistence=st.sampled_from([0.0, 0.1, 0.4, 2.0]),
    logits=st.booleans(),
)
def test_objects_equal_those_of_merging_pass_by_pass(seed, count, passes, levels, persistence, logits) -> None:
    """With few levels, many heights are equal. Some pairs have several passes, and some passes join one basin."""
    rng = np.random.default_rng(seed)
    peaks, heights = (rng.random(number).astype(np.float32) for number in (count, passes if count else 0))
    if levels:
        peaks, heights = np.round(peaks * levels) / levels, np.round(heights * levels) / levels
    sides = torch.from_numpy(rng.integers(0, max(count, 1), (2, len(heights))))
    basins = make_basins(torch.from_numpy(peaks), *sides, torch.from_numpy(heights))
    chosen = Persistence(persistence, heights_are_logits=logits)
    assert np.array_equal(merge_basins_on_device(basins, chosen), merge_shallow_basins(basins, chosen))


@pytest.mark.parametrize("rising", [True, False])
def test_long_chain_of_basins_takes_few_rounds(rising: bool) -> None:
    count = 1000
    peaks = torch.linspace(1, 2, count) if rising else 1 + torch.rand(count, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(count)
    basins = make_basins(peaks, numbers[:-1], numbers[1:], torch.full((count - 1,), 9.0))
    with SyncCounter() as counted:
        merged = merge_basins_on_device(basins, Persistence(5.0, heights_are_logits=False))
    assert set(merged) == {0}
    assert counted.sync_count < 60


def test_merging_without_ties_uses_no_masks_as_indices() -> None:
    random = torch.Generator().manual_seed(0)
    peaks, height = (torch.rand(number, generator=random) for number in (50, 30))
    basins = make_basins(peaks, *torch.randint(50, (2, 30), generator=random), height)
    with CountMasks() as counted:
        merged = merge_basins_on_device(basins, Persistence(0.4, heights_are_logits=False))
    assert 0 < merged.max() < 49
    assert counted.masks == 0


def start_watershed(size: tuple[int, int, int], block_voxels: int = MAX_BLOCK_VOXELS) -> TorchWatershed:
    persistence, planes = Persistence(0.1, heights_are_logits=False), Planes(size, torch.device("cpu"))
    return TorchWatershed(planes, 0.0, persistence, block_voxels=block_voxels, merge=merge_basins_on_device)


def count_waits(*block: int) -> int:
    """Return how many times the host waits while it labels 64 x 8 x 8 voxels in blocks of this size."""
    heights = torch.from_numpy(make_hills(3, (64, 8, 8))).nan_to_num_(neginf=-9)
    watershed = start_watershed((64, 8, 8), *block)
    watershed.add(heights, heights)
    with SyncCounter() as counted:
        watershed.label_objects(0, drop_border=False)
    return counted.sync_count


def test_volume_is_one_block_if_it_fits_with_the_margins_of_its_planes() -> None:
    one_block = count_waits(2**30)
    assert count_waits() == one_block
    assert count_waits(64 * 10 * 10) == one_block
    assert count_waits(64 * 10 * 10 - 1) > one_block


@pytest.mark.parametrize("parts", [1, 4, 12])
def test_adding_planes_does_not_wait_for_the_device(parts: int) -> None:
    heights = torch.from_numpy(make_hills(3, (12, 16, 16))).nan_to_num_(neginf=-9)
    watershed = start_watershed((12, 16, 16))
    with SyncCounter() as added:
        for part in heights.chunk(parts):
            watershed.add(part, part > 0 if parts == 4 else part)
    with SyncCounter() as counted:
        labels, objects = watershed.label_objects(0, drop_border=False)
    assert added.sync_count == 0
    assert counted.sync_count < 30, "independent of the number of parts"
    assert labels.max() > 1
    assert parts != 4 or (objects.confidence > 0.999).all(), "a mask has full confidence"
