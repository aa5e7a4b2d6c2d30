from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from service.inference.windows.views import MIRRORED, TWO_SCALES, AveragedViews, View, choose_views


def pointwise(x: Tensor) -> Tensor:
    return torch.cat([2 * x, x - 1], 1)


def lopsided(x: Tensor) -> Tensor:
    """Add to every voxel what lies before it along x."""
    return x + functional.pad(x, (1, 0))[..., :-1]


def windows(seed: int = 0, edge: int = 8) -> Tensor:
    return torch.randn((2, 1, edge, edge + 2, edge), generator=torch.Generator().manual_seed(seed))


def test_mirrored_views_change_nothing_for_a_network_that_looks_at_single_voxels() -> None:
    x = windows()
    assert torch.allclose(AveragedViews(pointwise, MIRRORED)(x), pointwise(x), atol=1e-6)


def test_the_mean_of_a_view_and_its_mirror_image_has_no_side() -> None:
    both = AveragedViews(lopsided, (View(()), View((4,))))
    x = windows()
    assert torch.allclose(both(x.flip(4)).flip(4), both(x), atol=1e-6)
    assert not torch.allclose(lopsided(x.flip(4)).flip(4), lopsided(x))


def test_a_smaller_view_shows_the_same_at_another_scale() -> None:
    smooth = torch.linspace(0, 1, 32).expand(1, 1, 32, 32, 32)
    scores = AveragedViews(pointwise, TWO_SCALES)(smooth)
    assert scores.shape == (1, 2, 32, 32, 32)
    assert torch.allclose(scores, pointwise(smooth), atol=0.05)


@pytest.mark.parametrize("edge", [1, 2, 3])
def test_windows_may_be_thin(edge: int) -> None:
    assert AveragedViews(pointwise, TWO_SCALES)(torch.ones(1, 1, edge, 16, 16)).shape == (1, 2, edge, 16, 16)


def test_a_network_may_reuse_the_memory_of_its_scores_and_sees_one_layout() -> None:
    memory, layouts = torch.empty(2, 1, 8, 10, 8), set[tuple[int, ...]]()

    def network(x: Tensor) -> Tensor:
        layouts.add(x.stride())
        return memory.copy_(x)

    x = windows().to(memory_format=torch.channels_last_3d)
    first = AveragedViews(network, MIRRORED)(x)
    kept = first.clone()
    AveragedViews(network, MIRRORED)(windows(1))
    assert torch.allclose(kept, x, atol=1e-6)
    assert torch.equal(first, kept)
    assert x.stride() in layouts


@pytest.mark.parametrize("scaled", [True, False])
def test_a_window_costs_at_most_three_forwards(scaled: bool) -> None:
    views = choose_views(scaled=scaled)
    assert len(views) == 3
    assert any(view.size < 1 for view in views) is scaled
