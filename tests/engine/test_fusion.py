"""Layers that are replaced or fused, in networks that call them in unusual ways, give what they gave before."""

import copy

import pytest
import torch
from torch import nn

from service.engine.cpu import onednn, winograd
from service.engine.fusion import adjacent_modules
from service.engine.prepare import prepare
from service.models.network import observe_calls

FORMAT = torch.channels_last_3d


class Centred(nn.Conv3d):
    """Weights are used in another way than those of its base class."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3, 4), keepdim=True)
        return self._conv_forward(x, 3 * weight, self.bias)


class Raised(nn.ReLU):
    def forward(self, x):
        return torch.relu(x) + 1


class Elsewhere(nn.Module):
    """Calls a sequence within another one, and once more by itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(convolution())
        self.outer = nn.Sequential(self.inner, nn.LeakyReLU(0.3))

    def forward(self, x):
        return self.outer(x) + self.inner(x)


class InParts(nn.Module):
    """Calls steps of a sequence by themselves, as `way` says."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.steps = nn.Sequential(convolution(), norm(), nn.LeakyReLU(0.3), nn.Sequential(convolution(), nn.ReLU()))

    def forward(self, x):
        return self.way(self.steps, x)


def one_by_one(steps, x):
    passed = []
    for step in steps:
        x = step(x)
        passed.append(x)
    return sum(passed)


WAYS = {
    "the first alone": lambda steps, x: steps[0](x),
    "in another order": lambda steps, x: steps[1](steps[2](steps[0](x))),
    "one by one": one_by_one,
    "some of them": lambda steps, x: steps[:2](x),
    "the first besides": lambda steps, x: steps(x) + steps[0](x),
    "the last besides": lambda steps, x: steps(x) + steps[3](x),
    "a step of the last besides": lambda steps, x: steps(x) + steps[3][0](x),
}


class Shared(nn.Module):
    """A rectifier that also follows in sequences."""

    def __init__(self):
        super().__init__()
        self.rectifier = nn.ReLU()
        self.steps = nn.Sequential(convolution(), self.rectifier)

    def forward(self, x):
        return self.rectifier(self.steps(x) - 1)


def convolution():
    return nn.Conv3d(16, 16, 3, padding=1)


def norm():
    layer = nn.BatchNorm3d(16)
    nn.init.uniform_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


def hooked(module):
    module.register_forward_hook(lambda _module, _given, result: result + 1)
    return module


def around(module, *between):
    """The module itself before and behind others."""
    return nn.Sequential(module, *between[:1], module, *between[1:])


def sequence_twice():
    return around(nn.Sequential(convolution()), nn.LeakyReLU(0.3))


def layer_twice():
    layer = convolution()
    return around(layer, nn.LeakyReLU(0.3), norm(), layer)


UNUSUAL = {
    "a sequence twice": sequence_twice,
    "a sequence with a norm behind": lambda: around(nn.Sequential(convolution()), norm(), nn.ReLU()),
    "a layer twice": layer_twice,
    "a module twice": lambda: around(nn.AvgPool3d(3, 1, 1), convolution(), nn.LeakyReLU(0.3)),
    "a sequence elsewhere": Elsewhere,
    "a convolution of its own": lambda: nn.Sequential(Centred(16, 16, 3, padding=1), nn.ReLU(), convolution()),
    "a rectifier of its own": lambda: nn.Sequential(convolution(), Raised(), convolution()),
    "a hooked rectifier": lambda: nn.Sequential(convolution(), hooked(nn.ReLU()), convolution()),
    "a hooked convolution": lambda: nn.Sequential(hooked(convolution()), norm(), nn.ReLU(), convolution()),
    "a hooked norm": lambda: nn.Sequential(convolution(), hooked(norm()), nn.ReLU(), convolution()),
    "a hooked instance norm": lambda: nn.Sequential(hooked(nn.InstanceNorm3d(16)), nn.ReLU(), convolution()),
    "a hooked sequence": lambda: nn.Sequential(hooked(nn.Sequential(convolution())), norm(), nn.ReLU()),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_called_in_unusual_ways_computes_the_same(make):
    torch.manual_seed(0)
    check_ways(make().eval().requires_grad_(requires_grad=False))


@pytest.mark.parametrize("compiled", [torch.jit.script, torch.jit.freeze], ids=["scripted", "frozen"])
def test_torchscript_within_a_sequence_stays_as_it_is(compiled):
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(convolution(), norm()).eval().requires_grad_(requires_grad=False))
    check_ways(nn.Sequential(compiled(inner), nn.ReLU(), convolution()).eval())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_sequences_that_are_called_in_parts_compute_the_same(way):
    torch.manual_seed(0)
    network = InParts(way).eval().requires_grad_(requires_grad=False)
    with observe_calls(network):
        network(torch.zeros(1, 16, 5, 6, 7))
    check_ways(network)


@torch.inference_mode()
def check_ways(network):
    x = torch.randn(2, 16, 5, 6, 7)
    expected = network(x)
    prepared = prepare(network, x.device, x.dtype, FORMAT)
    ways = {
        "prepared": prepared,
        "packed": onednn.pack(copy.deepcopy(network)),
        "winograd": winograd.replace_convolutions(network),
        "all": onednn.pack(winograd.replace_convolutions(prepared)),
    }
    for name, way in ways.items():
        assert (way(x) - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_sequences_within_sequences_are_as_if_they_were_one():
    first, second, third = convolution(), nn.ReLU(), convolution()
    network = nn.Sequential(nn.Sequential(first, nn.Dropout()), nn.Identity(), nn.Sequential(second, third))
    found = [(one.module, other.module) for one, other in adjacent_modules(network)]
    assert found == [(first, second), (second, third), (second, third)]


@pytest.mark.parametrize(
    ("make", "pairs"),
    [
        (lambda: InParts(lambda steps, x: steps(x)), 4),
        (lambda: InParts(lambda steps, x: steps(steps(x))), 4),
        (lambda: InParts(lambda steps, x: steps[3](x)), 1),
        (Shared, 1),
        (layer_twice, 4),
        (sequence_twice, 2),
    ],
    ids=["whole", "twice", "its last", "shared", "a layer twice", "a sequence twice"],
)
def test_sequences_that_are_called_whole_stay_sequences(make, pairs):
    network = make()
    with observe_calls(network):
        network(torch.zeros(1, 16, 5, 6, 7))
    assert len({(one.owner, one.name) for one, _ in adjacent_modules(network)}) == pairs
