"""Networks that come as programs: TorchScript files, checked before and after they are parsed.

TorchScript is no Python, but it is a program: it can read and write files (`aten::from_file`, `aten::save`), and the
`__setstate__` of a module runs while the file is loaded. So a file with such a method, a hook, or a class of an
extension is refused unread, and of a parsed program only one whose every operator is on a list is ever called.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel

# What networks compute with. Control flow, numbers, lists and tensors; nothing that names a file, a class or a process.
PRIM = frozenset(
    [
        "Constant",
        "GetAttr",
        "ListConstruct",
        "ListUnpack",
        "TupleConstruct",
        "TupleUnpack",
        "TupleIndex",
        "If",
        "Loop",
        "NumToTensor",
        "Uninitialized",
        "RaiseException",
        "unchecked_cast",
        "dtype",
        "device",
        "is_cuda",
        "min",
        "max",
        "data",
        "ConstantChunk",
        "abs",
        "layout",
        "isinstance",
        "DictConstruct",
        "requires_grad",
        "unchecked_unwrap_optional",
        "AutogradAnyNonZero",
        "ImplicitTensorToNum",
    ]
)
ATEN = frozenset(
    [
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_upsample_lanczos2d_aa",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "Bool",
        "Float",
        "FloatImplicit",
        "Int",
        "IntImplicit",
        "ScalarImplicit",
        "__and__",
        "__contains__",
        "__derive_index",
        "__getitem__",
        "__is__",
        "__isnot__",
        "__not__",
        "__or__",
        "__range_length",
        "_convolution",
        "_convolution_mode",
        "_native_batch_norm_legit_no_training",
        "_set_item",
        "_softmax",
        "abs",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool3d",
        "add",
        "add_",
        "addcmul",
        "addmm",
        "alpha_dropout",
        "amax",
        "amin",
        "append",
        "arange",
        "argmax",
        "argmin",
        "as_tensor",
        "avg_pool2d",
        "avg_pool3d",
        "baddbmm",
        "batch_norm",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bmm",
        "broadcast_tensors",
        "bilinear",
        "cat",
        "ceil",
        "celu",
        "chunk",
        "clamp",
        "clamp_",
        "clamp_max",
        "clamp_min",
        "clone",
        "concat",
        "constant_pad_nd",
        "contiguous",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose2d",
        "conv_transpose3d",
        "copy",
        "copy_",
        "cos",
        "cosine_similarity",
        "cumsum",
        "detach",
        "device",
        "dim",
        "div",
        "div_",
        "dropout",
        "dropout_",
        "einsum",
        "elu",
        "elu_",
        "eq",
        "erf",
        "exp",
        "expand",
        "expand_as",
        "extend",
        "eye",
        "feature_alpha_dropout",
        "feature_dropout",
        "feature_dropout_",
        "fill_",
        "flatten",
        "flip",
        "floor",
        "floor_divide",
        "floordiv",
        "format",
        "full",
        "full_like",
        "gather",
        "ge",
        "gelu",
        "glu",
        "group_norm",
        "gt",
        "hardsigmoid",
        "hardsigmoid_",
        "hardswish",
        "hardswish_",
        "hardtanh",
        "hardtanh_",
        "index_select",
        "insert",
        "instance_norm",
        "is_floating_point",
        "isnan",
        "item",
        "layer_norm",
        "le",
        "leaky_relu",
        "leaky_relu_",
        "len",
        "lerp",
        "linear",
        "linspace",
        "list",
        "log",
        "log1p",
        "log_softmax",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "logsigmoid",
        "lt",
        "masked_fill",
        "masked_fill_",
        "matmul",
        "max",
        "max_pool2d",
        "max_pool3d",
        "max_pool3d_with_indices",
        "maximum",
        "mean",
        "meshgrid",
        "min",
        "minimum",
        "mish",
        "mul",
        "mul_",
        "narrow",
        "ne",
        "neg",
        "new_full",
        "new_zeros",
        "norm",
        "numel",
        "ones",
        "ones_like",
        "pad",
        "permute",
        "pixel_shuffle",
        "pixel_unshuffle",
        "pop",
        "pow",
        "prelu",
        "prod",
        "reciprocal",
        "reflection_pad3d",
        "relu",
        "relu6",
        "relu6_",
        "relu_",
        "remainder",
        "repeat",
        "repeat_interleave",
        "replication_pad2d",
        "replication_pad3d",
        "reshape",
        "resolve_conj",
        "reverse",
        "rms_norm",
        "roll",
        "rsqrt",
        "rsub",
        "scaled_dot_product_attention",
        "select",
        "selu",
        "selu_",
        "sigmoid",
        "sigmoid_",
        "sign",
        "silu",
        "silu_",
        "sin",
        "size",
        "slice",
        "softmax",
        "softplus",
        "split",
        "split_with_sizes",
        "sqrt",
        "square",
        "squeeze",
        "squeeze_",
        "stack",
        "std",
        "sub",
        "sub_",
        "sum",
        "swapaxes",
        "t",
        "tan",
        "tanh",
        "tanh_",
        "tensor",
        "threshold",
        "threshold_",
        "tile",
        "to",
        "transpose",
        "tril",
        "triu",
        "type_as",
        "unbind",
        "unflatten",
        "unsqueeze",
        "unsqueeze_",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
        "var",
        "var_mean",
        "view",
        "view_as",
        "warn",
        "where",
        "zeros",
        "zeros_like",
    ]
)
# Methods that run while a file is loaded, hooks that run beside the graph that is looked at, and classes of extensions.
FORBIDDEN = (b"__setstate__", b"__getstate__", b"__forward_hooks__", b"__forward_pre_hooks__", b"torch.classes")
# Entries of an archive that hold the bytes of one tensor. torch finds files by their names in any case, we do not.
TENSOR = re.compile(r"[^/]+/(data|constants)/[0-9]+")


class Program(nn.Module):
    """A program that torch runs in an interpreter of its own; nothing of it can be taken apart or fused by us."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.script = script

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z, y, x]. Of several outputs the first."""
        scores = self.script(x)
        first: Tensor = scores[0] if isinstance(scores, tuple | list) else scores
        return first


def load_torchscript(path: Path) -> Program:
    """Read a TorchScript file that was not looked at before. Raises BrokenModel, naming what is refused."""
    _check_source(path)
    try:
        script = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        refused = sorted({kind for kind in _operators(script.inlined_graph) if not _harmless(kind)})
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise BrokenModel(f"{path}: cannot be read as TorchScript: {str(error).strip().splitlines()[0]}") from error
    if refused:
        raise BrokenModel(
            f"{path}: its program uses {', '.join(refused)}, which is not on the list in service/programs.py."
        )
    return Program(script).eval().requires_grad_(requires_grad=False)


def _check_source(path: Path) -> None:
    """Nothing of a file may run while it is loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if not any("/code/" in entry.filename for entry in entries):
                raise BrokenModel(f"{path}: not a TorchScript file as torch.jit.save writes it.")
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED:
                    _refuse_bomb(path, entry)
                if not TENSOR.fullmatch(entry.filename):
                    content = archive.read(entry)
                    for word in FORBIDDEN:
                        if word in content:
                            raise BrokenModel(f"{path}: {entry.filename} has {word.decode()}, which is never run.")
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise BrokenModel(f"{path}: cannot be read as TorchScript: {error}") from error


def _refuse_bomb(path: Path, entry: zipfile.ZipInfo) -> None:
    if entry.file_size > 2**26:
        raise BrokenModel(f"{path}: {entry.filename} is compressed, which torch.jit.save does with code only.")


def _operators(block: torch._C.Graph | torch._C.Block) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _operators(inner)


def _harmless(kind: str) -> bool:
    space, _, name = kind.partition("::")
    return name in (ATEN if space == "aten" else PRIM if space == "prim" else frozenset())
