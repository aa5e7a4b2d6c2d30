"""Tests that the pixel shuffle kernels give the same results as torch's permutations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.cpu import onednn, pixel_shuffle
from service.models.architectures import shuffle_unet

FORMAT = torch.channels_last_3d


@given(
    block=st.tuples(*[st.integers(1, 4)] * 3),
    size=st.tuples(*[st.integers(1, 4)] * 3),
    batch=st.integers(1, 3),
    channels=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    layout=st.sampled_from([torch.contiguous_format, FORMAT]),
)
def test_shuffles_match_permutations_and_invert_each_other(block, size, batch, channels, dtype, layout):
    shape = [edge * step for edge, step in zip(size, block, strict=True)]
    x = torch.randn(batch, channels, *shape).to(dtype, memory_format=layout)
    folded_image = pixel_shuffle.SpaceToDepth(block)(x)
    assert torch.equal(folded_image, shuffle_unet.space_to_depth(x, block))
    assert folded_image.is_contiguous(memory_format=FORMAT)
    for blocks in (folded_image, folded_image.contiguous(), folded_image[:1]):
        image = pixel_shuffle.DepthToSpace(block)(blocks)
        assert torch.equal(image, x[: len(blocks)])
        assert image.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(2, 2, 2), (1, 2, 4), (2, 1, 1)], ids=str)
def test_unaligned_views_and_non_finite_values_are_moved_unchanged(block, dtype):
    between_two_words = torch.randn(1 + 2 * 4 * 4 * 40).to(dtype)[1:].view(2, 1, 4, 4, 40)
    for x in (between_two_words, torch.randn(2, 1, 4, 4, 9).to(dtype)[..., 1:]):
        x[0, 0, 1, 2, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
        folded_image = pixel_shuffle.SpaceToDepth(block)(x)
        expected = (shuffle_unet.space_to_depth(x, block), x)
        for actual, reference in zip(
            (folded_image, pixel_shuffle.DepthToSpace(block)(folded_image)), expected, strict=True
        ):
            torch.testing.assert_close(actual, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [(3, 4, 4), (4, 3, 4), (4, 4, 3)])
def test_size_that_is_not_a_multiple_of_the_block_is_an_error(size):
    with pytest.raises(RuntimeError):
        pixel_shuffle.SpaceToDepth((2, 2, 2))(torch.zeros(1, 1, *size))


@torch.inference_mode()
def test_packing_a_network_replaces_its_pixel_shuffles():
    torch.manual_seed(0)
    network = shuffle_unet.ShuffleUNet(1, 2, (4, 6)).eval().requires_grad_(requires_grad=False)
    x = torch.rand(2, 1, 8, 8, 8)
    expected = network(x)
    packed_network = onednn.pack_convolutions(network)
    assert isinstance(packed_network.unfold, pixel_shuffle.SpaceToDepth)
    assert isinstance(packed_network.fold, pixel_shuffle.DepthToSpace)
    torch.testing.assert_close(packed_network(x), expected, atol=1e-5, rtol=1e-5)
