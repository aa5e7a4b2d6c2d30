import torch
from torch import Tensor
from torch.nn import functional

from service.inference.windows.views import BEST, AveragedViews


def pointwise(x: Tensor) -> Tensor:
    return torch.cat([2 * x, x - 1], 1)


def lopsided(x: Tensor) -> Tensor:
    """Add to every voxel what lies before it along x."""
    return x + functional.pad(x, (1, 0))[..., :-1]


def windows(seed: int = 0, edge: int = 8) -> Tensor:
    return torch.randn((2, 1, edge, edge + 2, edge), generator=torch.Generator().manual_seed(seed))


def test_mirrored_views_change_nothing_for_a_network_that_looks_at_single_voxels_and_cost_three_forwards() -> None:
    x, seen = windows(), list[Tensor]()
    assert torch.allclose(AveragedViews(lambda x: seen.append(x) or pointwise(x), BEST)(x), pointwise(x), atol=1e-6)
    assert len(seen) == 3


def test_the_mean_of_a_view_and_its_mirror_image_has_no_side() -> None:
    both = AveragedViews(lopsided, ((), (4,)))
    x = windows()
    assert torch.allclose(both(x.flip(4)).flip(4), both(x), atol=1e-6)
    assert not torch.allclose(lopsided(x.flip(4)).flip(4), lopsided(x))


def test_a_network_may_reuse_the_memory_of_its_scores_and_sees_one_layout() -> None:
    memory, layouts = torch.empty(2, 1, 8, 10, 8), set[tuple[int, ...]]()

    def network(x: Tensor) -> Tensor:
        layouts.add(x.stride())
        return memory.copy_(x)

    x = windows().to(memory_format=torch.channels_last_3d)
    first = AveragedViews(network, BEST)(x)
    kept = first.clone()
    AveragedViews(network, BEST)(windows(1))
    assert torch.allclose(kept, x, atol=1e-6)
    assert torch.equal(first, kept)
    assert x.stride() in layouts
