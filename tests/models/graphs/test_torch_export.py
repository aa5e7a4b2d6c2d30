"""Tests of networks from untrusted torch.export files, and of the checks that reject files before anything runs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.engine.cpu import winograd
from service.engine.prepare import prepare
from service.inference.runner.memory_estimate import measure_activation_bytes
from service.models.graphs.torch_export import load_torch_export

SHAPE = (2, 1, 32, 32, 32)


class VariedGraph(nn.Module):
    """A network with computed sizes, a constant, a non-persistent buffer, and a call with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv3d(1, 4, 1)
        self.register_buffer("gain", torch.tensor([1.0, 2.0]), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.mix(x).split(2, dim=1)
        flat = (first * self.gain.view(1, 2, 1, 1, 1) + second).reshape(x.shape[0], 2, -1)
        return (flat + torch.tensor(0.5)).reshape(x.shape[0], 2, *x.shape[2:]), second


def export(network: nn.Module, path: Path, *, is_dynamic: bool = False) -> Path:
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},) if is_dynamic else None
    torch.export.save(torch.export.export(network.eval(), (torch.rand(SHAPE),), dynamic_shapes=sizes), path)
    return path


def rewrite_entry(path: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """Write a copy of an archive with one changed file, and return its path."""
    copy_path = path.with_stem("other")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy_path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            target.writestr(entry, change(content) if entry.filename.endswith(name) else content)
    return copy_path


def rewrite_graph(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a copy of an archive with a changed graph, and return its path."""

    def edit(content: bytes) -> bytes:
        program = json.loads(content)
        change(program)
        return json.dumps(program).encode()

    return rewrite_entry(path, "models/model.json", edit)


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(
        UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1, norm="batch"),
        tmp_path_factory.mktemp("export") / "unet.pt2",
    )


def test_computed_sizes_constants_and_several_results_are_supported(tmp_path: Path) -> None:
    network = VariedGraph()
    loaded_network = load_torch_export(export(network, tmp_path / "varied.pt2", is_dynamic=True), SHAPE[1:])
    images = torch.rand(3, *SHAPE[1:])
    assert torch.allclose(loaded_network(images), network(images)[0])


def test_convolutions_of_a_loaded_network_can_be_replaced_and_measured(tmp_path: Path) -> None:
    network = SegResNet(3, 16, 1, 2)
    loaded_network = load_torch_export(export(network, tmp_path / "network.pt2"), SHAPE[1:])
    assert winograd.count_replaceable(loaded_network) == winograd.count_replaceable(network) > 0
    assert sum(tensor.numel() for tensor in loaded_network.state_dict().values()) == sum(
        p.numel() for p in network.parameters()
    )
    assert measure_activation_bytes(loaded_network, SHAPE) >= 16 * 4 * 2 * 32**3


def test_loaded_network_can_be_prepared_for_bfloat16(unet: Path) -> None:
    loaded_network, images = load_torch_export(unet, SHAPE[1:]), torch.rand(SHAPE)
    prepared_network = prepare(loaded_network, torch.device("cpu"), torch.bfloat16, torch.channels_last_3d)
    with torch.inference_mode():
        scores, expected = prepared_network(images.bfloat16()), loaded_network(images)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, expected, atol=0.1 * float(expected.std()))


DISALLOWED_OPERATORS = """
aten.from_file.default aten.add.__class__ aten.add._schemas aten.add.Tensor.__call__ aten.add.out aten.add.str
aten.mul.left_t aten.full.default aten.item.default prims.device_put.default
"""
# Operators that access memory outside their tensors or crash the process for invalid arguments. The last one can
# modify a tensor that shares its memory without increasing its version counter.
UNSAFE_OPERATORS = """
aten._native_batch_norm_legit_no_training.default aten.repeat_interleave.Tensor aten._upsample_nearest_exact2d.default
aten.div.Tensor_mode aten.div_.Scalar_mode aten.view.dtype
"""


@pytest.mark.parametrize(
    "target",
    [
        "builtins.eval",
        "os.torch.ops.aten.add.Tensor",
        *(f"torch.ops.{name}" for name in (DISALLOWED_OPERATORS + UNSAFE_OPERATORS).split()),
    ],
)
def test_only_allowed_operators_can_be_called(unet: Path, target: str) -> None:
    changed_path = rewrite_graph(
        unet, lambda program: program["graph_module"]["graph"]["nodes"][0].update(target=target)
    )
    with pytest.raises(BrokenModel, match=r"calls|cannot be read"):
        load_torch_export(changed_path, SHAPE[1:])


class ZerosNetwork(nn.Module):
    """A network that creates a tensor from a shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros((1, 1, 32, 32, 32), dtype=torch.float64)


@pytest.mark.parametrize(("length", "reason"), [(2**28, "too large"), (2**62, "too large"), (-1, "negative")])
def test_size_of_created_tensors_is_limited(tmp_path: Path, length: int, reason: str) -> None:
    path = export(ZerosNetwork(), tmp_path / "zeros.pt2")
    with torch.inference_mode():
        assert load_torch_export(path, SHAPE[1:])(torch.ones(SHAPE)).dtype == torch.float32

    def enlarge(program: dict[str, Any]) -> None:
        (call,) = (node for node in program["graph_module"]["graph"]["nodes"] if "zeros" in node["target"])
        call["inputs"][0]["arg"] = {"as_ints": [length, 2, 1, 1, 1]}

    with pytest.raises(BrokenModel, match=reason):
        load_torch_export(rewrite_graph(path, enlarge), SHAPE[1:])


def test_expressions_in_the_file_are_not_evaluated(unet: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    text = f"__import__('pathlib').Path({str(witness)!r}).touch()"

    def plant(program: dict[str, Any]) -> None:
        program["guards_code"] = [text]
        values = program["graph_module"]["graph"]["tensor_values"]
        next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}

    load_torch_export(rewrite_graph(unet, plant), SHAPE[1:])
    assert not witness.exists()


def test_argument_names_do_not_become_code(unet: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    def plant(program: dict[str, Any]) -> None:
        first_input = program["graph_module"]["graph"]["nodes"][0]["inputs"][0]
        first_input["name"] = f"out=__import__('pathlib').Path({str(witness)!r}).touch(), {first_input['name']}"

    with pytest.raises(BrokenModel, match="has no argument"):
        load_torch_export(rewrite_graph(unet, plant), SHAPE[1:])(torch.rand(SHAPE))
    assert not witness.exists()


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"as_string": "'); __import__('os').system('false')  #"}, "cannot be a string"),
        ({"as_int": {"__import__('os')": 1}}, "arguments other than numbers"),
        ({"as_int": {}}, "arguments other than numbers"),
        ({"as_ints": ["', __import__('os').system('false'), '"]}, "arguments other than numbers"),
        ({"as_int": 10**50}, "arguments other than numbers"),
        ({"as_custom_obj": {"name": "x", "class_fqn": "y"}}, "is not supported"),
        ({"as_graph": {"name": "x", "graph": {}}}, "is not supported"),
        ({"as_operator": "torch.ops.aten.save"}, "is not supported"),
        ({"as_tensor": {"name": "__import__('os')"}}, "cannot be read"),
        ({"as_ints": [[[[]]]] * 3}, "cannot be read|does not accept|called with"),
    ],
)
def test_only_numbers_and_plain_strings_become_code(unet: Path, argument: dict[str, Any], reason: str) -> None:
    def plant(program: dict[str, Any]) -> None:
        call = program["graph_module"]["graph"]["nodes"][0]
        next(entry for entry in call["inputs"] if entry["name"] == "stride")["arg"] = argument

    with pytest.raises(BrokenModel, match=reason):
        load_torch_export(rewrite_graph(unet, plant), SHAPE[1:])(torch.rand(SHAPE))


def test_only_plain_strings_are_accepted_as_arguments(tmp_path: Path) -> None:
    class PaddingNetwork(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(x, [1] * 6, mode="replicate")

    path = export(PaddingNetwork(), tmp_path / "padded.pt2")
    assert load_torch_export(path, SHAPE[1:])(torch.rand(SHAPE)).shape == (2, 1, 34, 34, 34)
    code = "replicate'); __import__('os').system('false')  #"
    hostile_path = rewrite_entry(
        path, "models/model.json", lambda content: content.replace(b"replicate", code.encode())
    )
    with pytest.raises(BrokenModel, match="arguments other than numbers, plain strings"):
        load_torch_export(hostile_path, SHAPE[1:])


def test_any_names_of_values_are_accepted_without_becoming_code(unet: Path) -> None:
    hostile_path = rewrite_entry(
        unet, "models/model.json", lambda text: text.replace(b'"conv3d', b'"__import__(\\"os\\")\\n;conv3d')
    )
    images = torch.rand(SHAPE)
    assert b"__import__" in hostile_path.read_bytes()
    assert torch.equal(load_torch_export(hostile_path, SHAPE[1:])(images), load_torch_export(unet, SHAPE[1:])(images))


def test_stored_tensor_with_many_names_is_read_only_once(unet: Path) -> None:
    def repeat(program: dict[str, Any]) -> None:
        specs = program["graph_module"]["signature"]["input_specs"]
        (weight, *_) = (spec for spec in specs if "parameter" in spec)
        for number in range(10_000):
            alias = {**weight["parameter"], "arg": {"name": f"alias_{number}"}}
            specs.append({"parameter": alias})

    network = load_torch_export(rewrite_graph(unet, repeat), SHAPE[1:])
    original = load_torch_export(unet, SHAPE[1:])
    assert sum(t.nbytes for t in network.state_dict().values()) == sum(t.nbytes for t in original.state_dict().values())


def test_total_size_of_tensors_is_limited_to_the_size_of_the_file(unet: Path) -> None:
    """The file has many different views of one stored tensor."""
    part_names = [f"part_{start}" for start in range(100)]

    def shift(content: bytes) -> bytes:
        config = json.loads(content)
        full_entry = next(
            entry for entry in config["config"].values() if {"as_int": 32} in entry["tensor_meta"]["sizes"]
        )
        for start, name in enumerate(part_names):
            sizes = {"sizes": [{"as_int": 3000}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": start}}
            config["config"][name] = full_entry | {"tensor_meta": full_entry["tensor_meta"] | sizes}
        return json.dumps(config).encode()

    def add_names(program: dict[str, Any]) -> None:
        specs = program["graph_module"]["signature"]["input_specs"]
        specs += [{"parameter": {"parameter_name": name, "arg": {"name": name}}} for name in part_names]

    shifted_path = rewrite_entry(unet, "weights_config.json", shift).rename(unet.with_stem("shifted"))
    with pytest.raises(BrokenModel, match="the tensors are larger than the file"):
        load_torch_export(rewrite_graph(shifted_path, add_names), SHAPE[1:])


def test_pickled_sample_inputs_are_not_read(unet: Path) -> None:
    load_torch_export(
        rewrite_entry(unet, "sample_inputs/model.pt", lambda _: b"cos\nsystem\n(S'false'\ntR."), SHAPE[1:]
    )


def halve(content: bytes) -> bytes:
    return content[: len(content) // 2]


def make_replacement(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("weight_0", halve, "does not fit in the"),
        ("weights_config.json", halve, "cannot be read"),
        ("models/model.json", halve, "cannot be read"),
        ("weights_config.json", make_replacement(b'{"as_int": 8}', b'{"as_int": 800000000}'), "does not fit in the"),
        ("weights_config.json", make_replacement(b'"use_pickle": false', b'"use_pickle": true'), "is pickled"),
    ],
)
def test_damaged_files_and_pickled_weights_are_rejected(
    unet: Path, part: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    with pytest.raises(BrokenModel, match=reason):
        load_torch_export(rewrite_entry(unet, part, change), SHAPE[1:])


def test_unrelated_files_are_rejected(bands_network: nn.Module, tmp_path: Path) -> None:
    torch.jit.script(bands_network).save(str(tmp_path / "bands.pt2"))
    with pytest.raises(BrokenModel, match="export the network again"):
        load_torch_export(tmp_path / "bands.pt2", SHAPE[1:])
    (tmp_path / "text.pt2").write_text("no archive")
    with pytest.raises(BrokenModel, match="cannot be read"):
        load_torch_export(tmp_path / "text.pt2", SHAPE[1:])


def test_network_in_training_mode_is_rejected(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)).train()
    torch.export.save(torch.export.export(network, (torch.rand(SHAPE),)), tmp_path / "trained.pt2")
    with pytest.raises(BrokenModel, match="in eval mode"):
        load_torch_export(tmp_path / "trained.pt2", SHAPE[1:])


class ConvertingNetwork(nn.Module):
    """A network with conversions, assertions, and blocks that are exported as nested graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.shape[2] > 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = self.convolution(x.float())
            with torch.no_grad():
                gate = (features > 0).to(torch.float32)
        with torch.autocast("cpu", enabled=False):
            scores = features.float().double() * gate.type_as(x)
        return (
            scores.to(x.dtype).to(device=x.device, dtype=torch.float32).contiguous(memory_format=torch.channels_last_3d)
        )


class ModifyingNetwork(nn.Module):
    """A network that modifies a converted copy, which must not change the original, and a tensor without a copy."""

    def forward(self, x: Tensor) -> Tensor:
        features = x * 2
        half = features.half()
        half.mul_(0)
        same = features.float()
        same.add_(1)
        return torch.cat((features + half, features.to(torch.float32, copy=True).add_(1)), 1)


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize(
    "network", [ConvertingNetwork(), ModifyingNetwork()], ids=lambda network: type(network).__name__
)
def test_conversions_assertions_and_blocks_give_the_scores_of_the_network(
    network: nn.Module, is_dynamic: bool, tmp_path: Path
) -> None:
    loaded_network = load_torch_export(export(network, tmp_path / "n.pt2", is_dynamic=is_dynamic), SHAPE[1:])
    images = torch.rand(3, *SHAPE[1:]) - 0.5
    with torch.inference_mode():
        scores, expected = loaded_network(images), network(images)
        bfloat16_scores = prepare(loaded_network, torch.device("cpu"), torch.bfloat16, torch.channels_last_3d)(
            images.bfloat16()
        )
    # Within autocast, the original network computes in bfloat16.
    assert torch.allclose(scores, expected.float(), atol=0.02)
    assert torch.allclose(bfloat16_scores, scores, atol=0.05)
