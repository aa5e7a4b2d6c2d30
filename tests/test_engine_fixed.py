from __future__ import annotations

import pytest
import torch

from service.engine.fixed import Fixed
from service.errors import BadParameter

EXAMPLE = torch.zeros(2, 1, 3, 4, 5)


def test_what_is_like_the_example_passes() -> None:
    Fixed.like(EXAMPLE).check(torch.ones(2, 1, 3, 4, 5))
    Fixed.like(EXAMPLE, strides=True).check(torch.ones(2, 1, 3, 4, 5))


@pytest.mark.parametrize("other", [torch.zeros(1, 1, 3, 4, 5), torch.zeros(2, 1, 3, 4, 5, dtype=torch.bfloat16)])
def test_another_shape_or_dtype_is_refused_in_words_that_name_both(other: torch.Tensor) -> None:
    with pytest.raises(BadParameter) as refusal:
        Fixed.like(EXAMPLE).check(other)
    for one in (EXAMPLE, other):
        assert f"{tuple(one.shape)} {one.dtype}" in str(refusal.value)


def test_another_layout_is_refused_where_the_code_was_made_for_one() -> None:
    wide = torch.zeros(2, 8, 3, 4, 5)
    last = wide.contiguous(memory_format=torch.channels_last_3d)
    Fixed.like(wide).check(last)
    with pytest.raises(BadParameter, match="strides"):
        Fixed.like(wide, strides=True).check(last)
