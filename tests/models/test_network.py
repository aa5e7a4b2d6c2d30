"""Tests of finding the `nn.Sequential` modules whose children are only called in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from service.models.network import is_plain_sequential, iter_children, observe_calls


class Owner(nn.Module):
    def __init__(self, call: Callable[[Owner, Tensor], Tensor]) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.ReLU(), nn.Sigmoid())
        self.last = self.steps[1]
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda owner, x: owner.steps(x), True),
        (lambda owner, x: owner.steps(owner.steps(x)), True),
        (lambda owner, x: owner.last(owner.steps(x)), True),
        (lambda owner, x: owner.steps[0](owner.steps(x)), False),
        (lambda owner, x: owner.steps[0](x), False),
        (lambda owner, x: x, False),
    ],
    ids=["once", "twice", "with its shared child", "with its own child", "only its child", "never"],
)
def test_sequence_is_one_whose_children_are_not_called_elsewhere(
    call: Callable[[Owner, Tensor], Tensor], expected: bool
) -> None:
    network = Owner(call)
    assert is_plain_sequential(network.steps)
    with observe_calls(network):
        network(torch.zeros(2))
    assert is_plain_sequential(network.steps) == expected


def test_subclass_with_its_own_forward_is_not_a_sequence() -> None:
    class Reversed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in reversed(self):
                x = module(x)
            return x

    assert not is_plain_sequential(Reversed(nn.ReLU()))


def test_child_with_two_names_is_yielded_twice() -> None:
    layer = nn.ReLU()
    assert list(iter_children(nn.Sequential(layer, layer))) == [("0", layer), ("1", layer)]
