"""Check that the activation of an imported model suits the scores that its network returns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.core.errors import UnsupportedPackage
from service.models.spec import PROBABILITY_TOLERANCE, ModelSpec
from service.models.spec_parts import get_probability_output

# Standard deviations of the noise in the probes. In networks without normalization layers, strong noise produces large
# scores of both signs, unless an activation limits the scores.
NOISE_LEVELS = (1.0, 1e4)


class ScoreRange(NamedTuple):
    """Lowest and highest score of an output in all probes."""

    low: float
    high: float

    @property
    def is_probability(self) -> bool:
        return self.low >= -PROBABILITY_TOLERANCE and self.high <= 1 + PROBABILITY_TOLERANCE

    @property
    def is_never_negative(self) -> bool:
        """Whether no score is negative. A constant output, as of an untrained network, proves nothing."""
        return self.low >= 0 and self.high > self.low


@torch.inference_mode()
def check_activation(network: nn.Module, spec: ModelSpec, *, is_specified_by_operator: bool) -> tuple[str, ...]:
    """Compare the activation of a model with its network's scores for noise. Return notes for the operator.

    An activation from the package itself is part of the network's published behavior, so the network may apply another
    activation before it. Raises UnsupportedPackage if the activation cannot be right.
    """
    ranges = _measure_ranges(network, spec)
    if not ranges:
        return ()
    probability = get_probability_output(spec.decoding)
    if probability and spec.get_activation(probability) == "none" and not ranges[probability].is_probability:
        raise _make_error(spec, ranges, probability, "so they are not probabilities")
    notes = list[str]()
    if spec.activation == "none" and probability is None and not _are_probabilities(ranges):
        notes.append("No activation is specified, so output=probabilities returns scores that are not probabilities.")
    name = _find_activated_output(spec, ranges)
    if name is not None:
        if is_specified_by_operator:
            raise _make_error(spec, ranges, name, "so they are not logits; the network probably applies an activation")
        notes.append(f"The package applies {spec.get_activation(name)} to scores that are never negative.")
    return tuple(notes)


def _measure_ranges(network: nn.Module, spec: ModelSpec) -> dict[str, ScoreRange]:
    """Return the range of the scores of each output in all probes with finite scores; empty if there are none."""
    probes = [scores for scores in _compute_probes(network, spec) if bool(scores.isfinite().all())]
    if not probes:
        return {}
    channels = torch.cat([scores.flatten(2)[0] for scores in probes], 1)
    return {
        name: ScoreRange(float(low), float(high))
        for name, low, high in zip(spec.outputs, channels.amin(1), channels.amax(1), strict=True)
    }


def _compute_probes(network: nn.Module, spec: ModelSpec) -> Iterator[Tensor]:
    """Yield the scores [1, K, z, y, x] of an empty window and of noise."""
    shape = (1, spec.input.channels, *spec.input.roi_size)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=generator)
    for window in (torch.zeros(shape), torch.rand(shape, generator=generator), *(noise * s for s in NOISE_LEVELS)):
        yield network(window).float()


def _find_activated_output(spec: ModelSpec, ranges: dict[str, ScoreRange]) -> str | None:
    """Return the first output whose scores cannot be logits for its activation, or None."""
    if spec.activation == "softmax":
        has_variation = any(item.high > item.low for item in ranges.values())
        return spec.outputs[0] if has_variation and _are_probabilities(ranges) else None
    names = [name for name in spec.outputs if spec.get_activation(name) == "sigmoid" and ranges[name].is_never_negative]
    return next(iter(names), None)


def _are_probabilities(ranges: dict[str, ScoreRange]) -> bool:
    return all(item.is_probability for item in ranges.values())


def _make_error(spec: ModelSpec, ranges: dict[str, ScoreRange], name: str, conclusion: str) -> UnsupportedPackage:
    problem = (
        f"activation: the activation of the output {name!r} is {spec.get_activation(name)}, but the network's scores "
        f"for noise range from {ranges[name].low:.3g} to {ranges[name].high:.3g}, {conclusion}."
    )
    suggestion = _suggest_activation(spec, ranges)
    if suggestion is None:
        return UnsupportedPackage(problem)
    return UnsupportedPackage(f"{problem} Use --activation {shlex.quote(suggestion)}.")


def _suggest_activation(spec: ModelSpec, ranges: dict[str, ScoreRange]) -> str | None:
    """Return an activation that suits the scores, in the syntax of the command line; None if there is none."""
    probability = get_probability_output(spec.decoding)
    if probability is None:
        return "none" if _are_probabilities(ranges) else "softmax"
    if ranges[probability].is_never_negative and not ranges[probability].is_probability:
        return None
    choices = {name: "none" if item.is_never_negative else "sigmoid" for name, item in ranges.items()}
    if len(set(choices.values())) == 1:
        return choices[probability]
    return ",".join(f"{name}={choice}" for name, choice in choices.items())
