"""The one kind of batch that an engine made a network for, and what the network says to any other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from service.errors import BadParameter


class Fixed(NamedTuple):
    """Shape and dtype of [B, C, z, y, x], and the strides where code was made for these, too."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def like(cls, example: Tensor, *, strides: bool = False) -> Fixed:
        """What `example` is; `strides`: in this layout of memory and no other."""
        return cls(example.shape, example.dtype, example.stride() if strides else None)

    def check(self, x: Tensor) -> None:
        """Raises BadParameter for another batch."""
        same_layout = self.strides is None or x.stride() == self.strides
        if x.shape != self.shape or x.dtype != self.dtype or not same_layout:
            other = Fixed.like(x, strides=self.strides is not None)
            raise BadParameter(f"This network was made for {self} and cannot run {other}.")

    def __str__(self) -> str:
        layout = "" if self.strides is None else f" in strides of {self.strides}"
        return f"{tuple(self.shape)} {self.dtype}{layout}"
