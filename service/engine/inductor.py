"""torch.compile itself, imported with the first network that is compiled: that takes seconds, and many need none."""

from __future__ import annotations

import builtins
from types import FunctionType
from weakref import finalize

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch._inductor import list_mode_options

from service.networks import Network

# All modules are entered through the same forward, of which torch would compile eight variants and no more.
dynamo.recompile_limit = 1024
dynamo.accumulated_recompile_limit = 1024


def make(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """See `service.engine.compiled.make`."""
    options = dict(list_mode_options(mode))
    compiled: Network = torch.compile(_entry(module), fullgraph=True, dynamic=False, options=options)
    return _frozen(compiled) if freeze else compiled


def _entry(module: nn.Module) -> Network:
    """A way into the module with code and globals of its own, and with them what torch keeps of its compilation.

    That of the module's own code would be there for ever, weights included. This is let go of with the network.
    """

    def enter(x: Tensor) -> Tensor:
        scores: Tensor = module(x)
        return scores

    own = FunctionType(enter.__code__.replace(), {"__builtins__": builtins}, closure=enter.__closure__)
    finalize(own, reset_code, own.__code__).atexit = False
    return own


def _frozen(compiled: Network) -> Network:
    """Calls with freezing switched on.

    It must be on while the module is traced, which happens in the first call, before the options of torch.compile are
    in force: given as one of them, freezing silently does nothing.
    """

    def call(x: Tensor) -> Tensor:
        with inductor.patch(freezing=True):
            return compiled(x)

    return call
