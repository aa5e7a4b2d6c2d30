"""Tests that replacing and fusing layers does not change networks that call their layers in unusual ways."""

import copy

import pytest
import torch
from torch import nn

from service.engine.cpu import onednn, winograd
from service.engine.fusion import iter_adjacent_modules
from service.engine.prepare import prepare
from service.models.network import observe_calls

FORMAT = torch.channels_last_3d


class CenteredConvolution(nn.Conv3d):
    """A subclass that uses its weights differently from its base class."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3, 4), keepdim=True)
        return self._conv_forward(x, 3 * weight, self.bias)


class ShiftedReLU(nn.ReLU):
    def forward(self, x):
        return torch.relu(x) + 1


class SharedSequence(nn.Module):
    """A network that calls a sequence both within another sequence and on its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(make_convolution())
        self.outer = nn.Sequential(self.inner, nn.LeakyReLU(0.3))

    def forward(self, x):
        return self.outer(x) + self.inner(x)


class PartialCalls(nn.Module):
    """A network that calls the steps of a sequence with the function `call`."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.steps = nn.Sequential(
            make_convolution(), make_norm(), nn.LeakyReLU(0.3), nn.Sequential(make_convolution(), nn.ReLU())
        )

    def forward(self, x):
        return self.call(self.steps, x)


def sum_all_results(steps, x):
    results = []
    for step in steps:
        x = step(x)
        results.append(x)
    return sum(results)


CALLS = {
    "only the first": lambda steps, x: steps[0](x),
    "in a different order": lambda steps, x: steps[1](steps[2](steps[0](x))),
    "one by one": sum_all_results,
    "a slice": lambda steps, x: steps[:2](x),
    "the sequence and its first step": lambda steps, x: steps(x) + steps[0](x),
    "the sequence and its last step": lambda steps, x: steps(x) + steps[3](x),
    "the sequence and a nested step": lambda steps, x: steps(x) + steps[3][0](x),
}


class SharedActivation(nn.Module):
    """A network that calls a ReLU both within a sequence and on its own."""

    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU()
        self.steps = nn.Sequential(make_convolution(), self.activation)

    def forward(self, x):
        return self.activation(self.steps(x) - 1)


def make_convolution():
    return nn.Conv3d(16, 16, 3, padding=1)


def make_norm():
    layer = nn.BatchNorm3d(16)
    nn.init.uniform_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


def add_hook(module):
    module.register_forward_hook(lambda _module, _inputs, result: result + 1)
    return module


def repeat_around(module, *between):
    """Return a sequence in which `module` occurs twice, with other modules between them and at the end."""
    return nn.Sequential(module, *between[:1], module, *between[1:])


def make_repeated_sequence():
    return repeat_around(nn.Sequential(make_convolution()), nn.LeakyReLU(0.3))


def make_repeated_layer():
    layer = make_convolution()
    return repeat_around(layer, nn.LeakyReLU(0.3), make_norm(), layer)


UNUSUAL_NETWORKS = {
    "a repeated sequence": make_repeated_sequence,
    "a repeated sequence and a norm": lambda: repeat_around(nn.Sequential(make_convolution()), make_norm(), nn.ReLU()),
    "a repeated layer": make_repeated_layer,
    "a repeated module": lambda: repeat_around(nn.AvgPool3d(3, 1, 1), make_convolution(), nn.LeakyReLU(0.3)),
    "a sequence also called elsewhere": SharedSequence,
    "a convolution with its own forward": lambda: nn.Sequential(
        CenteredConvolution(16, 16, 3, padding=1), nn.ReLU(), make_convolution()
    ),
    "a ReLU with its own forward": lambda: nn.Sequential(make_convolution(), ShiftedReLU(), make_convolution()),
    "a ReLU with a hook": lambda: nn.Sequential(make_convolution(), add_hook(nn.ReLU()), make_convolution()),
    "a convolution with a hook": lambda: nn.Sequential(
        add_hook(make_convolution()), make_norm(), nn.ReLU(), make_convolution()
    ),
    "a norm with a hook": lambda: nn.Sequential(
        make_convolution(), add_hook(make_norm()), nn.ReLU(), make_convolution()
    ),
    "an instance norm with a hook": lambda: nn.Sequential(
        add_hook(nn.InstanceNorm3d(16)), nn.ReLU(), make_convolution()
    ),
    "a sequence with a hook": lambda: nn.Sequential(
        add_hook(nn.Sequential(make_convolution())), make_norm(), nn.ReLU()
    ),
}


@pytest.mark.parametrize("make", UNUSUAL_NETWORKS.values(), ids=UNUSUAL_NETWORKS)
def test_unusual_networks_give_the_same_scores(make):
    torch.manual_seed(0)
    check_optimizations(make().eval().requires_grad_(requires_grad=False))


@pytest.mark.parametrize("compiled", [torch.jit.script, torch.jit.freeze], ids=["scripted", "frozen"])
def test_torchscript_within_a_sequence_is_not_changed(compiled):
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(make_convolution(), make_norm()).eval().requires_grad_(requires_grad=False))
    check_optimizations(nn.Sequential(compiled(inner), nn.ReLU(), make_convolution()).eval())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sequences_called_in_parts_give_the_same_scores(call):
    torch.manual_seed(0)
    network = PartialCalls(call).eval().requires_grad_(requires_grad=False)
    with observe_calls(network):
        network(torch.zeros(1, 16, 5, 6, 7))
    check_optimizations(network)


@torch.inference_mode()
def check_optimizations(network):
    x = torch.randn(2, 16, 5, 6, 7)
    expected = network(x)
    prepared_network = prepare(network, x.device, x.dtype, FORMAT)
    variants = {
        "prepared": prepared_network,
        "packed": onednn.pack_convolutions(copy.deepcopy(network)),
        "winograd": winograd.replace_convolutions(network),
        "all": onednn.pack_convolutions(winograd.replace_convolutions(prepared_network)),
    }
    for name, variant in variants.items():
        assert (variant(x) - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_nested_sequences_are_treated_as_one():
    first, second, third = make_convolution(), nn.ReLU(), make_convolution()
    network = nn.Sequential(nn.Sequential(first, nn.Dropout()), nn.Identity(), nn.Sequential(second, third))
    pairs = [(left.module, right.module) for left, right in iter_adjacent_modules(network)]
    assert pairs == [(first, second), (second, third), (second, third)]


@pytest.mark.parametrize(
    ("make", "pairs"),
    [
        (lambda: PartialCalls(lambda steps, x: steps(x)), 4),
        (lambda: PartialCalls(lambda steps, x: steps(steps(x))), 4),
        (lambda: PartialCalls(lambda steps, x: steps[3](x)), 1),
        (SharedActivation, 1),
        (make_repeated_layer, 4),
        (make_repeated_sequence, 2),
    ],
    ids=["once", "twice", "last step", "shared activation", "repeated layer", "repeated sequence"],
)
def test_sequences_called_as_a_whole_still_count_as_sequences(make, pairs):
    network = make()
    with observe_calls(network):
        network(torch.zeros(1, 16, 5, 6, 7))
    assert len({(slot.parent, slot.name) for slot, _ in iter_adjacent_modules(network)}) == pairs
