"""A network that is not one of the service's architectures: the detector of synapses in seung-lab/modelzoo.

It is a residual U-Net for electron microscopy at 40 x 7 x 7 nm (IARPAphase1/SynapseDetection, MIT license), written
with the names of the tensors in its weights file `mip1_d2_1175k.chkpt`. docs/models.md exports it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import elu, interpolate

FEATURES = (28, 36, 48)
KERNELS = ((1, 3, 3), (3, 3, 3), (3, 3, 3))
PLANAR_KERNEL, IO_KERNEL, SCALE = (1, 3, 3), (1, 5, 5), (1, 2, 2)


class Conv(nn.Module):
    """A convolution that preserves the size."""

    def __init__(self, channels: int, out_channels: int, kernel: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, out_channels, kernel, padding="same", bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Upsampling(nn.Module):
    """Nearest-neighbor interpolation along y and x, and a convolution."""

    def __init__(self, channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = Conv(channels, out_channels, kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(interpolate(x, scale_factor=SCALE, mode="nearest"))


class Activated(nn.Module):
    """A convolution with bias, and its activation."""

    def __init__(self, channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = Conv(channels, out_channels, kernel, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return elu(self.conv(x))


class Residual(nn.Module):
    """Three convolutions, the first of which is within planes and is bypassed by a residual connection."""

    def __init__(self, channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = Conv(channels, out_channels, PLANAR_KERNEL)
        self.conv2, self.conv3 = (Conv(out_channels, out_channels, kernel) for _ in range(2))
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm3d(out_channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = elu(self.bn1(self.conv1(x)))
        return elu(self.bn3(self.conv3(elu(self.bn2(self.conv2(first)))) + first))


class Decoder(nn.Module):
    """Upsampling, the sum with the skip connection, and a residual block."""

    def __init__(self, channels: int, out_channels: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.upsampling = Upsampling(channels, out_channels, kernel)
        self.bn1 = nn.BatchNorm3d(out_channels)
        self.convmod = Residual(out_channels, out_channels, kernel)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convmod(elu(self.bn1(self.upsampling(x) + skip)))


class SynapseNetwork(nn.Module):
    """Image [B, 1, z, y, x], with intensities from 0 to 1, -> logits of postsynaptic densities [B, 1, z, y, x]."""

    def __init__(self) -> None:
        super().__init__()
        top, middle, bottom = FEATURES
        self.inputconv = Activated(1, top, IO_KERNEL)
        self.convmod0 = Residual(top, top, KERNELS[0])
        self.convmod1 = Residual(top, middle, KERNELS[1])
        self.convmod2 = Residual(middle, bottom, KERNELS[2])
        self.rszconvmod1 = Decoder(bottom, middle, KERNELS[1])
        self.rszconvmod0 = Decoder(middle, top, KERNELS[0])
        self.embedconv = Activated(top, top, KERNELS[0])
        self.outputdeconv = nn.ModuleDict({"psd_label": Conv(top, 1, IO_KERNEL, bias=True)})
        self.pool = nn.MaxPool3d(SCALE)

    def forward(self, x: Tensor) -> Tensor:
        first = self.convmod0(self.inputconv(x))
        second = self.convmod1(self.pool(first))
        x = self.rszconvmod1(self.convmod2(self.pool(second)), second)
        return self.outputdeconv["psd_label"](self.embedconv(self.rszconvmod0(x, first)))
