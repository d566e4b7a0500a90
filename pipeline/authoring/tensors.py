"""`IRTensor`, which stands for a value of a graph that is being built, and checks of the arguments of this room.

An IRTensor has a shape and a dtype, and no elements. torch's functions and methods take it, and call its builder: so a
`forward` that was written for torch's tensors emits ops too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.argument_checks import FLAG, FUNCTION, MAPPING, NUMBER, PATH, TEXT, WHOLE, Check, a, expects_annotated
from pipeline.errors import Unsupported, UsageError
from pipeline.ir import Attr, TensorSpec
from pipeline.runtime.tensors import dtype_name, torch_dtype

FLOATS: Final = ("float32", "float64")
"""The dtypes that layers compute in."""

DTYPES: Final = (*FLOATS, "int64", "int32", "bool")


def check_dtype(dtype: str, allowed: Sequence[str], what: str) -> str:
    """`dtype`, if it is one of `allowed`.

    Raises:
        Unsupported: it is another one.
    """
    if dtype not in allowed:
        raise Unsupported(f"{what} has the dtype {dtype}, which is not handled; expected one of {', '.join(allowed)}")
    return dtype


class EmittingBuilder(Protocol):
    """What IR tensors, and the forms of torch's functions, ask of a `ModelBuilder`."""

    name: str
    training: bool

    def spec(self, vid: int) -> TensorSpec: ...

    def declare(self, stored: torch.Tensor) -> int: ...

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def record(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def write(self, target: IRTensor, source: IRTensor | torch.Tensor) -> IRTensor: ...

    def refusal(self, problem: str) -> UsageError: ...

    def emit_several(
        self,
        kind: str,
        inputs: Sequence[IRTensor],
        outputs: Mapping[str, TensorSpec],
        attrs: Mapping[str, Attr] | None = None,
    ) -> tuple[IRTensor, ...]: ...


def _delegate(name: str) -> Callable[..., Any]:
    """torch's method of this name, such as `__add__`, as one of IR tensors."""

    def method(self: IRTensor, *args: Any) -> Any:
        return self.builder.call(getattr(torch.Tensor, name), (self, *args), {})

    return method


def _write_in_place(name: str) -> Callable[..., Any]:
    """`x += y` and the like, which write to `x` as `x.add_(y)` does: Python alone would give `x` another value."""
    return lambda self, other: self.builder.write(self, getattr(self, f"__{name}__")(other))


class IRTensor:
    """A value of a graph that is being built, with the methods of a tensor of torch."""

    def __init__(self, builder: EmittingBuilder, vid: int | None = None, stored: torch.Tensor | None = None) -> None:
        """`stored`: the parameter or buffer that it stands for, which is declared when it is first read."""
        self.builder = builder
        self._vid, self._first, self._stored = vid, vid, stored

    @property
    def vid(self) -> int:
        """Its number in the graph."""
        if self._vid is None:
            assert self._stored is not None
            self._vid = self._first = self.builder.declare(self._stored)
        return self._vid

    @vid.setter
    def vid(self, vid: int) -> None:
        self._vid = vid

    @property
    def first_vid(self) -> int:
        """The number of its value before anything was written to it."""
        return self.vid if self._first is None else self._first

    @property
    def is_read(self) -> bool:
        """Whether the graph declares it."""
        return self._vid is not None

    @property
    def is_buffer(self) -> bool:
        """Whether it stands for a buffer of a module."""
        return self._stored is not None and not isinstance(self._stored, nn.Parameter)

    @property
    def spec(self) -> TensorSpec:
        return spec_of(self._stored) if self._stored is not None else self.builder.spec(self.vid)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.sizes)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.spec.dtype)

    @property
    def device(self) -> torch.device:
        return torch.device(self.spec.device)

    @property
    def rank(self) -> int:
        return self.spec.rank

    def __repr__(self) -> str:
        return f"IRTensor({text_of(self)})"

    def __getattr__(self, name: str) -> Any:
        """torch's method or property of this name; one that writes in place writes to a buffer alone."""
        held = inspect.getattr_static(torch.Tensor, name, None)
        if held is None or name.startswith("__"):
            raise AttributeError(f"an IR tensor has no {name!r}")
        if not callable(held):
            return self.builder.call(getattr, (self, name), {})
        if name.endswith("_") and hasattr(torch.Tensor, name[:-1]):
            return lambda *args, **kwargs: self.builder.write(self, getattr(self, name[:-1])(*args, **kwargs))
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: self.builder.call(method, (self, *args), kwargs)

    def copy_(self, source: Tensor) -> IRTensor:
        """Let a buffer have the value of `source` when a step is done."""
        return self.builder.write(self, source)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = next(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, cls))
        return found.builder.call(function, args, kwargs or {})

    def __bool__(self) -> Any:
        raise self.builder.refusal(
            "an IR tensor has no elements, so Python cannot decide by it; expected a decision by shapes or settings"
        )

    __float__ = __int__ = __complex__ = __bool__

    def __format__(self, spec: str) -> str:
        if spec:
            raise self.builder.refusal(
                f"forward writes an IR tensor as {spec!r}, and it has no elements; expected no format: dtype and shape"
            )
        return repr(self)

    def __reduce_ex__(self, _: object) -> Any:
        """Refuse to be copied or pickled: a copy would be a value of a copy of the graph."""
        raise self.builder.refusal("forward copies or pickles an IR tensor; expected its clone(), or the tensor itself")

    def __iter__(self) -> Iterator[IRTensor]:
        """The slices along the first axis."""
        return iter(self.unbind(0))

    def __setitem__(self, index: object, value: object) -> None:
        raise self.builder.refusal(
            "forward writes to elements of a tensor; expected torch.where, torch.slice_scatter or torch.index_put, "
            "which give a new tensor"
        )

    __add__, __radd__, __sub__, __rsub__, __mul__, __rmul__, __truediv__, __rtruediv__ = (
        _delegate(f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
    )
    __matmul__, __rmatmul__, __pow__, __rpow__, __neg__, __abs__, __getitem__, __len__ = (
        _delegate(f"__{name}__") for name in ("matmul", "rmatmul", "pow", "rpow", "neg", "abs", "getitem", "len")
    )
    __and__, __rand__, __or__, __ror__, __xor__, __rxor__, __invert__ = (
        _delegate(f"__{name}__") for name in ("and", "rand", "or", "ror", "xor", "rxor", "invert")
    )
    __floordiv__, __rfloordiv__, __mod__, __rmod__, __lshift__, __rshift__ = (
        _delegate(f"__{name}__") for name in ("floordiv", "rfloordiv", "mod", "rmod", "lshift", "rshift")
    )
    __iadd__, __isub__, __imul__, __itruediv__, __ifloordiv__, __imod__, __ipow__, __iand__, __ior__, __ixor__ = (
        _write_in_place(name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    )
    __lt__, __le__, __gt__, __ge__, __eq__, __ne__ = (
        _delegate(f"__{name}__") for name in ("lt", "le", "gt", "ge", "eq", "ne")
    )
    __hash__ = object.__hash__


def name_of(function: Callable[..., Any]) -> str:
    """How messages call a function of torch: `__add__` is add."""
    return getattr(function, "__name__", str(function)).strip("_")


def text_of(tensor: IRTensor | torch.Tensor) -> str:
    """Dtype and shape, such as float32[2, 3]."""
    spec = spec_of(tensor)
    return f"{spec.dtype}{list(spec.shape)}"


def spec_of(tensor: IRTensor | torch.Tensor) -> TensorSpec:
    """Shape and dtype."""
    return tensor.spec if isinstance(tensor, IRTensor) else TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


Tensor: TypeAlias = IRTensor | torch.Tensor
"""What a `forward` and the operations of `functional` take: the same code emits to a graph, or computes."""

Operand: TypeAlias = Tensor | float
"""What an elementwise operation takes."""

Pair: TypeAlias = int | tuple[int, int]
"""A number for height and width, or one for each."""


def _are_sizes(item: object) -> bool:
    return isinstance(item, tuple | list) and all(type(size) is int for size in item)


def is_finite_number(item: object) -> bool:
    """Whether `item` is a number that is finite."""
    return isinstance(item, int | float) and math.isfinite(item)


typed: Final = expects_annotated(
    {
        "bool": FLAG,
        "int": WHOLE,
        "float": NUMBER,
        "str": TEXT,
        "str | Path": PATH,
        "Path": a(Path, "a Path"),
        "Observer": FUNCTION,
        "Schedule": FUNCTION,
        "Mapping[str, torch.Tensor]": MAPPING,
        "TensorSpec": a(TensorSpec, "a TensorSpec"),
        "torch.Tensor": a(torch.Tensor, "a tensor"),
        "Tensor": a((IRTensor, torch.Tensor), "an IR tensor, or a tensor of torch"),
        "Operand": a((IRTensor, torch.Tensor, int, float), "an IR tensor, a tensor of torch or a number"),
        "Sequence[Tensor]": Check(
            lambda item: isinstance(item, tuple | list) and bool(item), "IR tensors, one at least"
        ),
        "Sequence[int]": Check(_are_sizes, "integers, such as (2, 3)"),
        "Pair": Check(lambda item: type(item) is int or _are_sizes(item), "an integer or a pair of them"),
        "int | Sequence[int]": Check(lambda item: type(item) is int or _are_sizes(item), "an integer, or several"),
        "tuple[float, float]": Check(
            lambda item: isinstance(item, tuple | list) and len(item) == 2 and all(map(NUMBER.accepts, item)),
            "two numbers",
        ),
    }
)
"""A decorator for what users of this room call: an argument of another type than its annotation is refused."""
