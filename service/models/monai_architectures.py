"""MONAI's networks, where they are needed; `service.models.loader` imports this module with the first of them.

`import monai` imports every part of it, and with that what plots, filters and reads files: seconds of each start, and a
hundred MiB. Networks need none of it, MONAI does without what is not installed, and so it is told that nothing is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Imported by MONAI where they are installed, by `monai.utils.optional_import`.
SPARED = frozenset(["IPython", "PIL", "jsonschema", "matplotlib", "pandas", "requests", "scipy", "skimage"])


class _Absent(MetaPathFinder):
    """Finds that packages are not installed, for one thread: others may need them just now."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._thread = names, threading.get_ident()

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: object = None, /) -> None:
        """None: let others look. Raises ModuleNotFoundError for what is spared."""
        if fullname.partition(".")[0] in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is spared", name=fullname)


@contextmanager
def sparing(names: frozenset[str]) -> Iterator[None]:
    """While this lasts, packages of these names are not found by this thread, unless they were imported before."""
    finder = _Absent(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


with sparing(SPARED):
    from monai.networks.nets.basic_unet import BasicUNet, UpCat
    from monai.networks.nets.dynunet import DynUNet
    from monai.networks.nets.segresnet import SegResNet
    from monai.networks.nets.unet import UNet


class _UpCat(UpCat):
    """MONAI's, without its `torch.jit.isinstance`, over which `torch.compile` breaks the graph."""

    def forward(self, x: Tensor, x_e: Tensor | None) -> Tensor:
        """[B, C, z, y, x], to be enlarged, and what is joined to it; an odd edge of that gets its last plane twice."""
        x = self.upsample(x)
        if x_e is not None:
            missing = [int(have != want) for have, want in zip(x.shape[2:], x_e.shape[2:], strict=True)]
            if self.is_pad and any(missing):
                x = functional.pad(x, [side for after in reversed(missing) for side in (0, after)], "replicate")
            x = torch.cat((x_e, x), dim=1)
        joined: Tensor = self.convs(x)
        return joined


def _basic_unet(**arguments: Any) -> nn.Module:
    network = BasicUNet(**arguments)
    for module in network.modules():
        if type(module) is UpCat:
            module.__class__ = _UpCat
    return network


CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {
    "UNet": UNet,
    "BasicUNet": _basic_unet,
    "DynUNet": DynUNet,
    "SegResNet": SegResNet,
}
