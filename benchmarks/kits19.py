"""The workload that MLPerf Inference publishes as 3D-UNet on KiTS19, measured as `stackseg bench` measures a model.

python benchmarks/kits19.py [--device auto] [--shape 192 320 320] [--tiny] [options of stackseg bench]

An nnU-Net of 32-64-128-256-320-320 features with instance norm (MONAI's DynUNet; weights are random, which changes no
speed), windows of 128 x 128 x 128, an overlap of 0.5, Gaussian blending, three classes. The cases of KiTS19 differ in
size, and the default shape stands for one of them. --tiny keeps the depth and divides features and edges.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import describe_model, make_model

from service.__main__ import main as stackseg

FEATURES, ROI = (32, 64, 128, 256, 320, 320), 128


def content(features: tuple[int, ...], roi: int) -> dict[str, Any]:
    """Return the keys of the model file."""
    strides = [[1, 1, 1], *([[2, 2, 2]] * (len(features) - 1))]
    arguments = {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 3,
        "kernel_size": [[3, 3, 3]] * len(features),
        "strides": strides,
        "upsample_kernel_size": strides[1:],
        "filters": list(features),
        "norm_name": "INSTANCE",
    }
    return describe_model("kits19", "DynUNet", arguments, [roi] * 3, ["background", "kidney", "tumour"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(192, 320, 320), metavar=("Z", "Y", "X"))
    parser.add_argument("--tiny", action="store_true", help="4-8-16-32-40-40 features, windows of 64 x 64 x 64")
    options, others = parser.parse_known_args()
    features, roi = (tuple(width // 8 for width in FEATURES), 64) if options.tiny else (FEATURES, ROI)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        make_model(Path(folder), content(features, roi))
        os.environ |= {"STACKSEG_MODELS__FOLDER": folder, "STACKSEG_WINDOWS__OVERLAP": "0.5"}
        return stackseg(["bench", "--shape", *map(str, options.shape), *others])


if __name__ == "__main__":
    sys.exit(main())
