"""Read the folder of a StarDist 3D model: `config.json`, `thresholds.json` and `weights_best.h5`.

The format is that of `stardist.models.StarDist3D`, version 0.9. Neither StarDist nor TensorFlow is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.architectures.build import describe_tensors
from service.models.architectures.stardist import ACTIVATIONS, ResNetSettings, UNetSettings
from service.models.importers.draft import Draft, Fields, check_channel_count, find_file, read_mapping
from service.models.spec import Architecture

if TYPE_CHECKING:
    from service.models.importers.programs.keras_weights import KerasWeights

CONFIG_FILE, THRESHOLDS_FILE, WEIGHTS_FILE = "config.json", "thresholds.json", "weights_best.h5"
# Thresholds that StarDist uses if the folder of a model has no `thresholds.json`.
DEFAULT_THRESHOLDS = {"prob": 0.5, "nms": 0.4}
# Settings of the backbones that only affect training, or the names of layers.
# Length up to which a window is enlarged beyond the training patches, for the receptive field.
WINDOW_LENGTH = 96
IGNORED_SETTINGS = {"unet": {"dropout", "prefix"}, "resnet": {"kernel_init"}}
SETTINGS = {"unet": UNetSettings, "resnet": ResNetSettings}
ARCHITECTURES = {"unet": "StarDistUNet", "resnet": "StarDistResNet"}
NORMALIZATION_NOTE = (
    "The package does not specify the normalization. Intensities are normalized with the percentiles 1 and 99.8 of "
    "each channel, as in StarDist's examples. If the model was trained differently, specify --normalisation."
)
CLASSES_NOTE = (
    "The model also predicts {} classes of objects. This output is ignored; the labels do not distinguish classes."
)
THRESHOLDS_NOTE = (
    "The package contains no thresholds.json, so StarDist's defaults are used: a probability of {prob:g} and an "
    "overlap of {nms:g}. Optimize them with `StarDist3D.optimize_thresholds`."
)
ANISOTROPY_NOTE = (
    "The model was trained on voxels with the proportions {}. Stacks are used at their original resolution, unless you "
    "specify the voxel size of the training data with --voxel-size."
)


def is_package(root: Path) -> bool:
    """Return whether a folder contains a model of StarDist, or of another program based on `csbdeep`."""
    return (root / CONFIG_FILE).is_file() and (root / WEIGHTS_FILE).is_file()


def read(root: Path) -> Draft:
    """Read a model into a draft. Raises UnsupportedPackage if it is damaged or uses unsupported settings."""
    config = read_mapping(find_file(root, CONFIG_FILE))
    _check_kind(config)
    architecture, notes = _read_architecture(config), [NORMALIZATION_NOTE]
    if config.get("n_classes") is not None:
        notes.append(CLASSES_NOTE.format(config.get("n_classes")))
    if config.get("anisotropy") is not None:
        notes.append(ANISOTROPY_NOTE.format(" : ".join(f"{n:g}" for n in _read_numbers(config, "anisotropy"))))
    thresholds = _read_thresholds(root, notes)
    num_rays, channels = architecture["arguments"]["n_rays"], architecture["arguments"]["in_channels"]
    distances = [f"distance {number}" for number in range(1, num_rays + 1)]
    multiple = _compute_multiple(architecture["arguments"])
    content: dict[str, Any] = {
        "name": root.name,
        "version": "1",
        "summary": f"Star-convex objects (StarDist 3D, {config.get('backbone')}).",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "architecture": architecture,
        "input": {
            "channels": channels,
            "normalisation": {"kind": "percentile", "low": 1.0, "high": 99.8},
            "roi_size": _choose_window(config, architecture["arguments"], multiple),
            "roi_multiple": multiple,
        },
        "outputs": ["probability", *distances],
        "activation": {"probability": "sigmoid", **dict.fromkeys(distances, "none")},
        "decoding": {
            "kind": "star-convex",
            "rays": _read_rays(config, num_rays),
            "grid": architecture["arguments"]["grid"],
            "threshold": thresholds["prob"],
            "nms_threshold": thresholds["nms"],
        },
    }
    weights_path = find_file(root, WEIGHTS_FILE)
    tensors = _read_tensors(weights_path, Architecture(**architecture), str(config.get("unet_prefix") or ""))
    description = "a model of StarDist 3D"
    return Draft(content, weights_path, "state dict", notes=tuple(notes), description=description, tensors=tensors)


def _check_kind(config: Fields) -> None:
    """Raise UnsupportedPackage if the network is not one of StarDist for images with the axes Z, Y, X."""
    if "n_rays" not in config:
        raise UnsupportedPackage(f"{CONFIG_FILE}: n_rays is missing, so this is not a StarDist model.")
    if config.get("n_dim") != 3:
        raise UnsupportedPackage(
            f"{CONFIG_FILE}: n_dim is {config.get('n_dim')!r}; only 3D models are supported. Train a StarDist3D model, "
            "or import a model of Cellpose, whose networks for planes can segment stacks."
        )
    if config.get("axes") not in ("ZYX", "ZYXC"):
        raise UnsupportedPackage(f"{CONFIG_FILE}: axes: expected ZYX or ZYXC, not {config.get('axes')!r:.80}.")
    if config.get("backbone") not in ARCHITECTURES:
        supported = " and ".join(ARCHITECTURES)
        raise UnsupportedPackage(
            f"{CONFIG_FILE}: backbone: {config.get('backbone')!r:.80} is not supported; {supported} are."
        )


def _read_architecture(config: Fields) -> dict[str, Any]:
    """Return the value of the key `architecture`. Raises UnsupportedPackage for settings that are not supported."""
    backbone = config.get_string("backbone")
    prefix = f"{backbone}_"
    settings = {key.removeprefix(prefix): value for key, value in config.as_dict().items() if key.startswith(prefix)}
    settings = {key: value for key, value in settings.items() if key not in IGNORED_SETTINGS[backbone]}
    for key in settings.keys() & {"activation", "last_activation"}:
        if settings[key] not in ACTIVATIONS:
            raise UnsupportedPackage(
                f"{CONFIG_FILE}: {prefix}{key}: {settings[key]!r:.80} is not supported; {', '.join(ACTIVATIONS)} are."
            )
    arguments = {
        "in_channels": config.get("n_channel_in"),
        "n_rays": config.get("n_rays"),
        "grid": config.get("grid"),
        "net_conv": config.get(f"net_conv_after_{backbone}"),
        **settings,
    }
    architecture = {"name": ARCHITECTURES[backbone], "arguments": arguments}
    try:
        describe_tensors(Architecture.model_validate(architecture))
    except BrokenModel as error:
        raise UnsupportedPackage(f"{CONFIG_FILE}: {' '.join(str(error).split())[:400]}") from error
    check_channel_count(arguments["in_channels"], f"{CONFIG_FILE}: n_channel_in")
    return architecture


def _read_numbers(config: Fields, key: str) -> list[float]:
    """Return three positive numbers (z, y, x). Raises UnsupportedPackage for other values."""
    value = config.get(key)
    if not isinstance(value, list) or len(value) != 3 or not all(_is_positive(number) for number in value):
        raise UnsupportedPackage(f"{config.locate(key)}: expected three positive numbers, not {value!r:.80}.")
    return [float(number) for number in value]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _read_rays(config: Fields, num_rays: int) -> dict[str, Any]:
    rays = config.get_mapping("rays_json")
    settings = rays.get_mapping("kwargs")
    if rays.get("name") != "Rays_GoldenSpiral" or settings.as_dict().keys() - {"n", "anisotropy"}:
        raise UnsupportedPackage(
            f"{CONFIG_FILE}: rays_json: only Rays_GoldenSpiral is supported, not {rays.get('name')!r:.80}."
        )
    if settings.get("n") != num_rays:
        raise UnsupportedPackage(f"{CONFIG_FILE}: rays_json: expected {num_rays} rays, not {settings.get('n')!r:.80}.")
    # StarDist's configuration replaces a missing anisotropy of the rays, also when it is read from a file.
    source = settings if "anisotropy" in settings else config
    anisotropy = _read_numbers(source, "anisotropy") if "anisotropy" in source else None
    return {"kind": "golden-spiral", "count": num_rays, "anisotropy": anisotropy}


def _read_thresholds(root: Path, notes: list[str]) -> dict[str, float]:
    if not (root / THRESHOLDS_FILE).exists():
        notes.append(THRESHOLDS_NOTE.format(**DEFAULT_THRESHOLDS))
        return DEFAULT_THRESHOLDS
    fields = read_mapping(find_file(root, THRESHOLDS_FILE))
    thresholds = {key: fields.get(key) for key in DEFAULT_THRESHOLDS}
    for key, value in thresholds.items():
        if not _is_positive(value) or value >= 1:
            raise UnsupportedPackage(f"{THRESHOLDS_FILE}: {key}: expected a number from 0 to 1, not {value!r:.80}.")
    return thresholds


def _compute_multiple(arguments: Mapping[str, Any]) -> list[int]:
    """Return the numbers of voxels (z, y, x) of which the size of a window must be a multiple."""
    pool, depth = arguments.get("pool", (1, 1, 1)), arguments.get("n_depth", 0)
    return [step * factor**depth for step, factor in zip(arguments["grid"], pool, strict=True)]


def _choose_window(config: Fields, arguments: Mapping[str, Any], multiple: list[int]) -> list[int]:
    """Return the window size: that of the training patches, or larger if they are small for the receptive field.

    With the default overlap of a quarter of a window, scores near the edges of a window, which lack context, are not
    used.
    """
    patch = _read_numbers(config, "train_patch_size")
    settings = SETTINGS[config.get_string("backbone")](**arguments)
    radii = settings.compute_receptive_radii()
    lengths = [max(int(length), min(4 * radius, WINDOW_LENGTH)) for length, radius in zip(patch, radii, strict=True)]
    return [max(-(-length // step), 2) * step for length, step in zip(lengths, multiple, strict=True)]


def _read_tensors(path: Path, architecture: Architecture, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of the network by name. Raises UnsupportedPackage."""
    shapes = describe_tensors(architecture)
    # Check before allocating memory, because the configuration could describe a network of any size.
    if 4 * sum(torch.Size(shape).numel() for shape in shapes.values()) > path.stat().st_size:
        raise UnsupportedPackage(f"{path.name} is smaller than the weights of the network in {CONFIG_FILE}.")
    try:
        module = import_module("service.models.importers.programs.keras_weights")
    except ModuleNotFoundError as error:
        raise UnsupportedPackage(
            f"{path.name} is an HDF5 file. Reading it requires h5py: pip install 'stackseg[vendor]'."
        ) from error
    with module.open_weights(path) as weights:
        return _convert_tensors(weights, shapes, _list_named_layers(architecture, prefix))


def _list_named_layers(architecture: Architecture, prefix: str) -> list[str]:
    """Return the names of the last convolutions of the network. Keras numbers the convolutions before them."""
    settings, names = architecture.arguments, list[str]()
    if architecture.name == "StarDistUNet":
        depth, last = settings.get("n_depth", 2), settings.get("n_conv_per_depth", 2)
        for level in range(depth):
            names += [f"{prefix}down_level_{level}_no_{index}" for index in range(last)]
        names += [f"{prefix}middle_{index}" for index in (*range(last - 1), last)]
        for level in reversed(range(depth)):
            names += [f"{prefix}up_level_{level}_no_{index}" for index in (*range(last - 1), last)]
    return [*names, *(["features"] if settings.get("net_conv", 128) else []), "prob", "dist"]


def _convert_tensors(
    weights: KerasWeights, shapes: Mapping[str, tuple[int, ...]], named_layers: list[str]
) -> dict[str, Tensor]:
    """Return the tensors with these shapes. The order of the convolutions in both networks is the same."""
    convolutions = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 5]
    norms = [name.removesuffix(".running_mean") for name in shapes if name.endswith(".running_mean")]
    layers = [*_list_layers(weights, "conv3d", len(convolutions) - len(named_layers)), *named_layers]
    tensors = dict[str, Tensor]()
    for name, layer in zip(convolutions, layers, strict=True):
        outer, inner, *kernel = shapes[f"{name}.weight"]
        values = weights.read(layer, "kernel", (*kernel, inner, outer))
        tensors[f"{name}.weight"] = torch.from_numpy(values).permute(4, 3, 0, 1, 2).contiguous()
        if f"{name}.bias" in shapes:
            tensors[f"{name}.bias"] = torch.from_numpy(weights.read(layer, "bias", (outer,)))
    names = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    for name, layer in zip(norms, _list_layers(weights, "batch_normalization", len(norms)), strict=True):
        for ours, theirs in names.items():
            tensors[f"{name}.{ours}"] = torch.from_numpy(weights.read(layer, theirs, shapes[f"{name}.{ours}"]))
        tensors[f"{name}.num_batches_tracked"] = torch.tensor(0)
    return tensors


def _list_layers(weights: KerasWeights, kind: str, expected_count: int) -> list[str]:
    layers = weights.list_layers(kind)
    if len(layers) != expected_count:
        raise UnsupportedPackage(
            f"{WEIGHTS_FILE} contains {len(layers)} layers named {kind}, but {CONFIG_FILE} describes a network with"
            f" {expected_count}."
        )
    return layers
