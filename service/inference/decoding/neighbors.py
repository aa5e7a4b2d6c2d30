"""Neighbors of a voxel: their offsets in flat memory, and the codes that identify them within a key."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

NEIGHBORS = tuple((z, y, x) for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1) if (z, y, x) != (0, 0, 0))

# The last five bits of a key contain the position of the voxel modulo 3 along each axis, which identifies the neighbor.
POSITION_BITS = 0b11111


def position_codes(
    planes: int, rows: int, row: int, weights: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return codes of positions modulo 3 along planes, int32 [planes + 2, 1, 1], and within a plane, [Y, X]."""
    z, y, x = (torch.arange(edge, dtype=torch.int32, device=device) % 3 for edge in (planes + 2, rows, row))
    return weights[0] * z[:, None, None], weights[1] * y[1:-1, None] + x[1:-1]


@lru_cache(maxsize=16)
def neighbor_offsets(rows: int, row: int) -> Tensor:
    """Return the offsets, int32 [26] on the CPU, from a voxel to its neighbors in flat memory."""
    return torch.tensor([(z * rows + y) * row + x for z, y, x in NEIGHBORS], dtype=torch.int32)


@lru_cache(maxsize=16)
def neighbor_steps(plane: int, row: int, weights: tuple[int, int]) -> Tensor:
    """Return the offset to a neighbor for each pair of position codes, int32 [1024] on the CPU.

    The index is 32 * the voxel's code + the neighbor's code.
    """
    code = torch.arange(32)
    steps = torch.zeros(32, 32, dtype=torch.int64)
    for weight, step in ((weights[0], plane), (weights[1], row), (1, 1)):
        digit = code // weight % 3
        steps += ((digit[None] - digit[:, None] + 1) % 3 - 1) * step
    return steps.view(-1).int()
