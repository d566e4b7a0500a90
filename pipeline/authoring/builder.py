"""`ModelBuilder`, to which modules emit, and `IRTensor`, which stands for a value of its graph.

An IRTensor has a shape and a dtype and no numbers. torch's functions and methods take it: what they call, down to the
operators of torch, is added to the graph. torch itself says which operators these are, and what their results look
like, since the same call is made on tensors of the device meta. So a `forward` that computes with tensors emits too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.utils import _pytree as pytree

from pipeline.argument_checks import FLAG, FUNCTION, MAPPING, NUMBER, PATH, TEXT, WHOLE, Check, a, expects_annotated
from pipeline.errors import OnnxlineError, Unsupported, UsageError
from pipeline.importers.from_torch.operators import describe_operator
from pipeline.importers.from_torch.region import Arguments
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Attr, Graph, InputRef, TensorSpec
from pipeline.ir.builder import GraphFacts, assemble
from pipeline.ir.graph import parts
from pipeline.ops import GraphBuilder
from pipeline.ops.aten import is_call
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


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator of torch, on tensors of the device meta."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class OperatorCalls(ProxyTorchDispatchMode):
    """Lists the operators that a function calls, before torch takes them apart (`aten.linear`, not `aten.addmm`).

    Calls are seen there by torch's own modes alone, so this is one of them (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__(PythonKeyTracer(), "real", pre_dispatch=True)
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(OperatorCall(func, args, kwargs or {}, result))
        return result


class ModelBuilder(GraphBuilder):
    """A Builder that knows parameters, modules and the mode.

    training: whether modules emit what they do in training: Dropout draws, BatchNorm normalises by its batch.
    """

    mistake = UsageError

    def __init__(self, name: str = "model", *, training: bool = False) -> None:
        super().__init__(name)
        self.training = training
        self.scopes: list[tuple[nn.Module, str]] = []
        """The modules that are emitting, each with its path."""
        self._names: dict[int, tuple[str, ...]] = {}
        self._tensors: dict[int, IRTensor] = {}
        self._paths: dict[nn.Module, str] = {}
        self._used: dict[str, int] = {}

    def add_input(self, name: str, spec: TensorSpec) -> IRTensor:
        """Declare the next input of the graph."""
        check_dtype(spec.dtype, DTYPES, f"input {name!r}")
        return IRTensor(self, self.input(self.unique_name(name), spec))

    def register(self, module: nn.Module, prefix: str = "") -> dict[str, IRTensor]:
        """Give a module, and what it holds, their paths and names. Returns the values of parameters and buffers."""
        stored: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        for name, tensor in stored.items():
            full = f"{prefix}.{name}" if prefix else name
            self._names[id(tensor)] = (*self._names.get(id(tensor), ()), full)
            self._tensors.setdefault(id(tensor), IRTensor(self, stored=tensor))
        for path, part in module.named_modules(prefix=prefix):
            self._paths.setdefault(part, path)
        return {name: self._tensors[id(tensor)] for name, tensor in stored.items()}

    def path_of(self, module: nn.Module) -> str | None:
        """Where a module is in the model; None for one that was not registered."""
        return self._paths.get(module)

    @contextmanager
    def within(self, path: str, module: nn.Module) -> Any:
        """What is emitted meanwhile belongs to `module` at `path`, in names and in messages.

        An error of torch, or of the module's own code, becomes one sentence that names the innermost module.
        """
        depth = len(self.scopes)
        self.scopes.append((module, path))
        try:
            yield
        except OnnxlineError:
            raise
        except Exception as error:
            raise self.refusal(_first_line(error)) from error
        finally:
            del self.scopes[depth:]

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch gives for IR tensors: the operators that it calls are added to the graph.

        Raises:
            UsageError: torch refuses the call, or an operand is none of this graph.
        """
        operands: dict[int, IRTensor] = {}

        def stand_in(item: Any) -> Any:
            if not isinstance(item, IRTensor | torch.Tensor):
                return item
            value = self._operand(item)
            meta = torch.empty(value.shape, dtype=torch_dtype(value.dtype), device="meta")
            operands[id(meta)] = value
            return meta

        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, IRTensor | torch.Tensor)]
        own_args, own_kwargs = pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
        with torch.no_grad(), enable_python_dispatcher(), OperatorCalls() as recorder:
            try:
                result = function(*own_args, **own_kwargs)
            except Exception as error:
                found = " and ".join(f"{text_of(leaf)}" for leaf in leaves)
                raise self.refusal(f"{name_of(function)} found {found}: {_first_line(error)}") from error
        for call in recorder.calls:
            self._emit_call(call, operands)
        return pytree.tree_map_only(torch.Tensor, lambda meta: operands[id(meta)], result)

    def emit_several(
        self,
        kind: str,
        inputs: Sequence[IRTensor],
        outputs: Mapping[str, TensorSpec],
        attrs: Mapping[str, Attr] | None = None,
    ) -> tuple[IRTensor, ...]:
        """Add an op by its kind: how each result is called in its module, and what it looks like."""
        declared = [(self.name_here(name), spec) for name, spec in outputs.items()]
        operands = [self._operand(tensor).vid for tensor in inputs]
        vids = self.emit(kind, operands, declared, attrs, name=declared[0][0], origin=self._path)
        return tuple(IRTensor(self, vid) for vid in vids)

    def write(self, target: IRTensor, after: IRTensor) -> IRTensor:
        """Let a buffer have the value of `after`, now and when a step is done.

        Raises:
            UsageError: the target is no buffer.
        """
        if not target.is_buffer:
            raise self.refusal("forward writes to a tensor in place; expected an operation that gives a new one")
        self.update(target.first_vid, after.vid)
        target.vid = after.vid
        return target

    def refusal(self, problem: str) -> UsageError:
        """The error for what a module cannot take: its place in the model, and the problem."""
        if not self.scopes:
            return UsageError(problem)
        module, path = self.scopes[-1]
        title = " ".join(repr(module).split())
        return UsageError(f"layer {path!r}, {title}: {problem}" if path else f"{title}: {problem}")

    def complete_arguments(self, kind: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """A call of torch says where its operands go, also those in lists."""
        is_complete = any(isinstance(part, InputRef) for item in given.values() for part in parts(item))
        return dict(given) if is_complete else super().complete_arguments(kind, operands, given)

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added, with the updates of buffers and the names of tied weights."""
        shared = {key: names for key, names in self._names.items() if len(names) > 1}
        sources = {self._tensors[key].first_vid: names for key, names in shared.items() if self._tensors[key].is_read}
        facts = GraphFacts(updates=self._updates, sources=sources)
        return assemble(self.name, self._values, self._ops, self._inputs, outputs, self._payloads, facts)

    def declare(self, stored: torch.Tensor) -> int:
        """The vid of a parameter or a buffer, which is declared when it is first read."""
        add = self.param if isinstance(stored, nn.Parameter) else self.state if self.training else self.const
        data = stored.detach()
        return add(self.unique_name(self._names[id(stored)][0]), _spec_of(data), TensorPayload(data))

    def unique_name(self, name: str) -> str:
        """`name`, or with a number after it where it was given before."""
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return name if not count else self.unique_name(f"{name}_{count}")

    def name_here(self, label: str) -> str:
        """A name for what the module at hand calls `label`."""
        return self.unique_name(f"{self._path}.{label}" if self._path else label)

    @property
    def _path(self) -> str:
        return self.scopes[-1][1] if self.scopes else ""

    def _operand(self, item: IRTensor | torch.Tensor) -> IRTensor:
        if isinstance(item, IRTensor):
            if item.builder is not self:
                raise self.refusal(f"an operation reads a tensor of another graph, {item.builder.name!r}")
            return item
        if id(item) in self._tensors:
            return self._tensors[id(item)]
        if isinstance(item, nn.Parameter | nn.Buffer) or item.requires_grad:
            raise self.refusal(
                f"a parameter or buffer of shape {list(item.shape)} is read that no module of the model holds; "
                "expected it as an attribute of a Module, or in a list that is one"
            )
        return IRTensor(self, self.const(self.name_here("const"), _spec_of(item), TensorPayload(item)))

    def _emit_call(self, call: OperatorCall, operands: dict[int, IRTensor]) -> None:
        """Add an operator of torch, and put its results into `operands`, by the ids of the tensors that stand for them.

        Raises:
            UsageError: the operator writes in place, or has an argument that the IR cannot hold.
        """
        operator = describe_operator(call.target)
        arguments = Arguments(lambda meta: operands[id(meta)].vid)
        label = label_of(operator.kind)
        if operator.written:
            raise self.refusal(f"{label} writes to a tensor in place; expected an operation that gives a new one")
        attrs = arguments.read(call, operator)
        results = [item for item in pytree.tree_leaves(call.result) if isinstance(item, torch.Tensor)]
        if not results:
            return
        if isinstance(dim := attrs.get("dim"), int) and arguments.inputs:
            self._check_axis(IRTensor(self, arguments.inputs[0]), dim, results[0].dim())
        name = self.name_here(label)
        names = [name] if len(results) == 1 else [f"{name}_{place}" for place in range(len(results))]
        declared = [(own, _spec_of(meta)) for own, meta in zip(names, results, strict=True)]
        vids = self.emit(operator.kind, arguments.inputs, declared, attrs, name=name, origin=self._path)
        operands |= {id(meta): IRTensor(self, vid) for meta, vid in zip(results, vids, strict=True)}

    def _check_axis(self, x: IRTensor, dim: int, result_rank: int) -> None:
        """Refuse an axis that is not there, which some operators of torch take on the device meta."""
        limit = max(x.rank, 1)
        if result_rank <= x.rank and not -limit <= dim < limit:
            raise self.refusal(f"found axis {dim} of {text_of(x)}, expected {-limit} to {limit - 1}")


def _delegated(name: str) -> Callable[..., Any]:
    """torch's method of this name, such as `__add__`, as one of IR tensors."""

    def method(self: IRTensor, *args: Any) -> Any:
        return _call(getattr(torch.Tensor, name), self, *args)

    return method


class IRTensor:
    """A value of a graph that is being built, with the methods of a tensor of torch."""

    def __init__(self, builder: ModelBuilder, vid: int | None = None, stored: torch.Tensor | None = None) -> None:
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
        return _spec_of(self._stored) if self._stored is not None else self.builder.spec(self.vid)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.sizes)

    @property
    def dtype(self) -> str:
        return self.spec.dtype

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
        return partial(_call, getattr(torch.Tensor, name), self)

    def copy_(self, source: IRTensor) -> IRTensor:
        """Let a buffer have the value of `source` when a step is done."""
        return self.builder.write(self, source)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(function, *args, **(kwargs or {}))

    def __bool__(self) -> Any:
        raise self.builder.refusal(
            "an IR tensor has no numbers, so Python cannot decide by it; expected a decision by shapes or settings"
        )

    __float__ = __int__ = __bool__

    __add__, __radd__, __sub__, __rsub__, __mul__, __rmul__, __truediv__, __rtruediv__ = (
        _delegated(f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
    )
    __matmul__, __rmatmul__, __pow__, __rpow__, __neg__, __abs__, __getitem__, __len__, __iter__ = (
        _delegated(f"__{name}__")
        for name in ("matmul", "rmatmul", "pow", "rpow", "neg", "abs", "getitem", "len", "iter")
    )
    __lt__, __le__, __gt__, __ge__ = (_delegated(f"__{name}__") for name in ("lt", "le", "gt", "ge"))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of torch on IR tensors: by its form in `functional.FORMS` if it has one, else by what it calls."""
    from pipeline.authoring.functional import FORMS  # here, since functional needs IR tensors

    found = next(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, IRTensor))
    form = FORMS.get(function)
    return form(found.builder, *args, **kwargs) if form else found.builder.call(function, args, kwargs)


def label_of(kind: str) -> str:
    """How names and messages call an op: `aten.add.Tensor` is add."""
    return kind.split(".")[1] if is_call(kind) else kind.lower()


def name_of(function: Callable[..., Any]) -> str:
    """How messages call a function of torch: `__add__` is add."""
    return getattr(function, "__name__", str(function)).strip("_")


def text_of(tensor: IRTensor | torch.Tensor) -> str:
    """Dtype and shape, such as float32[2, 3]."""
    spec = tensor.spec if isinstance(tensor, IRTensor) else _spec_of(tensor)
    return f"{spec.dtype}{list(spec.shape)}"


def _spec_of(data: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(data.shape), dtype_name(data.dtype))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


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
        "Sequence[int]": Check(_are_sizes, "whole numbers, such as (2, 3)"),
        "Pair": Check(lambda item: type(item) is int or _are_sizes(item), "a whole number or a pair of them"),
        "int | Sequence[int]": Check(lambda item: type(item) is int or _are_sizes(item), "a whole number, or several"),
        "tuple[float, float]": Check(
            lambda item: isinstance(item, tuple | list) and len(item) == 2 and all(map(NUMBER.accepts, item)),
            "two numbers",
        ),
    }
)
"""A decorator for what users of this room call: an argument of another type than its annotation is refused."""
