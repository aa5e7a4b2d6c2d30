"""Which `nn.Sequential` of a network are sequences, by what is seen of its calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from service.models.network import is_sequence, iter_children, observe_calls


class Owner(nn.Module):
    def __init__(self, call: Callable[[Owner, Tensor], Tensor]) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.ReLU(), nn.Sigmoid())
        self.last = self.steps[1]
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "whole"),
    [
        (lambda owner, x: owner.steps(x), True),
        (lambda owner, x: owner.steps(owner.steps(x)), True),
        (lambda owner, x: owner.last(owner.steps(x)), True),
        (lambda owner, x: owner.steps[0](owner.steps(x)), False),
        (lambda owner, x: owner.steps[0](x), False),
        (lambda owner, x: x, False),
    ],
    ids=["whole", "twice", "its shared child too", "its own child too", "its child alone", "never"],
)
def test_sequence_is_one_whose_children_nobody_else_calls(call: Callable[[Owner, Tensor], Tensor], whole: bool) -> None:
    network = Owner(call)
    assert is_sequence(network.steps)
    with observe_calls(network):
        network(torch.zeros(2))
    assert is_sequence(network.steps) == whole


def test_sequence_with_a_forward_of_its_own_is_none() -> None:
    class Reversed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in reversed(self):
                x = module(x)
            return x

    assert not is_sequence(Reversed(nn.ReLU()))


def test_child_with_two_names_comes_twice() -> None:
    layer = nn.ReLU()
    assert list(iter_children(nn.Sequential(layer, layer))) == [("0", layer), ("1", layer)]
