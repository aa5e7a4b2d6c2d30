"""Choose the output of a graph that contains the scores.

Networks with deep supervision or auxiliary heads have several outputs, and the order of these outputs varies.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten_with_path

from service.core.errors import BrokenModel
from service.models.graphs.graph_module import Shape, infer_shapes


class OutputQuery(NamedTuple):
    """Description of the output that contains the scores.

    num_channels  number of channels of the scores
    name          name of the output, or None to choose the output by its shape
    """

    num_channels: int
    name: str | None = None


def choose_output(shapes: Mapping[str, Shape], window_shape: Sequence[int], query: OutputQuery | None) -> str:
    """Return the name of the output with the scores.

    shapes        shapes of all outputs by name, for a batch of windows
    window_shape  shape [C, z, y, x] of a window
    query         None to choose the first output

    If there is a single output, it is returned regardless of its shape. Raises BrokenModel, with the names and shapes
    of all outputs, if no output or several outputs have the shape of the scores.
    """
    names = list(shapes)
    if not names:
        raise BrokenModel("the network has no output that is a tensor computed from the image.")
    if query is None or (len(names) == 1 and query.name is None):
        return names[0]
    listing = ", ".join(f"{name!r} ({' x '.join(map(str, shape))})" for name, shape in shapes.items())
    if query.name is not None:
        if query.name not in shapes:
            raise BrokenModel(f"weights.output: there is no output {query.name!r}. The outputs are {listing}.")
        return query.name
    return _choose_by_shape(shapes, (query.num_channels, *window_shape[1:]), listing)


def _choose_by_shape(shapes: Mapping[str, Shape], score_shape: Shape, listing: str) -> str:
    fitting_names = [name for name, shape in shapes.items() if shape[1:] == score_shape]
    if len(fitting_names) == 1:
        return fitting_names[0]
    expected = " x ".join(map(str, score_shape))
    if not fitting_names:
        raise BrokenModel(
            f"the network has {len(shapes)} outputs: {listing}. None of them has the shape of the scores, "
            f"batch x {expected} (the number of entries in outputs, and input.roi_size)."
        )
    raise BrokenModel(
        f"the network has {len(shapes)} outputs: {listing}. Several of them have the shape of the scores, batch x "
        f"{expected}. Choose one with weights.output in model.yaml, or with the option --output-tensor of the import, "
        f"such as --output-tensor {shlex.quote(fitting_names[0])}"
    )


def flatten_outputs(result: Any) -> dict[str, tuple[tuple[str | int, ...], Tensor]]:
    """Return the paths and tensors in nested lists, tuples and dictionaries, by name, such as `out` or `aux.0`."""
    leaves, _ = tree_flatten_with_path(result)
    outputs = dict[str, tuple[tuple[str | int, ...], Tensor]]()
    for path, value in leaves:
        keys = tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))) for key in path)
        if isinstance(value, Tensor):
            outputs[".".join(map(str, keys)) or "0"] = (keys, value)
    return outputs


def select_output(
    network: GraphModule, names: Sequence[str], window_shape: Sequence[int], query: OutputQuery | None, batch_size: int
) -> GraphModule:
    """Replace the outputs of a graph with the one that contains the scores, and return the network.

    names       names of the outputs, in the order of the tuple that the graph returns
    batch_size  number of windows for which the shapes are inferred

    Raises BrokenModel if the network does not accept a window, or if the output cannot be chosen.
    """
    (output,) = (node for node in network.graph.nodes if node.op == "output")
    nodes: dict[str, Node] = dict(zip(names, output.args[0], strict=True))
    shapes = dict(_infer_output_shapes(network, nodes, (batch_size, *window_shape)))
    output.args = (nodes[choose_output(shapes, window_shape, query)],)
    network.recompile()
    return network


def _infer_output_shapes(network: GraphModule, nodes: Mapping[str, Node], shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of the outputs that the network can compute for an image of this shape."""
    try:
        shapes = infer_shapes(network, shape)
    except BrokenModel:
        if len(nodes) == 1:
            raise
    else:
        yield from ((name, shapes[node]) for name, node in nodes.items() if node in shapes)
        return
    # One of the outputs, such as a classification of the whole image, may require images of a different size.
    problems = list[BrokenModel]()
    for index, name in enumerate(nodes):
        try:
            yield name, _infer_single_output_shape(network, index, shape)
        except BrokenModel as error:
            problems.append(error)
    if len(problems) == len(nodes):
        raise problems[0]


def _infer_single_output_shape(network: GraphModule, index: int, shape: Shape) -> Shape:
    """Return the shape of one output, without computing the other outputs."""
    copied_network = GraphModule(network, copy.deepcopy(network.graph))
    (output,) = (node for node in copied_network.graph.nodes if node.op == "output")
    output.args = (output.args[0][index],)
    copied_network.graph.eliminate_dead_code()
    shapes = infer_shapes(copied_network, shape)
    result = shapes.get(output.args[0])
    if result is None:
        raise BrokenModel("the output is not a tensor.")
    return result
