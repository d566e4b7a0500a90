"""Stored weights in a form of their own, which oneDNN or the kernels in C++ chose: what such a form can do, the
operands that it is launched on, and the memory that several programs share.

`launch_in_place` computes an activation after a kernel that could not do so itself.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch

from pipeline.ops.fused import PLAIN, Activation
from pipeline.runtime.kernels.base import Attrs, Launch

nn: Any = vars(torch._C)["_nn"]  # its stubs leave this module out


def launch_in_place(after: Activation, out: torch.Tensor) -> Launch | None:
    """The activation of `out` by torch; None where there is nothing to do."""
    function = FUNCTIONS.get(after.name)
    return function and partial(function, out, *after.numbers, out=out)


def activation_of(attrs: Attrs) -> Activation:
    """The activation of a fused call."""
    return Activation(attrs["activation"], tuple(attrs["numbers"]))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "relu": partial(torch.clamp_min, min=0),
    "gelu": nn.gelu,
    "gelu_tanh": partial(nn.gelu, approximate="tanh"),
    "silu": torch.ops.aten.silu.out,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": torch.ops.aten.hardswish.out,
    "clip": torch.clamp,
    "leaky_relu": torch.ops.aten.leaky_relu.out,
}
"""Torch's function with `out=`, by the name of an activation."""


class PackedMemory:
    """The packed weights of several programs, of which equal ones have one memory.

    Each plan packs its weights, since oneDNN chooses the form for the sizes of the plan. Two plans mostly have the same
    form, and then the memory of the earlier one is taken, as long as a program holds it. Threads may share it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[weakref.ref[Any]]] = {}
        self._lock = threading.Lock()

    def share(self, packed: torch.Tensor) -> torch.Tensor:
        """`packed`, or the earlier one with the very bytes and sizes."""
        mine = _bytes_of(packed)
        if mine is None:
            return packed
        key = tuple(packed.shape), mine.size, mine[:64].tobytes()
        with self._lock:
            known = [ref for ref in self._known.get(key, ()) if ref() is not None]
            for ref in known:
                other = ref()
                if other is not None and np.array_equal(mine, _bytes_of(other)):  # type: ignore[arg-type]
                    return other
            self._known[key] = [*known, weakref.ref(packed)]
        return packed


def _bytes_of(packed: torch.Tensor) -> np.ndarray | None:
    """The memory of a packed weight; None where this torch does not show it."""
    if packed.layout is torch.strided:
        return packed.numpy().reshape(-1).view(np.uint8)
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    count = int(torch.ops.mkldnn._nbytes(packed))
    address = int(torch.ops.mkldnn.data_ptr(packed))
    return np.ctypeslib.as_array((ctypes.c_ubyte * count).from_address(address))


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over two dimensions, with the same pad on both sides."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int


class FusedOperands(NamedTuple):
    """What is computed with a stored weight: `after` of the product or convolution of `x`, and `other`, into `out`.

    bias: one number for each column or channel. other: a tensor like `out`, which a product adds after the activation
    and which has memory of its own; a convolution adds it before, and then it may be the memory of `out`.
    """

    x: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    other: torch.Tensor | None = None
    after: Activation = PLAIN


class StoredForm(Protocol):
    """Something stored in a form of its own."""

    @property
    def nbytes(self) -> int:
        """Memory that it does not share."""
        ...

    def in_memory(self, memory: PackedMemory) -> Self:
        """The same in the memory of an equal one, where there is one."""
        ...


class ProductWeight(StoredForm, Protocol):
    """A stored matrix."""

    def launch(self, of: FusedOperands) -> Launch | None:
        """The product of the rows of `x` with the matrix; None where strides cannot show rows."""
        ...


class ConvolutionWeight(StoredForm, Protocol):
    """Stored kernels of a convolution, and a bias that goes with them."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    def launch(self, of: FusedOperands) -> Launch | None:
        """The convolution of the images `x`; None where strides forbid it."""
        ...
