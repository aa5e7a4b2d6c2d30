import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.inference.windows.grid import SKIPPED_BYTES, Grid

edges = st.integers(1, 13)
rois = st.tuples(*[st.integers(1, 7)] * 3)
sizes = st.tuples(edges, edges, edges)
overlaps = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75])


@settings(max_examples=40, deadline=None)
@given(sizes, rois, overlaps)
def test_windows_cover_every_voxel_and_stay_inside(size, roi, overlap):
    grid = Grid.cover(size, roi, overlap)
    seen = torch.zeros(grid.padded, dtype=torch.int)
    for place in grid.positions():
        assert all(0 <= start <= edge - r for start, edge, r in zip(place, grid.padded, roi, strict=True))
        seen[tuple(slice(start, start + edge) for start, edge in zip(place, roi, strict=True))] += 1
    assert seen.min() >= 1
    assert grid.count == len(list(grid.positions())) == len(set(grid.positions()))


def test_slabs_of_skipped_rows_leave_in_portions():
    roi, batch_size = (32, 64, 64), 2
    rows = Grid.cover((32, 4096, 512), roi, 0.25).max_skipped_rows(3, batch_size)
    assert rows > 1
    assert rows * batch_size * 3 * 32 * 64 * 512 * 4 <= SKIPPED_BYTES
    assert Grid.cover((32, 512, 30_000), roi, 0.25).max_skipped_rows(3, batch_size) == 1
