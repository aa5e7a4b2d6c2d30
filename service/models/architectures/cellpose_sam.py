"""The network of Cellpose 4 (`cellpose.vit.CPSAM`), applied to each plane of a window.

It is the image encoder of Segment Anything (Kirillov et al., 2023) with patches of 8 pixels, attention over the whole
tile in every block, and relative positions (Li et al., "MViTv2", 2022), followed by a linear layer that returns the
scores of the pixels of a patch. The names of the layers are those of Cellpose's files.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from service.models.architectures.cellpose import PlaneNetwork
from service.models.spec_parts import FrozenModel

NORM_EPSILON = 1e-6
Length = Annotated[int, Field(ge=1, le=4096)]


class CellposeSamSettings(FrozenModel):
    """Arguments of the network.

    patch_size        edge length of a patch in pixels; a patch is one token
    num_tokens        number of tokens along each edge of a tile
    features          length of a token
    head_features     length of a token in one head of the attention
    hidden_features   number of hidden units of the perceptron of a block
    neck_features     number of channels between the blocks and the last layer
    table_lengths     for each block, the number of relative positions in the file; others are interpolated
    in_channels       number of channels of the network; if windows have fewer channels, the others are zero
    """

    patch_size: Annotated[int, Field(ge=1, le=64)]
    num_tokens: Annotated[int, Field(ge=1, le=128)]
    features: Length
    head_features: Length
    hidden_features: Annotated[int, Field(ge=1, le=2**16)]
    neck_features: Length
    table_lengths: Annotated[tuple[Length, ...], Field(min_length=1, max_length=128)]
    in_channels: Annotated[int, Field(ge=1, le=16)] = 3


class ChannelNorm(nn.Module):
    """Layer normalization over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, y, x] to the same shape."""
        shape = self.weight.shape
        return functional.layer_norm(x.movedim(1, -1), shape, self.weight, self.bias, NORM_EPSILON).movedim(-1, 1)


class Attention(nn.Module):
    """Attention between all tokens of a tile. A linear function of the query is added for each relative position."""

    def __init__(self, features: int, head_features: int, table_length: int) -> None:
        super().__init__()
        self.num_heads = features // head_features
        self.qkv, self.proj = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.rel_pos_h = nn.Parameter(torch.zeros(table_length, head_features))
        self.rel_pos_w = nn.Parameter(torch.zeros(table_length, head_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, Y, X, F] to the same shape."""
        count, height, width, features = x.shape
        query, key, value = self.qkv(x).view(count, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        rows = query.unflatten(2, (height, width))
        bias_y = torch.einsum("nhyxf,ykf->nhyxk", rows, expand_table(self.rel_pos_h, height))
        bias_x = torch.einsum("nhyxf,xkf->nhyxk", rows, expand_table(self.rel_pos_w, width))
        bias = (bias_y[..., :, None] + bias_x[..., None, :]).flatten(4).flatten(2, 3)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        output: Tensor = self.proj(attended.transpose(1, 2).reshape(count, height, width, features))
        return output


def expand_table(table: Tensor, length: int) -> Tensor:
    """Return the rows of a table of relative positions for all pairs of `length` positions: [L, F] -> [n, n, F].

    If the table has another length than 2 n - 1, it is interpolated, as in Segment Anything.
    """
    num_positions = 2 * length - 1
    if len(table) != num_positions:
        table = functional.interpolate(table.T[None], size=num_positions, mode="linear")[0].T
    positions = torch.arange(length, device=table.device)
    return table[positions[:, None] - positions + length - 1]


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self, features: int, hidden_features: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(features, hidden_features), nn.Linear(hidden_features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., F] to the same shape."""
        output: Tensor = self.lin2(functional.gelu(self.lin1(x)))
        return output


class Block(nn.Module):
    """A block of the transformer."""

    def __init__(self, settings: CellposeSamSettings, table_length: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(settings.features, NORM_EPSILON)
        self.attn = Attention(settings.features, settings.head_features, table_length)
        self.norm2 = nn.LayerNorm(settings.features, NORM_EPSILON)
        self.mlp = Perceptron(settings.features, settings.hidden_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, Y, X, F] to the same shape."""
        x = x + self.attn(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class Encoder(nn.Module):
    """The image encoder of Segment Anything."""

    def __init__(self, settings: CellposeSamSettings) -> None:
        super().__init__()
        features, neck_features, tokens = settings.features, settings.neck_features, settings.num_tokens
        patches = nn.Conv2d(settings.in_channels, features, settings.patch_size, settings.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": patches})
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, tokens, features))
        self.blocks = nn.Sequential(*(Block(settings, length) for length in settings.table_lengths))
        self.neck = nn.Sequential(
            nn.Conv2d(features, neck_features, 1, bias=False),
            ChannelNorm(neck_features),
            nn.Conv2d(neck_features, neck_features, 3, padding=1, bias=False),
            ChannelNorm(neck_features),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map planes [N, C, y, x] to features [N, K, Y, X] of their patches."""
        tokens = self.patch_embed["proj"](x).permute(0, 2, 3, 1) + self.pos_embed
        output: Tensor = self.neck(self.blocks(tokens).permute(0, 3, 1, 2))
        return output


class CellposeSam(PlaneNetwork):
    """Cellpose's transformer for planes. The keyword arguments are `CellposeSamSettings`.

    The edge lengths of a plane must be `patch_size` times `num_tokens`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        settings = CellposeSamSettings(**arguments)
        if settings.features % settings.head_features:
            raise ValueError("features must be a multiple of head_features")
        self.in_channels, self.patch_size = settings.in_channels, settings.patch_size
        num_scores = 3 * settings.patch_size**2
        self.encoder = Encoder(settings)
        self.out = nn.Conv2d(settings.neck_features, num_scores, 1)
        # Maps the scores of a patch to its pixels.
        self.W2 = nn.Parameter(torch.eye(num_scores).view(num_scores, 3, settings.patch_size, settings.patch_size))

    def score_planes(self, x: Tensor) -> Tensor:
        """Compute the flow along y and x and the logit of planes: [N, C, y, x] -> [N, 3, y, x]."""
        return functional.conv_transpose2d(self.out(self.encoder(x)), self.W2, stride=self.patch_size)
