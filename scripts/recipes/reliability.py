"""Reliability of a confidence: how often objects with this confidence are right, as a table and as a diagram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 10
# Layout of the diagram, in pixels.
PLOT_EDGE = 260
LEFT_MARGIN = 52
TOP_MARGIN = 34
BOTTOM_MARGIN = 48
# Maximum radius of a dot. The area of a dot is proportional to the weight of its bin.
MAX_RADIUS = 14.0

Floats = NDArray[np.float64]


class Reliability(NamedTuple):
    """Confidence and correctness in bins of equal width that contain objects, each [B].

    confidence  weighted mean confidence of the objects in the bin
    fraction    weighted fraction of these objects that are right
    share       fraction of the total weight in the bin
    """

    confidence: Floats
    fraction: Floats
    share: Floats

    @property
    def error(self) -> float:
        """Expected calibration error (Guo et al. 2017): weighted mean difference of confidence and fraction."""
        return float((self.share * np.abs(self.confidence - self.fraction)).sum())


def bin_by_confidence(confidence: Floats, is_right: NDArray[np.bool_], weights: Floats) -> Reliability:
    """Return the reliability of the confidence of objects, 0 to 1; all arrays [N]."""
    bins = np.minimum((confidence * NUM_BINS).astype(np.intp), NUM_BINS - 1)
    totals, confidence_sums, right_sums = (
        np.bincount(bins, weights * values, NUM_BINS) for values in (np.ones(len(bins)), confidence, is_right)
    )
    used = totals > 0
    return Reliability(
        confidence_sums[used] / totals[used], right_sums[used] / totals[used], totals[used] / totals.sum()
    )


def draw_diagram(reliability: Mapping[str, Reliability]) -> str:
    """Return an SVG with one reliability diagram for each group of stacks."""
    width = len(reliability) * (LEFT_MARGIN + PLOT_EDGE + 16)
    height = TOP_MARGIN + PLOT_EDGE + BOTTOM_MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (name, values) in enumerate(reliability.items()):
        x = number * (LEFT_MARGIN + PLOT_EDGE + 16) + LEFT_MARGIN
        lines += [f'<g transform="translate({x},{TOP_MARGIN})">', *_draw_plot(name, values), "</g>"]
    return "\n".join([*lines, "</svg>\n"])


def _draw_plot(name: str, values: Reliability) -> Iterator[str]:
    edge = PLOT_EDGE
    yield f'<rect width="{edge}" height="{edge}" fill="none" stroke="#888"/>'
    yield f'<line x1="0" y1="{edge}" x2="{edge}" y2="0" stroke="#888" stroke-dasharray="4 4"/>'
    for tick in (0, 0.5, 1):
        yield f'<text x="{tick * edge:g}" y="{edge + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="-8" y="{edge - tick * edge + 4:g}" text-anchor="end">{tick:g}</text>'
    yield f'<text x="{edge / 2:g}" y="-12" text-anchor="middle">{name}: error {values.error:.3f}</text>'
    yield f'<text x="{edge / 2:g}" y="{edge + 36}" text-anchor="middle">confidence</text>'
    yield f'<text transform="translate(-34,{edge / 2:g}) rotate(-90)" text-anchor="middle">fraction that matches</text>'
    for confidence, fraction, share in zip(*values, strict=True):
        radius = max(MAX_RADIUS * (share / values.share.max()) ** 0.5, 2)
        position = f'cx="{confidence * edge:.1f}" cy="{edge - fraction * edge:.1f}"'
        yield f'<circle {position} r="{radius:.1f}" fill="#2f6fb0" fill-opacity="0.75"/>'
