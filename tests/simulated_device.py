"""A simulated device with its own memory, for tests of code for GPUs on machines without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# A type of device that CPU builds of torch know, although they cannot compute on it.
DEVICE = torch.device("lazy", 0)
# Operations that copy between devices.
COPIES = {"copy_", "_to_copy"}
# Operations whose results the host needs, so that it waits for a GPU.
WAITING = {"_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "_unique2"}


class DeviceTensor(Tensor):
    """Tensor on the simulated device. Its values are in `host`, a tensor on the CPU."""

    host: Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        tensor: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: object) -> object:
        raise RuntimeError(f"{func} was called outside of SimulatedDevice")


class SimulatedDevice(TorchDispatchMode):
    """Context manager in which tensors can be on `DEVICE`. Only the thread that enters it can use them.

    As on a GPU, operations on tensors of different devices raise RuntimeError. Parameters of networks may be anywhere.

    num_operations  number of operations on the device
    waits           names of the operations for whose results the host has waited
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operations, self.waits = 0, list[str]()

    def __enter__(self) -> SimulatedDevice:
        # Let `torch.tensor` create the tensor on the CPU and then copy it.
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = {**(kwargs or {}), "pin_memory": False} if (kwargs or {}).get("pin_memory") else kwargs or {}
        with self:
            # In inference mode, operations such as `to` have not been divided into their parts.
            result = func.decompose(*args, **options)
        if result is not NotImplemented:
            return result
        name, tensors = func._schema.name.split("::")[1], list_tensors(args, options)
        device_tensors = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if device_tensors and name not in COPIES:
            check_same_device(name, tensors)
        is_on_device = options["device"] == DEVICE if options.get("device") else bool(device_tensors)
        if name == "copy_":
            is_on_device = isinstance(args[0], DeviceTensor)
        # The third argument of `copy_` is whether the host continues during the copy.
        is_blocking = name in WAITING or not (is_on_device or any(argument is True for argument in args[2:]))
        if device_tensors and is_blocking:
            self.waits.append(name)
        self.num_operations += is_on_device or bool(device_tensors)
        result = func(*tree_map(get_host_value, args), **tree_map(get_host_value, options))
        return wrap_tensors(result, device_tensors) if is_on_device else result


def list_tensors(*arguments: object) -> list[Tensor]:
    """Return all tensors in arguments of an operation, except for parameters of networks."""
    leaves = tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]


def check_same_device(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError if tensors are on different devices. Tensors without axes can be on the CPU, as in torch."""
    if any(tensor.dim() for tensor in tensors if not isinstance(tensor, DeviceTensor)):
        places = [(str(tensor.device), tuple(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"{name} was called with tensors on different devices: {places}")


def get_host_value(value: Any) -> Any:
    """Return the argument of an operation with which the CPU computes its result."""
    if isinstance(value, DeviceTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def wrap_tensors(result: Any, inputs: Sequence[DeviceTensor]) -> Any:
    """Return the result of an operation on the device, given its inputs, of which the operation may return one."""
    known = {id(tensor.host): tensor for tensor in inputs}
    return tree_map(lambda x: known[id(x)] if id(x) in known else wrap_tensor(x), result)


def wrap_tensor(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value
