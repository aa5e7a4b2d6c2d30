"""Write a network to an ONNX or torch.export file, and check the file by loading it again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.exporters.model_keys import FILE_NAME, NAME
from service.models.graphs.batches import FixedBatchNetwork
from service.models.graphs.onnx.network import load_onnx
from service.models.graphs.torch_export import load_torch_export
from service.models.network import count_weight_bytes

GraphKind = Literal["onnx", "pt2"]

# Version of the standard operators, which onnxruntime 1.12, OpenVINO 2022.3 and later versions support.
OPSET_VERSION = 17
INPUT_NAME, OUTPUT_NAME = "image", "scores"
# Largest protocol buffer, minus space for the graph itself.
MAX_ONNX_WEIGHT_BYTES = 2**31 - 2**24
# Maximum difference between the scores of the network and of the file, relative to the largest absolute score, or to 1
# if all scores are smaller.
TOLERANCE = 1e-3
# Errors that exporters raise for operations that they do not support, also if they are raised inside torch's compiler.
_EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError)


class Flexibility(NamedTuple):
    """Sizes that a graph accepts, in addition to the sizes of one window.

    has_any_batch  whether the graph accepts any number of windows
    multiple       the spatial sizes may be multiples of these numbers (z, y, x); None if they are fixed
    """

    has_any_batch: bool
    multiple: tuple[int, int, int] | None

    def describe(self) -> str:
        """Describe the sizes for the operator, as the end of a sentence."""
        sizes = "windows of one size" if self.multiple is None else f"sizes that are multiples of {self.multiple}"
        return f"{sizes}, in batches of {'any size' if self.has_any_batch else 'one window'}"


class NetworkFile(NamedTuple):
    """A written file: what sizes it accepts, and the largest difference of its scores from those of the network."""

    flexibility: Flexibility
    difference: float


class Graph(NamedTuple):
    """A network to export.

    window    normalized image [1, C, z, y, x] for which the network is recorded and checked
    multiple  multiples that spatial sizes must have (z, y, x); None if the network accepts only the size of `window`
    keys      model keys to store in the file
    """

    network: nn.Module
    window: Tensor
    multiple: tuple[int, int, int] | None
    keys: dict[str, Any]


def write_network(graph: Graph, path: Path, kind: GraphKind) -> NetworkFile:
    """Write a network to a file that accepts as many sizes as possible.

    Raises UnsupportedPackage if the network cannot be exported, or if the scores of the file differ.
    """
    write, load = (_write_onnx, load_onnx) if kind == "onnx" else (_write_torch_export, load_torch_export)
    attempts = (
        Flexibility(has_any_batch=True, multiple=graph.multiple),
        Flexibility(has_any_batch=True, multiple=None),
        Flexibility(has_any_batch=False, multiple=None),
    )
    reason = ""
    for flexibility in dict.fromkeys(attempts):
        try:
            with warnings.catch_warnings():
                # The ONNX exporter that traces is deprecated, and warns of each size that becomes a constant.
                warnings.simplefilter("ignore")
                write(graph, path, flexibility)
            return NetworkFile(flexibility, _check_file(graph, path, flexibility, load))
        except (BrokenModel, *_EXPORT_ERRORS) as error:
            lines = str(error).removeprefix(f"{path}: ").strip().splitlines() or [type(error).__name__]
            reason = reason or lines[0]
    raise UnsupportedPackage(f"The network cannot be exported as {kind}: {reason:.300}")


def _write_onnx(graph: Graph, path: Path, flexibility: Flexibility) -> None:
    if count_weight_bytes(graph.network) > MAX_ONNX_WEIGHT_BYTES:
        raise ValueError("the weights are larger than 2 GiB, the maximum for ONNX files; export them as pt2")
    onnx = _import_onnx()
    axes = {0: "batch"} if flexibility.has_any_batch else {}
    if flexibility.multiple is not None:
        axes |= {2: "z", 3: "y", 4: "x"}
    torch.onnx.export(
        graph.network,
        (graph.window,),
        path,
        dynamo=False,
        opset_version=OPSET_VERSION,
        input_names=[INPUT_NAME],
        output_names=[OUTPUT_NAME],
        dynamic_axes={INPUT_NAME: axes, OUTPUT_NAME: axes} if axes else None,
    )
    model = onnx.load(path)
    onnx.helper.set_model_props(model, {NAME: json.dumps(graph.keys)})
    onnx.save(model, path)


def _import_onnx() -> Any:
    try:
        return import_module("onnx")
    except ImportError as error:
        raise UnsupportedPackage(
            "The package onnx is not installed. Install it with: pip install 'stackseg[onnx]'"
        ) from error


def _write_torch_export(graph: Graph, path: Path, flexibility: Flexibility) -> None:
    image, sizes = graph.window, dict[int, Any]()
    if flexibility.has_any_batch:
        # torch.export treats a size of 1 as a constant.
        image, sizes[0] = torch.cat((image, image)), torch.export.Dim("batch", min=1)
    if flexibility.multiple is not None:
        for axis, (name, factor) in enumerate(zip("zyx", flexibility.multiple, strict=True), start=2):
            sizes[axis] = factor * torch.export.Dim(f"{name}_multiple", min=1)
            if image.shape[axis] == factor:
                image = torch.cat((image, image), axis)
    program = torch.export.export(graph.network, (image,), dynamic_shapes=(sizes,) if sizes else None, strict=False)
    torch.export.save(program, path, extra_files={FILE_NAME: json.dumps(graph.keys)})


@torch.inference_mode()
def _check_file(
    graph: Graph, path: Path, flexibility: Flexibility, load: Callable[[Path, Sequence[int]], nn.Module]
) -> float:
    """Return the largest difference between the scores of the network and of the file, for all kinds of sizes.

    Raises BrokenModel if it is too large, or if the file does not accept a size.
    """
    with torch.inference_mode(mode=False):
        loaded_network = load(path, graph.window.shape[1:])
    if flexibility.has_any_batch and isinstance(loaded_network, FixedBatchNetwork):
        raise BrokenModel("the graph accepts only one batch size")
    images = [graph.window]
    if flexibility.multiple is not None:
        size = [length + step for length, step in zip(graph.window.shape[2:], flexibility.multiple, strict=True)]
        shape = (*graph.window.shape[:2], *size)
        images.append(torch.rand(shape, generator=torch.Generator().manual_seed(0)))
    return max(_compare(graph.network, loaded_network, image) for image in images)


def _compare(network: nn.Module, loaded_network: nn.Module, image: Tensor) -> float:
    expected_scores, scores = network(image), loaded_network(image)
    if scores.shape != expected_scores.shape:
        raise BrokenModel(f"the scores have the shape {tuple(scores.shape)}, not {tuple(expected_scores.shape)}")
    difference = float((scores - expected_scores).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected_scores.abs().max())):
        raise BrokenModel(f"the scores of the file differ from those of the network by {difference:.3g}")
    return difference
