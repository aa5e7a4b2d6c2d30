"""Call networks whose graphs were recorded with a fixed batch size.

Exporters often write the batch size of the example input into reshapes. Such a graph fails for other batch sizes, or
mixes the windows of a batch, even if the file declares that the batch size is variable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel

# Errors that a network may raise if it does not support a batch size.
_NETWORK_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
# Maximum difference of equal scores, relative to the largest absolute score, or to 1 if all scores are smaller.
# Convolutions of different batch sizes may round differently.
TOLERANCE = 1e-3


class FixedBatchNetwork(nn.Module):
    """A network that is always called with the same number of windows: [B, C, z, y, x] -> [B, K, z, y, x] for any B."""

    def __init__(self, network: nn.Module, batch_size: int) -> None:
        super().__init__()
        self.network, self._batch_size = network, batch_size

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores of `x` in batches of the fixed size. Copies of the last window fill the last batch."""
        scores = [self._compute_scores(windows) for windows in torch.split(x, self._batch_size)]
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def _compute_scores(self, windows: Tensor) -> Tensor:
        missing = self._batch_size - len(windows)
        if missing:
            padded_windows = torch.cat((windows, windows[-1:].expand(missing, *windows.shape[1:])))
            padded_scores: Tensor = self.network(padded_windows)
            return padded_scores[: len(windows)]
        scores: Tensor = self.network(windows)
        return scores


@torch.no_grad()
def accept_any_batch(network: nn.Module, window_shape: Sequence[int], declared_size: int | None = None) -> nn.Module:
    """Return a float32 network that accepts any number of windows and computes each window independently.

    The network is run with one and with two random windows. If it does not support two windows, or if their scores
    differ from those of single windows, windows are processed one at a time. If it does not even support one window, it
    is called with batches of the declared size, or of two windows.

    window_shape   shape [C, z, y, x] of a window
    declared_size  batch size that the file declares, or None if it is variable or unknown

    A network that accepts none of these batch sizes is returned unchanged. Raises BrokenModel if the scores of a window
    are random or depend on other windows in every batch that the network accepts.
    """
    windows = torch.randn((2, *window_shape), generator=torch.Generator().manual_seed(0))
    single_scores = [_compute_scores(network, window[None]) for window in windows]
    if single_scores[0] is not None and single_scores[1] is not None:
        if _are_equal(_compute_scores(network, windows), torch.cat([single_scores[0], single_scores[1]])):
            return network
        if not _are_equal(_compute_scores(network, windows[:1]), single_scores[0]):
            raise BrokenModel(
                "the network returns different scores for the same window; export it in evaluation mode, without "
                "dropout."
            )
        return FixedBatchNetwork(network, 1)
    for batch_size in sorted({2, declared_size or 2} - {1}):
        if _accepts_batches(network, windows, batch_size):
            return FixedBatchNetwork(network, batch_size)
    return network


def _accepts_batches(network: nn.Module, windows: Tensor, batch_size: int) -> bool:
    """Return whether a network accepts batches of a size. Raises BrokenModel if the windows depend on each other."""
    first, second = windows[:1], windows[1:]
    expected_scores = _compute_scores(network, first.expand(batch_size, *first.shape[1:]))
    if expected_scores is None:
        return False
    scores = _compute_scores(network, torch.cat((first, second.expand(batch_size - 1, *second.shape[1:]))))
    if scores is None or not _are_equal(scores[:1], expected_scores[:1]):
        raise BrokenModel(
            f"the network accepts only batches of {batch_size} windows, and the scores of a window depend on the other"
            " windows; export it in evaluation mode with a batch size of 1."
        )
    return True


def _compute_scores(network: nn.Module, windows: Tensor) -> Tensor | None:
    """Return the scores of windows, or None if the network does not support their number."""
    try:
        scores = network(windows)
    except _NETWORK_ERRORS:
        return None
    return scores if isinstance(scores, Tensor) and scores.dim() and len(scores) == len(windows) else None


def _are_equal(scores: Tensor | None, expected_scores: Tensor) -> bool:
    if scores is None or scores.shape != expected_scores.shape:
        return False
    limit = TOLERANCE * max(1.0, float(expected_scores.abs().nan_to_num().max()))
    return torch.allclose(scores, expected_scores, rtol=0, atol=limit, equal_nan=True)
