"""Prepare recorded stacks of stained membranes for evaluation: `python -m scripts.recipes.tissues FOLDER OUT`.

FOLDER contains clones of three public repositories (`git clone URL FOLDER/NAME`):

    components  https://github.com/openalea/openalea-components, commit 1bc4844: one view of a floral bud
    vplants     https://github.com/jldinh/vplants, commit ca82831: labels of the bud from three views, and a shoot
                apical meristem with its labels
    cellsegm    https://github.com/ehodneland/cellsegm, commit 260a3e7: separate cultured cells with markers

The command writes a folder for each stack to OUT, with `image.tif` and `mask.tif`. The labels of the bud and of the
meristem are the output of other software. Those of the cultured cells are the watershed of the smoothed image from the
markers by its authors. Only a part of the bud is used, because its labels are unreliable deep in the tissue.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from scipy.io import loadmat
from scipy.ndimage import gaussian_filter, label
from skimage.segmentation import watershed

from service.core.quantities import VoxelSize

TISSUES = ("floral_bud", "shoot_apical_meristem", "cultured_cells")
INR_HEADER_BYTES = 256
BUD_BOX = (slice(0, 32), slice(100, 400), slice(100, 400))
# The planes of the fused labels of the bud are 0.2 um apart, those of the image 1 um. With this first plane, the image
# is brightest at the outlines of the labels.
FIRST_BUD_LABEL_PLANE = 27
BUD_LABEL_STEP = 5
# Label of the background in the labels of the bud and of the meristem.
INR_BACKGROUND = 1
MERISTEM_FILES = tuple(
    f"tissue/tissue_meta/doc/user/display/stack/{part}.inr.gz" for part in ("confocal_image", "segmentation")
)
BUD_LABELS = "vtissue/imaging/mars_alt/test/data/imgBeforeMostRepresentative.inr.gz"

Array = NDArray[Any]


def read_inr(path: Path) -> Array:
    """Return the voxels [Z, Y, X] of a compressed INRIMAGE file with unsigned integers in little-endian order."""
    data = gzip.decompress(path.read_bytes())
    fields = dict(line.split("=", 1) for line in data[:INR_HEADER_BYTES].decode("ascii").splitlines() if "=" in line)
    shape = [int(fields[name]) for name in ("ZDIM", "YDIM", "XDIM")]
    dtype = {"8 bits": "u1", "16 bits": "<u2"}[fields["PIXSIZE"]]
    return np.frombuffer(data, dtype, int(np.prod(shape)), INR_HEADER_BYTES).reshape(shape)


def label_cells(image: Array, markers: Array, cell_markers: Array) -> Array:
    """Return the watershed of an image [Z, Y, X] from markers, without the regions that are not marked as cells."""
    numbered, _ = label(markers)
    regions: Array = watershed(gaussian_filter(image.astype(np.float32), 1), numbered)  # type: ignore[no-untyped-call]
    return np.where(np.isin(regions, np.unique(numbered[cell_markers > 0])), regions, 0)


def read_tissue(folder: Path, name: str) -> tuple[Array, Array, VoxelSize | None]:
    """Return the image and the labels [Z, Y, X] of one of `TISSUES`, and its voxel size in micrometers if known."""
    if name == "cultured_cells":
        content = loadmat(folder / "cellsegm/data/surfstain_and_manual_3D.mat")
        image, markers, cell_markers = (np.moveaxis(content[key], 2, 0) for key in ("imsegm", "minima", "minimacell"))
        return image, label_cells(image, markers, cell_markers), None
    if name == "floral_bud":
        planes = folder / "components/image/share/data/p60-tiff"
        image = np.stack([tifffile.imread(path) for path in sorted(planes.glob("*.tif"))])[BUD_BOX]
        labels = read_inr(folder / "vplants" / BUD_LABELS)[FIRST_BUD_LABEL_PLANE::BUD_LABEL_STEP][BUD_BOX]
        voxel_size = VoxelSize(1, 0.2, 0.2)
    else:
        image, labels = (read_inr(folder / "vplants" / path) for path in MERISTEM_FILES)
        voxel_size = VoxelSize(0.4, 0.4, 0.4)
    return image, np.where(labels > INR_BACKGROUND, labels, 0), voxel_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the stacks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.tissues", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with the clones of the repositories")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    for name in TISSUES:
        image, labels, voxel_size = read_tissue(options.folder, name)
        (options.out / name).mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] = {"axes": "ZYX"}
        resolution = None
        if voxel_size is not None:
            metadata |= {"spacing": voxel_size.z, "unit": "um"}
            resolution = (1 / voxel_size.x, 1 / voxel_size.y)
        path = options.out / name
        tifffile.imwrite(path / "image.tif", image, imagej=True, metadata=metadata, resolution=resolution)
        tifffile.imwrite(path / "mask.tif", labels.astype(np.uint16), compression="zlib")


if __name__ == "__main__":
    main()
