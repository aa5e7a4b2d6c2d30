"""Height maps for tests of the watershed, and helpers that compute labels from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from service.core.types import Objects
from service.inference.decoding.pieces import Pieces, WatershedParameters
from service.inference.decoding.streaming import ObjectFilter, StreamingWatershed, TorchWatershed, label_objects
from service.inference.decoding.watershed import encode_foreground, find_basins
from service.inference.decoding.watershed_kernel import WatershedKernel, WatershedOptions

Array = NDArray[Any]
Size = tuple[int, int, int]

CPU = torch.device("cpu")
aten = torch.ops.aten


def split_heights(heights: Array, cuts: tuple[int, ...], *, along_y: bool) -> Iterator[Tensor]:
    """Split heights [Z, Y, X] at `cuts`, along z or y."""
    landscape = torch.from_numpy(heights.astype(np.float32))
    for low, high in itertools.pairwise([0, *cuts, heights.shape[along_y]]):
        yield landscape.narrow(int(along_y), low, high - low)


def compute_basins(heights: Array, parameters: WatershedParameters) -> tuple[Array, Pieces]:
    """Return the basin of each voxel of heights [Z, Y, X], and the basins, as `find_basins`. The background is -inf."""
    landscape = torch.from_numpy(heights.astype(np.float32))
    mask, codes = landscape > -torch.inf, encode_foreground(landscape)
    basins, pieces = find_basins(landscape, mask, codes, parameters.compute_floors)
    return basins.numpy(), pieces


def choose_by_size(minimum_size: int = 0, *, drop_border: bool = False) -> ObjectFilter:
    """Return a function that selects objects of a minimum number of voxels, and optionally none at the faces."""
    return lambda objects, touches_face: (objects.voxel_counts >= minimum_size) & ~(drop_border & touches_face)


def decode_objects(
    heights: Array,
    persistence: float = 0.0,
    minimum_size: int = 0,
    cuts: tuple[int, ...] = (),
    block_planes: int = 1000,
    kernel: WatershedKernel | None = None,
    *,
    threads: int = 1,
    along_y: bool = False,
    logits: bool = False,
    drop_border: bool = False,
) -> tuple[Array, Objects]:
    """Return labels and objects of heights [Z, Y, X]. The background is -inf.

    The heights are also used as the foreground scores.

    cuts          planes or rows at which the heights are split into parts
    kernel        the C++ kernel; None: the implementation in torch
    block_planes  number of planes that the C++ kernel processes together
    threads       number of threads of the C++ kernel
    """
    parameters, size = WatershedParameters(-np.inf, persistence, logits), get_size(heights)
    watershed: StreamingWatershed
    if kernel is None:
        watershed = TorchWatershed(size, CPU, parameters, along_y=along_y)
    else:
        watershed = kernel.start(size, parameters, WatershedOptions(along_y, block_planes, threads))
    for part in split_heights(heights, cuts, along_y=along_y):
        watershed.add(part, part)
    return label_objects(watershed, parameters, choose_by_size(minimum_size, drop_border=drop_border))


def decode(heights: Array, persistence: float = 0.0, minimum_size: int = 0, **options: Any) -> tuple[Array, int]:
    """Return the labels of `decode_objects`, and the number of objects."""
    labels, objects = decode_objects(heights, persistence, minimum_size, **options)
    return labels, len(objects)


def get_size(heights: Array) -> Size:
    depth, height, width = heights.shape
    return depth, height, width


def make_hills(seed: int, size: Size, sigma: float = 2.0) -> Array:
    """Return smooth random heights: touching objects of many shapes, -inf elsewhere.

    The heights are Gaussian noise with standard deviation 1. Values up to 0 are background.
    """
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(size), sigma, mode="nearest")
    noise /= noise.std()
    return np.where(noise > 0, noise, -np.inf).astype(np.float32)


class SyncCounter(TorchDispatchMode):
    """Counts operations that synchronize: on an accelerator, the host would wait for their results."""

    SYNCHRONIZING_OPERATIONS = (
        aten.nonzero,
        aten.equal,
        aten._local_scalar_dense,
        aten.bincount,
        aten.masked_select,
        aten.unique_dim,
    )

    def __init__(self) -> None:
        super().__init__()
        self.sync_count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.sync_count += function.overloadpacket in self.SYNCHRONIZING_OPERATIONS
        return function(*arguments, **(keywords or {}))


CENTERS = ((12, 12, 12), (14, 34, 15), (34, 13, 34), (35, 36, 36))


def compute_distances(*centers: tuple[int, int, int], edge: int = 48) -> NDArray[np.float64]:
    """Return the distance of each voxel to the closest center, [edge, edge, edge]."""
    grid = np.indices((edge, edge, edge))
    return np.min(
        [np.sqrt(sum((axis - c) ** 2 for axis, c in zip(grid, center, strict=True))) for center in centers], 0
    )
