"""Read the plans of nnU-Net v2: the network, the windows and the normalization of a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from service.core.errors import UnsupportedPackage
from service.models.importers.draft import Fields
from service.models.importers.programs.nnunet_resampling import has_default_resampling

MAX_STAGES = 16
# Maximum number of voxels of a window. nnU-Net's largest presets use 2**24.
MAX_WINDOW_VOXELS = 2**25
MAX_WINDOW_LENGTH = 4096
PREPROCESSOR = "DefaultPreprocessor"
# Arguments of the networks that do not affect inference, or that are read elsewhere.
_KNOWN_ARGUMENTS = frozenset(
    [
        "n_stages", "features_per_stage", "conv_op", "kernel_sizes", "strides", "n_conv_per_stage",
        "n_blocks_per_stage", "n_conv_per_stage_decoder", "conv_bias", "norm_op", "norm_op_kwargs", "dropout_op",
        "dropout_op_kwargs", "nonlin", "nonlin_kwargs", "deep_supervision",
    ]
)  # fmt: skip
_NUM_BLOCKS_KEYS = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}


class Plans(NamedTuple):
    """One configuration of the plans.

    name           name of the dataset
    configuration  keys of the configuration, including inherited ones
    image_axes     axis of the network for each axis (z, y, x) of the images, as in `transpose_backward`
    patch_size     window size along the axes (z, y, x) of the images
    reader         name of the class that reads image files
    intensities    intensity statistics of the training data by the number of the channel
    """

    name: str
    configuration: Fields
    image_axes: tuple[int, int, int]
    patch_size: tuple[int, int, int]
    reader: str
    intensities: Fields

    def arrange(self, values: Sequence[Any]) -> list[Any]:
        """Return values for the axes of the network in the order of the axes (z, y, x) of the images."""
        return [values[axis] for axis in self.image_axes]

    def read_window_settings(self, architecture: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of `input` that specify the windows and the grid that they are cut from.

        Raises UnsupportedPackage if the patch size is not a multiple of them.
        """
        strides = architecture["arguments"]["strides"]
        multiple = [math.prod(stride[axis] for stride in strides) for axis in range(3)]
        if any(length % step for length, step in zip(self.patch_size, multiple, strict=True)):
            location = self.configuration.locate("patch_size")
            raise UnsupportedPackage(f"{location}: {self.patch_size} is not a multiple of the strides, {multiple}.")
        return {
            "roi_size": list(self.patch_size),
            "roi_multiple": multiple,
            "tiling": "nnunet",
            "crop_zeros": True,
            "resampling": "nnunet" if has_default_resampling(self.configuration) else "linear",
        }


def read_plans(plans: Fields, name: str) -> Plans:
    """Return the configuration `name` of the plans. Raises UnsupportedPackage for 2D networks and cascades."""
    configuration = _resolve(plans, name)
    patch_size = configuration.get("patch_size")
    if isinstance(patch_size, list) and len(patch_size) == 2:
        raise UnsupportedPackage(
            f"{configuration.locate()}: this configuration is a 2D network, which segments each plane separately. Only "
            "3D networks are supported. Train and import 3d_fullres or 3d_lowres."
        )
    if configuration.get("previous_stage") is not None:
        raise UnsupportedPackage(
            f"{configuration.locate()}: this configuration is the second stage of a cascade, whose input includes the "
            f"labels of {configuration.get('previous_stage')!r:.80}. Import 3d_fullres or 3d_lowres."
        )
    for key, fields, supported in (
        ("preprocessor_name", configuration, PREPROCESSOR),
        ("label_manager", plans, "LabelManager"),
    ):
        if fields.get_string(key, supported) != supported:
            raise UnsupportedPackage(
                f"{fields.locate(key)}: only {supported} is supported, not {fields.get(key)!r:.80}."
            )
    z, y, x = _read_axes(plans)
    location = configuration.locate("patch_size")
    lengths = _check_sizes(patch_size, location, MAX_WINDOW_LENGTH)
    if math.prod(lengths) > MAX_WINDOW_VOXELS:
        raise UnsupportedPackage(f"{location}: {patch_size} has more than {MAX_WINDOW_VOXELS} voxels.")
    key = "foreground_intensity_properties_per_channel"
    old_key = "foreground_intensity_properties_by_modality"
    return Plans(
        plans.get_string("dataset_name", ""),
        configuration,
        (z, y, x),
        (lengths[z], lengths[y], lengths[x]),
        plans.get_string("image_reader_writer", ""),
        plans.get_mapping(key if key in plans else old_key),
    )


def _read_axes(plans: Fields) -> tuple[int, int, int]:
    """Return the positions of z, y and x in the axes of the network."""
    axes = plans.get("transpose_forward")
    if not isinstance(axes, list) or sorted(map(repr, axes)) != ["0", "1", "2"]:
        raise UnsupportedPackage(f"transpose_forward: expected a permutation of 0, 1, 2, not {axes!r:.80}.")
    inverse = axes.index(0), axes.index(1), axes.index(2)
    backward = plans.get("transpose_backward")
    if backward not in (None, list(inverse)):
        raise UnsupportedPackage(
            f"transpose_backward: expected {list(inverse)}, the inverse of transpose_forward, not {backward!r:.80}."
        )
    return inverse


def _resolve(plans: Fields, name: str) -> Fields:
    """Return a configuration with the keys that it inherits. Raises UnsupportedPackage if it does not exist."""
    configurations, keys = plans.get_mapping("configurations"), dict[str, Any]()
    parents, parent = list[str](), name
    while parent:
        if parent in parents or parent not in configurations:
            raise UnsupportedPackage(f"configurations.{parent:.80}: it is missing, or it inherits from itself.")
        parents.append(parent)
        configuration = configurations.get_mapping(parent)
        keys = {**configuration.as_dict(), **keys}
        parent = configuration.get_string("inherits_from", "")
    return Fields(keys, f"configurations.{name:.80}")


def _check_sizes(values: Any, location: str, limit: int, count: int = 3) -> list[int]:
    """Return `count` integers from 1 to `limit`. Raises UnsupportedPackage."""
    is_list = isinstance(values, list | tuple) and len(values) == count
    if is_list and all(type(value) is int and 1 <= value <= limit for value in values):
        return list(values)
    raise UnsupportedPackage(f"{location}: expected {count} integers from 1 to {limit}, not {values!r:.80}.")


def read_architecture(plans: Plans, in_channels: int, out_channels: int) -> dict[str, Any]:
    """Return the key `architecture` of the model file. Raises UnsupportedPackage for other networks."""
    location = plans.configuration.locate("architecture")
    if "architecture" in plans.configuration:
        section = plans.configuration.get_mapping("architecture")
        name = section.get_string("network_class_name").rpartition(".")[2]
        arguments = section.get_mapping("arch_kwargs")
    else:
        name = plans.configuration.get_string("UNet_class_name")
        arguments = _translate_old_plans(plans.configuration, name)
    if name not in _NUM_BLOCKS_KEYS:
        raise UnsupportedPackage(f"{location}: {name!r:.80} is not one of {', '.join(_NUM_BLOCKS_KEYS)}.")
    for key, value in arguments.as_dict().items():
        if key not in _KNOWN_ARGUMENTS and value not in (None, False):
            raise UnsupportedPackage(f"{arguments.locate(key)}: this argument is not supported.")
    if _get_class_name(arguments, "conv_op") != "Conv3d":
        raise UnsupportedPackage(f"{arguments.locate('conv_op')}: only Conv3d is supported.")
    features = arguments.get("features_per_stage")
    num_stages = len(features) if isinstance(features, list) else arguments.get("n_stages")
    if type(num_stages) is not int or not 2 <= num_stages <= MAX_STAGES:
        raise UnsupportedPackage(f"{arguments.locate('n_stages')}: expected 2 to {MAX_STAGES} stages.")
    return {
        "name": name,
        "arguments": {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "features": _read_numbers(arguments, "features_per_stage", num_stages, 2**14),
            "kernel_sizes": _read_triples(arguments, "kernel_sizes", num_stages, plans),
            "strides": _read_triples(arguments, "strides", num_stages, plans),
            "num_blocks": _read_numbers(arguments, _NUM_BLOCKS_KEYS[name], num_stages, 64),
            "num_convs": _read_numbers(arguments, "n_conv_per_stage_decoder", num_stages - 1, 64),
            **_read_layers(arguments),
        },
    }


def _translate_old_plans(configuration: Fields, name: str) -> Fields:
    """Return the arguments of a network from plans of nnU-Net 2.0 to 2.3, which have no key `architecture`."""
    num_blocks = configuration.get("n_conv_per_stage_encoder")
    count = len(num_blocks) if isinstance(num_blocks, list) else 0
    first, largest = (configuration.get(key) for key in ("UNet_base_num_features", "unet_max_num_features"))
    if type(first) is not int or type(largest) is not int or not 1 <= count <= MAX_STAGES:
        raise UnsupportedPackage(f"{configuration.locate('UNet_base_num_features')}: expected the number of features.")
    arguments = {
        "features_per_stage": [min(first * 2**stage, largest) for stage in range(count)],
        "conv_op": "Conv3d",
        "kernel_sizes": configuration.get("conv_kernel_sizes"),
        "strides": configuration.get("pool_op_kernel_sizes"),
        _NUM_BLOCKS_KEYS.get(name, ""): num_blocks,
        "n_conv_per_stage_decoder": configuration.get("n_conv_per_stage_decoder"),
        "conv_bias": True,
        "norm_op": "InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": "LeakyReLU",
    }
    return Fields(arguments, configuration.locate())


def _get_class_name(arguments: Fields, key: str) -> str:
    return arguments.get_string(key, "").rpartition(".")[2]


def _read_numbers(arguments: Fields, key: str, count: int, limit: int) -> list[int]:
    value = arguments.get(key)
    return _check_sizes([value] * count if isinstance(value, int) else value, arguments.locate(key), limit, count)


def _read_triples(arguments: Fields, key: str, count: int, plans: Plans) -> list[list[int]]:
    """Return one size (z, y, x) per stage, in the order of the axes of the images."""
    value, location = arguments.get(key), arguments.locate(key)
    values = [value] * count if isinstance(value, int) else value
    if not isinstance(values, list) or len(values) != count:
        raise UnsupportedPackage(f"{location}: expected one entry for each of the {count} stages.")
    triples = [[item] * 3 if isinstance(item, int) else item for item in values]
    return [plans.arrange(_check_sizes(triple, location, 64)) for triple in triples]


def _read_layers(arguments: Fields) -> dict[str, Any]:
    """Return the arguments that specify the kinds of layers. Raises UnsupportedPackage for other layers."""
    norm, activation = (_get_class_name(arguments, key) for key in ("norm_op", "nonlin"))
    for key, name, supported in (
        ("norm_op", norm, ("InstanceNorm3d", "BatchNorm3d")),
        ("nonlin", activation, ("LeakyReLU", "ReLU")),
    ):
        if name not in supported:
            raise UnsupportedPackage(f"{arguments.locate(key)}: {name!r:.80} is not one of {', '.join(supported)}.")
    return {
        "conv_bias": arguments.get("conv_bias") is True,
        "norm": norm,
        "norm_arguments": _read_keywords(arguments, "norm_op_kwargs", ("eps", "affine", "momentum")),
        "activation": activation,
        "activation_arguments": _read_keywords(arguments, "nonlin_kwargs", ("negative_slope",)),
    }


def _read_keywords(arguments: Fields, key: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments of a layer. Raises UnsupportedPackage for other names, and for invalid values."""
    keywords = arguments.get_mapping(key)
    for name, value in keywords.as_dict().items():
        if (name not in names and name != "inplace") or not isinstance(value, bool | int | float):
            raise UnsupportedPackage(f"{keywords.locate(name)}: this argument is not supported.")
    return {name: keywords.get(name) for name in names if name in keywords}


def read_normalization(plans: Plans, channel_count: int) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the key `input.normalisation`. Raises UnsupportedPackage for other schemes, and for masks."""
    schemes, masks = (plans.configuration.get(key) for key in ("normalization_schemes", "use_mask_for_norm"))
    location = plans.configuration.locate("normalization_schemes")
    if not isinstance(schemes, list) or len(schemes) != channel_count:
        raise UnsupportedPackage(f"{location}: expected one scheme for each of the {channel_count} channels.")
    if masks is not None and (not isinstance(masks, list) or len(masks) != channel_count):
        raise UnsupportedPackage(f"{plans.configuration.locate('use_mask_for_norm')}: expected one value per channel.")
    channels = [
        _read_scheme(plans, index, scheme, has_mask=bool(masks and masks[index]))
        for index, scheme in enumerate(schemes)
    ]
    return channels[0] if channels.count(channels[0]) == channel_count else channels


def _read_scheme(plans: Plans, index: int, scheme: Any, *, has_mask: bool) -> dict[str, Any]:
    match scheme:
        case "ZScoreNormalization" if has_mask:
            location = plans.configuration.locate("use_mask_for_norm")
            raise UnsupportedPackage(f"{location}: statistics that exclude the background of zeros are not supported.")
        case "ZScoreNormalization":
            return {"kind": "zscore"}
        case "CTNormalization":
            return _read_fixed_statistics(plans.intensities.get_mapping(str(index)))
        case "RescaleTo01Normalization":
            return {"kind": "percentile", "low": 0.0, "high": 100.0}
        case "NoNormalization":
            return {"kind": "range", "low": 0.0, "high": 1.0}
        case "RGBTo01Normalization":
            return {"kind": "range", "low": 0.0, "high": 255.0}
    raise UnsupportedPackage(
        f"{plans.configuration.locate('normalization_schemes')}: {scheme!r:.80} is not one of nnU-Net's own schemes."
    )


def _read_fixed_statistics(properties: Fields) -> dict[str, Any]:
    """Return the normalization with the mean and standard deviation of the training data, clipped to percentiles."""
    keys = ("mean", "std", "percentile_00_5", "percentile_99_5")
    mean, std, low, high = (properties.get(key) for key in keys)
    if not all(type(value) in (int, float) and math.isfinite(value) for value in (mean, std, low, high)):
        raise UnsupportedPackage(f"{properties.locate()}: expected the numbers {', '.join(keys)}.")
    std = max(std, 1e-8)
    return {
        "kind": "range",
        "low": float(mean),
        "high": float(mean + std),
        "clip": [(low - mean) / std, (high - mean) / std],
    }
