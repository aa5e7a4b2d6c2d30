"""Comparison of the networks with those of StarDist, whose maps `scripts/fixtures/stardist.py` has stored."""

from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.architectures.build import build_network
from service.models.architectures.stardist import ResNetSettings, UNetSettings, list_pools, make_convolution
from service.models.importers.programs import stardist
from service.models.spec import Architecture

FIXTURES = ROOT / "tests" / "data" / "stardist"


def load(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a network with its weights, and the multiple of its window size."""
    draft = stardist.read(FIXTURES / name)
    network = build_network(Architecture(**draft.content["architecture"])).eval()
    network.load_state_dict(draft.tensors)
    return network, draft.content["input"]["roi_multiple"]


@pytest.mark.parametrize("name", ["unet", "resnet", "unet_norm", "resnet_norm"])
def test_maps_equal_those_of_stardist(name):
    network, multiple = load(name)
    maps = np.load(FIXTURES / f"{name}.npz")
    image = np.moveaxis(maps["image"], -1, 0) if maps["image"].ndim == 4 else maps["image"][None]
    padding = [(0, -length % step) for length, step in zip(image.shape[1:], multiple, strict=True)]
    window = torch.from_numpy(np.pad(image, [(0, 0), *padding], mode="reflect"))[None]
    # In double precision, only the rounding errors of the stored maps count, which do not depend on this processor.
    with torch.inference_mode():
        scores = network.double()(window.double())[0]
    probability = scores[0].sigmoid().numpy()
    distances = np.moveaxis(np.maximum(scores[1:].numpy(), 1e-3), 0, -1)
    valid = tuple(slice(length) for length in maps["prob"].shape)
    assert maps["dist"].std() > 0.1
    assert np.abs(probability[valid] - maps["prob"]).max() < 1e-5
    # The stored distances are rounded to 2 ** -12.
    assert np.abs(distances[valid] - maps["dist"]).max() < 2e-4


SMALL: dict[str, Any] = {"n_rays": 4, "n_filter_base": 1, "net_conv": 0, "grid": (1, 1, 2), "activation": "tanh"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("StarDistUNet", UNetSettings(**SMALL, n_depth=1, n_conv_per_depth=1, pool=(1, 2, 2), last_activation="tanh")),
        ("StarDistResNet", ResNetSettings(**SMALL, n_blocks=2, n_conv_per_block=2)),
    ],
)
def test_receptive_radius_bounds_the_influence_of_a_voxel(name, settings):
    torch.manual_seed(0)
    network = build_network(Architecture(name=name, arguments=settings.model_dump())).double()
    radii = settings.compute_receptive_radii()
    size = [(radius // 4 + 1) * 8 for radius in radii]
    image = torch.rand(1, 1, *size, dtype=torch.float64, requires_grad=True)
    scores: Tensor = network(image)
    center = [length // 2 for length in scores.shape[2:]]
    scores[(0, slice(None), *center)].sum().backward()
    affecting = image.grad[0, 0].abs().nonzero()
    origin = torch.tensor([index * step for index, step in zip(center, settings.grid, strict=True)])
    found = (affecting - origin).abs().max(0).values
    assert (found <= torch.tensor(radii)).all()
    assert (found >= torch.tensor(radii) // 2).all()


@pytest.mark.parametrize(("kernel", "stride"), [((3, 3, 3), (1, 1, 1)), ((3, 4, 2), (2, 1, 2)), ((1, 1, 1), (2, 2, 2))])
def test_convolution_returns_one_value_per_stride(kernel, stride):
    output = make_convolution(1, 2, kernel, stride)(torch.zeros(1, 1, 8, 8, 8))
    assert output.shape[2:] == tuple(8 // step for step in stride)


def test_grid_must_be_reachable_by_pooling():
    assert list(list_pools((1, 2, 4))) == [(1, 2, 2), (1, 1, 2)]
    for grid in ((1, 3, 3), (6, 1, 1)):
        with pytest.raises(ValueError, match="powers of two"):
            list(list_pools(grid))


@pytest.mark.parametrize(
    "arguments",
    [{"n_depth": 10**9}, {"n_conv_per_depth": 10**9}, {"grid": (1, 3, 3)}, {"activation": "exec"}, {"unknown": 1}],
)
def test_absurd_settings_are_rejected(arguments):
    with pytest.raises(BrokenModel, match="StarDistUNet does not accept"):
        build_network(Architecture(name="StarDistUNet", arguments={"n_rays": 8} | arguments))
