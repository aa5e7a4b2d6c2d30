import torch
from torch import Tensor
from torch.nn import functional

from service.inference.windows.views import BEST_QUALITY_VIEWS, ViewAveragingNetwork, get_best_quality_views


def pointwise(x: Tensor) -> Tensor:
    return torch.cat([2 * x, x - 1], 1)


def asymmetric(x: Tensor) -> Tensor:
    """Add to each voxel its predecessor along x."""
    return x + functional.pad(x, (1, 0))[..., :-1]


def windows(seed: int = 0, edge: int = 8) -> Tensor:
    return torch.randn((2, 1, edge, edge + 2, edge), generator=torch.Generator().manual_seed(seed))


def test_mirrored_views_leave_a_pointwise_network_unchanged_and_take_three_forward_passes() -> None:
    x, seen = windows(), list[Tensor]()
    averaged = ViewAveragingNetwork(lambda x: seen.append(x) or pointwise(x), BEST_QUALITY_VIEWS)
    assert torch.allclose(averaged(x), pointwise(x), atol=1e-6)
    assert len(seen) == 3


def test_mean_over_mirror_images_is_symmetric() -> None:
    averaged = ViewAveragingNetwork(asymmetric, ((), (4,)))
    x = windows()
    assert torch.allclose(averaged(x.flip(4)).flip(4), averaged(x), atol=1e-6)
    assert not torch.allclose(asymmetric(x.flip(4)).flip(4), asymmetric(x))


def test_network_may_reuse_its_score_memory_and_gets_one_memory_layout() -> None:
    memory, layouts = torch.empty(2, 1, 8, 10, 8), set[tuple[int, ...]]()

    def network(x: Tensor) -> Tensor:
        layouts.add(x.stride())
        return memory.copy_(x)

    x = windows().to(memory_format=torch.channels_last_3d)
    first = ViewAveragingNetwork(network, BEST_QUALITY_VIEWS)(x)
    copy = first.clone()
    ViewAveragingNetwork(network, BEST_QUALITY_VIEWS)(windows(1))
    assert torch.allclose(copy, x, atol=1e-6)
    assert torch.equal(first, copy)
    assert x.stride() in layouts


def test_models_can_specify_the_axes_of_mirrored_views() -> None:
    assert get_best_quality_views(None) == BEST_QUALITY_VIEWS
    assert get_best_quality_views(()) == ((),)
    assert get_best_quality_views(("x", "z")) == ((), (2,), (4,), (2, 4))
    assert len(get_best_quality_views(("z", "y", "x"))) == 8
