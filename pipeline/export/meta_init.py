"""Makes a module without its weights: parameters have shape and dtype but no memory, buffers are computed.

`torch.device("meta")` alone would lose what a constructor computes, such as the frequencies of rotary embeddings, which
no checkpoint holds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

LARGE: Final = 2**24
"""Elements from which a tensor is not even allocated: a system may refuse the memory, though it would stay unused."""


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Put every `nn.Parameter` that a module registers in this block on the meta device; tied ones stay tied.

    Large tensors are made there to begin with. A large buffer therefore has no value afterwards.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None and _elements(args, kwargs) >= LARGE:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _elements(args: Any, kwargs: Any) -> int:
    size = kwargs.get("size", args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)
    dims = size if isinstance(size, list | tuple) else (size,)
    return math.prod(dim for dim in dims if isinstance(dim, int))


def is_weightless(module: nn.Module) -> bool:
    """Whether a parameter has no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def take_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of the module's buffers, and replace its buffers by ones on meta: a trace needs one device.

    Buffers that have no value are left out.
    """
    values = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    empty = {id(buffer): buffer.to("meta") for buffer in values.values()}
    for inner in module.modules():
        own = inner.named_buffers(recurse=False)
        inner._buffers.update({name: empty.get(id(buffer), buffer) for name, buffer in own})
    return values


FACTORIES: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn})
"""Functions by which constructors make parameters."""
