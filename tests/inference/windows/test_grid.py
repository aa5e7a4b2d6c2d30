import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.inference.windows.grid import MAX_SKIPPED_SLAB_BYTES, Grid, as_size, scale_positions, split_runs
from service.models.spec_parts import Tiling

edges = st.integers(1, 13)
rois = st.tuples(*[st.integers(1, 7)] * 3)
sizes = st.tuples(edges, edges, edges)
overlaps = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75])


@settings(max_examples=40, deadline=None)
@given(sizes, rois, overlaps)
def test_windows_cover_every_voxel_and_stay_inside(size, roi, overlap):
    grid = Grid.cover(size, roi, overlap)
    seen = torch.zeros(grid.padded_size, dtype=torch.int)
    for position in grid.positions():
        assert all(0 <= start <= edge - r for start, edge, r in zip(position, grid.padded_size, roi, strict=True))
        seen[tuple(slice(start, start + edge) for start, edge in zip(position, roi, strict=True))] += 1
    assert seen.min() >= 1
    assert grid.num_windows == len(list(grid.positions())) == len(set(grid.positions()))


def test_slabs_of_consecutive_skipped_rows_are_limited_in_size():
    roi, batch_size = (32, 64, 64), 2
    rows = Grid.cover((32, 4096, 512), roi, 0.25).compute_max_skipped_rows(3, batch_size)
    assert rows > 1
    assert rows * batch_size * 3 * 32 * 64 * 512 * 4 <= MAX_SKIPPED_SLAB_BYTES
    assert Grid.cover((32, 512, 30_000), roi, 0.25).compute_max_skipped_rows(3, batch_size) == 1


@settings(max_examples=40, deadline=None)
@given(sizes, rois, overlaps, st.integers(1, 30))
def test_runs_cover_all_windows_in_order_with_equal_steps(size, roi, overlap, batch_size):
    positions = list(Grid.cover(size, roi, overlap).positions())
    for first in range(0, len(positions), batch_size):
        batch = positions[first : first + batch_size]
        runs = [
            [(z, y, x + number * run.step) for number in range(run.num_windows)]
            for run in split_runs(batch)
            for z, y, x in [run.start]
        ]
        assert [position for run in runs for position in run] == batch


def test_row_splits_into_one_run_and_the_shifted_last_window():
    positions = list(Grid.cover((64, 64, 512), (64, 64, 64), 0.25).positions())
    runs = [tuple(run) for run in split_runs(positions)]
    assert runs == [((0, 0, 0), 10, 48), ((0, 0, 448), 1, 1)]


alignments = st.tuples(*[st.sampled_from([1, 2, 4])] * 3)


@given(sizes=st.tuples(*[st.integers(1, 40)] * 3), factors=alignments, alignment=alignments, overlap=overlaps)
def test_aligned_windows_cover_the_volume_and_are_evenly_spaced(sizes, factors, alignment, overlap):
    window_size = as_size([n * factor for n, factor in zip(alignment, factors, strict=True)])
    grid = Grid.cover(sizes, window_size, overlap, Tiling("stardist", alignment))
    for axis, starts in enumerate(grid.starts):
        length, multiple = window_size[axis], alignment[axis]
        assert grid.aligned_size[axis] == -(-sizes[axis] // multiple) * multiple
        assert (starts[0], starts[-1]) == (0, grid.padded_size[axis] - length)
        assert not any(start % multiple for start in (*starts, grid.pad_before[axis]))
        steps = [end - start for start, end in itertools.pairwise(starts)]
        assert max(steps, default=0) - min(steps, default=0) <= multiple
        assert all(step <= max(length * (1 - overlap), multiple) for step in steps)


@given(size=st.tuples(*[st.integers(1, 40)] * 3), step=alignments, overlap=overlaps)
def test_grid_of_scores_has_one_voxel_per_step(size, step, overlap):
    window_size = as_size([8 * n for n in step])
    grid = Grid.cover(size, window_size, overlap, Tiling("stardist", step, step))
    scores = grid.divide(step)
    assert scores.window_size == (8, 8, 8)
    assert scores.size == tuple(-(-length // n) for length, n in zip(size, step, strict=True))
    assert scale_positions(list(grid.positions()), step) == list(scores.positions())


@given(size=st.tuples(*[st.integers(1, 20)] * 3), window=st.tuples(*[st.integers(1, 9)] * 3), overlap=overlaps)
def test_windows_contain_every_voxel_of_the_volume(size, window, overlap):
    grid, found = Grid.cover(size, window, overlap, Tiling("stardist")), np.zeros(size, int)
    for position in grid.positions():
        box, targets = grid.locate(position)
        found[box] += 1
        assert [s.stop - s.start for s in box] == [s.stop - s.start for s in targets]
        assert all(0 <= s.start < s.stop <= length for s, length in zip(targets, window, strict=True))
    assert (found > 0).all()


@given(length=st.integers(1, 200), window_length=st.integers(1, 64), overlap=st.floats(0, 0.9))
def test_nnunet_windows_cover_the_volume_and_overlap_equally(length, window_length, overlap):
    grid = Grid.cover((length, 1, 1), (window_length, 1, 1), overlap, Tiling("nnunet"))
    starts = grid.starts[0]
    steps = [after - before for before, after in itertools.pairwise(starts)]
    assert starts[0] == 0
    assert starts[-1] + window_length == grid.padded_size[0]
    assert not steps or max(steps) - min(steps) <= 1
    assert all(1 <= step <= max(window_length * (1 - overlap), 1) + 1 for step in steps)


def test_nnunet_windows_have_the_positions_of_its_documentation():
    """The example is from a comment in `compute_steps_for_sliding_window`."""
    assert Grid.cover((110, 64, 64), (64, 64, 64), 0.5, Tiling("nnunet")).starts[0] == (0, 23, 46)
