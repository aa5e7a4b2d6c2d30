"""Run `stackseg bench` on a workload like that of 3D-UNet on KiTS19 in MLPerf Inference.

python benchmarks/kits19.py [--device auto] [--shape 192 320 320] [--tiny] [options of stackseg bench]

The network is an nnU-Net (MONAI's DynUNet) with 32-64-128-256-320-320 features, instance normalization and three
classes. Its weights are random, which does not affect the speed. The upsampled features are reduced, because rounding
errors would otherwise be larger than in trained networks, and the check at startup would reject BF16. Windows are
128 x 128 x 128 voxels, with an overlap of 0.5 and Gaussian blending. The cases of KiTS19 differ in size; the default
shape is typical. --tiny keeps the depth of the network, but reduces the features and the window size.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import describe_model, make_model
from torch import nn

from service.__main__ import main as stackseg

FEATURES = (32, 64, 128, 256, 320, 320)
# Edge of a window, in voxels.
ROI = 128
# Factor for the weights of the layers that upsample features.
UPSAMPLING_FACTOR = 0.1


def describe_network(features: tuple[int, ...], roi: int) -> dict[str, Any]:
    """Return the content of `model.yaml`."""
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


@torch.no_grad()
def reduce_upsampled_features(network: nn.Module) -> None:
    """Scale the weights of the layers that upsample features, so that deep features contribute less to the scores."""
    for module in network.modules():
        if isinstance(module, nn.ConvTranspose3d):
            module.weight.mul_(UPSAMPLING_FACTOR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(192, 320, 320), metavar=("Z", "Y", "X"))
    parser.add_argument("--tiny", action="store_true", help="use 4-8-16-32-40-40 features and windows of 64 x 64 x 64")
    options, others = parser.parse_known_args()
    features, roi = (tuple(width // 8 for width in FEATURES), 64) if options.tiny else (FEATURES, ROI)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        make_model(Path(folder), describe_network(features, roi), reduce_upsampled_features)
        os.environ |= {"STACKSEG_MODELS__FOLDER": folder, "STACKSEG_WINDOWS__OVERLAP": "0.5"}
        return stackseg(["bench", "--shape", *map(str, options.shape), *others])


if __name__ == "__main__":
    sys.exit(main())
