"""The engine's own logic, with a stand-in for the package: no GPU was at hand to run the real one."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from service.core import config
from service.core.errors import BadParameter
from service.engine import backends
from service.engine.plans import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Package(ModuleType):
    """Stands for torch_tensorrt: "builds" an engine that runs the exported program."""

    def __init__(self):
        super().__init__("torch_tensorrt")
        self.__spec__ = importlib.machinery.ModuleSpec("torch_tensorrt", None)
        self.options = {}
        self.dynamo = SimpleNamespace(compile=self._compile)

    def _compile(self, program, **options):
        self.options = options
        return program.module()


@pytest.fixture
def package(monkeypatch):
    made = Package()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", made)
    return made


@pytest.fixture
def module():
    return nn.Conv3d(1, 2, 3, padding=1).eval().requires_grad_(requires_grad=False)


def engine_config():
    return EngineConfig("tensorrt", "fp32", "contiguous", 2)


def test_without_the_package_it_says_how_to_get_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match="pip install torch-tensorrt"):
        backends.build(module, torch.zeros(2, 1, 4, 4, 4), engine_config(), config.Engine())


@pytest.mark.parametrize(("precision", "disabled"), [("high", False), ("highest", True)])
def test_it_builds_for_one_shape_and_the_precision_that_is_set(module, package, precision, disabled):
    example = torch.rand(2, 1, 4, 4, 4)
    network = backends.build(module, example, engine_config(), config.Engine(matmul_precision=precision)).network
    assert package.options["disable_tf32"] is disabled
    assert package.options["device"] == CPU
    assert [tuple(tensor.shape) for tensor in package.options["arg_inputs"]] == [(2, 1, 4, 4, 4)]
    torch.testing.assert_close(network(example), module(example))


@pytest.mark.parametrize("other", [torch.rand(1, 1, 4, 4, 4), torch.rand(2, 1, 4, 4, 4).half()])
def test_another_shape_or_dtype_is_refused(module, package, other):
    network = backends.build(module, torch.rand(2, 1, 4, 4, 4), engine_config(), config.Engine()).network
    with pytest.raises(BadParameter, match="was made for"):
        network(other)


def test_only_gpus_have_it():
    def engines(device):
        return {each.engine for each in backends.list_configs(config.Engine(), device, ("fp32",), 2)}

    assert "tensorrt" in engines(CUDA)
    assert "tensorrt" not in engines(CPU)


def test_whoever_uses_it_is_told_that_nobody_has():
    assert "never run on a GPU" in backends.BACKENDS["tensorrt"].caution
