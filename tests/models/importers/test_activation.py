"""Tests that an imported activation is applied once: by the network or by StackSeg, or the model is rejected."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from service.cli.model_packages.import_model import _parse_activation
from service.core.errors import BadParameter, UnsupportedPackage
from service.inference.decoding.decoders import make_decoder
from service.models.importers.activation import check_activation
from service.models.spec import ModelSpec

SIZE = (8, 10, 12)
FOREGROUND_SIGMOID = {"foreground": "sigmoid", "distance": "none"}
FOREGROUND_NONE = {"foreground": "none", "distance": "sigmoid"}
ENDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda scores: scores,
    "sigmoid": torch.sigmoid,
    "hard sigmoid": nn.functional.hardsigmoid,
    "softmax": lambda scores: torch.softmax(scores, 1),
    "clamp": lambda scores: scores.clamp(0, 1),
    "sigmoid of the foreground": lambda scores: torch.cat([torch.sigmoid(scores[:, :1]), scores[:, 1:]], 1),
    "distance in voxels": lambda scores: torch.cat([scores[:, :1], 9 * scores[:, 1:].abs()], 1),
}
# Activations that are right for an instance model, by the last function of the network.
ACCEPTED: dict[str, list[Any]] = {
    "logits": ["sigmoid", FOREGROUND_SIGMOID],
    "sigmoid": ["none"],
    "hard sigmoid": ["none"],
    "softmax": ["none"],
    "clamp": ["none"],
    "sigmoid of the foreground": ["none", FOREGROUND_NONE],
    "distance in voxels": [FOREGROUND_SIGMOID],
}


class Ending(nn.Module):
    """A convolution with random weights, followed by one of `ENDINGS`."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.convolution, self._ending = nn.Conv3d(1, 2, 3, padding=1), ENDINGS[ending]

    def forward(self, x: Tensor) -> Tensor:
        return self._ending(self.convolution(x))


def make_spec(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a checked copy of a spec with windows of `SIZE`. Raises ValidationError."""
    content = spec.model_dump() | {"input": spec.input.model_dump() | {"roi_size": SIZE}} | changes
    return ModelSpec.model_validate(content | {"folder": spec.folder})


@pytest.mark.parametrize("ending", ENDINGS)
def test_instance_models_are_accepted_only_with_the_right_activation(ending: str, random_nuclei: ModelSpec) -> None:
    network, accepted = Ending(ending).eval(), []
    for activation in ("none", "sigmoid", "softmax", FOREGROUND_SIGMOID, FOREGROUND_NONE):
        try:
            spec = make_spec(random_nuclei, activation=activation)
            check_activation(network, spec, is_specified_by_operator=True)
        except (ValidationError, UnsupportedPackage):
            continue
        accepted.append(activation)
    assert accepted == ACCEPTED[ending]


@pytest.mark.parametrize(("ending", "activation"), [*itertools.product(ENDINGS, ["none", "sigmoid", FOREGROUND_NONE])])
def test_suggested_activation_is_accepted(ending: str, activation: Any, random_nuclei: ModelSpec) -> None:
    network = Ending(ending).eval()
    try:
        check_activation(network, make_spec(random_nuclei, activation=activation), is_specified_by_operator=True)
    except UnsupportedPackage as error:
        (value,) = shlex.split(str(error).rpartition(" --activation ")[2].rstrip("."))
        suggested_spec = make_spec(random_nuclei, activation=_parse_activation(value))
        assert check_activation(network, suggested_spec, is_specified_by_operator=True) == ()


@pytest.mark.parametrize("ending", ["sigmoid", "hard sigmoid", "softmax", "clamp"])
def test_probabilities_of_a_network_that_computes_them_are_returned_unchanged(ending: str, bands: ModelSpec) -> None:
    network = Ending(ending).eval()
    for activation in ("none", "sigmoid", "softmax"):
        spec = make_spec(bands, outputs=["background", "cell"], activation=activation)
        if activation != "none":
            with pytest.raises(UnsupportedPackage, match=r"Use --activation none\.$"):
                check_activation(network, spec, is_specified_by_operator=True)
            continue
        check_activation(network, spec, is_specified_by_operator=True)
        with torch.inference_mode():
            scores = network(torch.rand(1, 1, *SIZE))
        decoder = make_decoder(spec, SIZE, "probabilities", None)
        decoder.add(0, 0, scores)
        assert torch.equal(torch.from_numpy(decoder.finish().pixels), scores[0])


def test_logits_of_classes_are_imported_with_a_note_that_they_are_not_probabilities(bands: ModelSpec) -> None:
    spec = make_spec(bands, outputs=["background", "cell"], activation="none")
    notes = check_activation(Ending("logits"), spec, is_specified_by_operator=True)
    assert len(notes) == 1
    assert "scores that are not probabilities" in notes[0]


def test_activation_of_a_package_is_reproduced_with_a_note(bands: ModelSpec) -> None:
    spec = make_spec(bands, outputs=["background", "cell"], activation="softmax")
    notes = check_activation(Ending("softmax"), spec, is_specified_by_operator=False)
    assert notes == ("The package applies softmax to scores that are never negative.",)


def test_foreground_scores_without_a_probability_are_rejected_without_a_suggestion(random_nuclei: ModelSpec) -> None:
    class HeatMap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().expand(-1, 2, -1, -1, -1)

    spec = make_spec(random_nuclei, activation="none")
    with pytest.raises(UnsupportedPackage, match=r"so they are not probabilities\.$"):
        check_activation(HeatMap(), spec, is_specified_by_operator=True)


def test_constant_scores_are_accepted(random_nuclei: ModelSpec) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((1, 2, *x.shape[2:]), 0.5)

    spec = make_spec(random_nuclei, activation="sigmoid")
    assert check_activation(Constant(), spec, is_specified_by_operator=True) == ()


@pytest.mark.parametrize("text", ["relu", "foreground=relu", "foreground=softmax,distance=none", "foreground=", "=,="])
def test_invalid_activations_on_the_command_line_are_rejected(text: str) -> None:
    with pytest.raises((ValueError, BadParameter), match=r"expected sigmoid or none|expected softmax"):
        _parse_activation(text)
