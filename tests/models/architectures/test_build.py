"""Tests of all available networks, and of invalid arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from service.core.errors import BrokenModel
from service.models.architectures.build import ARCHITECTURES, build_network, count_tensor_elements
from service.models.spec import Architecture

CHANNELS = {"in_channels": 2, "out_channels": 3}
NNUNET = {
    "features": [4, 8],
    "kernel_sizes": [[1, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2]],
    "num_blocks": [1, 2],
    "num_convs": [1],
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ShuffleUNet": CHANNELS | {"widths": [4, 8], "block": [1, 2, 2]},
    "UNet": CHANNELS | {"spatial_dims": 3, "channels": [4, 8], "strides": [2]},
    "BasicUNet": CHANNELS | {"spatial_dims": 3, "features": [4, 4, 8, 8, 8, 4]},
    "DynUNet": CHANNELS
    | {"spatial_dims": 3, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    | {"filters": [4, 8, 8]},
    "SegResNet": CHANNELS | {"spatial_dims": 3, "init_filters": 8},
    "CellposeNet": {"in_channels": 3, "features": [4, 8, 8]},
    "CellposeSam": {"patch_size": 8, "num_tokens": 4, "features": 8, "head_features": 4, "hidden_features": 8}
    | {"neck_features": 4, "table_lengths": [3, 7]},
    "StarDistUNet": {"in_channels": 2, "n_rays": 2, "n_filter_base": 4, "net_conv": 4},
    "StarDistResNet": {"in_channels": 2, "n_rays": 2, "n_filter_base": 4, "net_conv": 4, "n_blocks": 2},
    "AttentionUnet": CHANNELS | {"spatial_dims": 3, "channels": [4, 8], "strides": [2]},
    "VNet": CHANNELS | {"spatial_dims": 3},
    "SegResNetDS": CHANNELS | {"init_filters": 8, "blocks_down": [1, 1, 1], "dsdepth": 2},
    "MedNeXt": CHANNELS
    | {"init_filters": 4, "kernel_size": 3, "deep_supervision": True, "blocks_bottleneck": 1}
    | {"blocks_down": [1, 1], "blocks_up": [1, 1]},
    "SwinUNETR": CHANNELS | {"feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 4], "window_size": 4},
    "UNETR": CHANNELS | {"img_size": [16, 32, 32], "feature_size": 4, "hidden_size": 24, "mlp_dim": 32, "num_heads": 2},
    "FlexibleUNet": CHANNELS | {"spatial_dims": 3, "backbone": "resnet10", "decoder_channels": [8, 8, 8, 8, 8]},
    "PlainConvUNet": CHANNELS | NNUNET,
    "ResidualEncoderUNet": CHANNELS | NNUNET | {"num_folds": 2},
    **dict.fromkeys(("UNet3D", "ResidualUNet3D", "ResidualUNetSE3D"), CHANNELS | {"f_maps": [4, 8], "num_groups": 2}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_preserves_the_shape_and_its_parameters_are_counted(name: str) -> None:
    architecture = Architecture(name=name, arguments=ARGUMENTS[name])
    network = build_network(architecture).eval()
    with torch.inference_mode():
        depth = {"SwinUNETR": 64, "FlexibleUNet": 32}.get(name, 16)
        scores = network(torch.rand(2, 2, depth, 32, 32))
    # The flow of Cellpose has three components.
    assert scores.shape == (2, 4 if name.startswith("Cellpose") else 3, depth, 32, 32)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert count_tensor_elements(architecture) == sum(tensor.numel() for tensor in network.state_dict().values()) > 0


def test_error_for_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(BrokenModel, match=r"Unknown architecture 'UNext'; choose one of ShuffleUNet, UNet,"):
        build_network(Architecture(name="UNext"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("UNet", {}),
        ("UNet", {"chanels": [4, 8]}),
        ("UNet", {"channels": [4]}),
        ("UNet", {"in_channels": -1}),
        ("UNet", {"in_channels": "two"}),
        ("UNet", {"spatial_dims": 7}),
        ("UNet", {"norm": "batchnrm"}),
        ("BasicUNet", {"features": [1, 2]}),
        ("DynUNet", {"strides": [1, 2]}),
        ("SegResNet", {"init_filters": 7}),
        ("SegResNet", {"upsample_mode": "magic"}),
        ("UNet3D", {"f_maps": 8, "num_levels": 10**9}),
        ("UNet3D", {"f_maps": [8]}),
        ("UNet3D", {"f_maps": [10**9, 8]}),
        ("UNet3D", {"layer_order": "gr"}),
        ("UNet3D", {"layer_order": "rc"}),
        ("UNet3D", {"layer_order": "gcx"}),
        ("UNet3D", {"num_groups": None}),
        ("UNet3D", {"num_groups": 3}),
        ("UNet3D", {"upsample": "magic"}),
        ("UNet3D", {"conv_upscale": 3}),
        ("ResidualUNet3D", {"upsample": "nearest"}),
        ("AttentionUnet", {"spatial_dims": 2}),
        ("AttentionUnet", {"channels": [4] * 100_000, "strides": [2] * 100_000}),
        ("VNet", {"in_channels": 3}),
        ("SegResNetDS", {"preprocess": "os.system"}),
        ("SegResNetDS", {"blocks_down": [10**9, 1]}),
        ("MedNeXt", {"spatial_dims": 2}),
        ("MedNeXt", {"blocks_bottleneck": 10**9}),
        ("SwinUNETR", {"use_hyena": True}),
        ("SwinUNETR", {"feature_size": 13}),
        ("SwinUNETR", {"depths": [10**9, 1, 1, 1]}),
        ("UNETR", {"img_size": [8, 32, 32]}),
        ("UNETR", {"num_heads": 7}),
        ("UNETR", {"spatial_dims": 2}),
        ("FlexibleUNet", {"spatial_dims": 2}),
        ("FlexibleUNet", {"backbone": "os.system"}),
        ("ShuffleUNet", {"block": [2, 2]}),
        ("ShuffleUNet", {"widths": []}),
        ("ShuffleUNet", {"widths": [-4, 8]}),
        # Arguments for networks of excessive size, or with unsupported modules.
        ("SegResNet", {"blocks_down": [10**9, 1]}),
        ("ShuffleUNet", {"widths": [4] * 100_000}),
        ("UNet", {"num_res_units": 10**9}),
        ("UNet", {"norm": "os.system"}),
        ("UNet", {"act": ["RELU", {"inplace": {}, "extra": 1}]}),
        ("UNet", {"channels": {}}),
        ("DynUNet", {"filters": None, "kernel_size": 3}),
    ],
)
def test_invalid_arguments_are_rejected(name: str, arguments: dict[str, Any]) -> None:
    all_arguments = ARGUMENTS[name] | arguments if arguments else {}
    with pytest.raises(BrokenModel, match=f"^{name} does not accept the arguments in the model file: "):
        count_tensor_elements(Architecture(name=name, arguments=all_arguments))
    assert torch.is_grad_enabled()


def test_counting_parameters_does_not_import_torchs_compiler() -> None:
    """An import under the modes of the construction would be incomplete on a host with a GPU."""
    program = (
        "import sys\n"
        "from service.models.architectures.build import count_tensor_elements\n"
        "from service.models.spec import Architecture\n"
        f"count_tensor_elements(Architecture(name='DynUNet', arguments={ARGUMENTS['DynUNet']!r}))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
