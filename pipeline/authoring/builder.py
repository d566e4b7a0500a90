"""`ModelBuilder`, to which modules emit, and `IRTensor`, which stands for a value of its graph.

An IRTensor has a shape and a dtype and no numbers: `x + 1` adds an op to the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import torch

from pipeline.argument_checks import FLAG, FUNCTION, MAPPING, NUMBER, PATH, TEXT, WHOLE, Check, a, expects_annotated
from pipeline.authoring.storage import ModuleTensor, Parameter
from pipeline.errors import Unsupported, UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Attr, Graph, TensorSpec
from pipeline.ir.builder import GraphFacts, assemble
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


class ModelBuilder(GraphBuilder):
    """A Builder that knows parameters, modules and the mode.

    training: whether modules emit what they do in training: Dropout draws, BatchNorm normalises by its batch.
    """

    def __init__(self, name: str = "model", *, training: bool = False) -> None:
        super().__init__(name)
        self.training = training
        self._names: dict[ModuleTensor, tuple[str, ...]] = {}
        self._paths: dict[object, str] = {}
        self._tensors: dict[ModuleTensor, IRTensor] = {}
        self._scopes: list[tuple[str, str]] = []
        self._used: dict[str, int] = {}

    def add_input(self, name: str, spec: TensorSpec) -> IRTensor:
        """Declare the next input of the graph."""
        check_dtype(spec.dtype, DTYPES, f"input {name!r}")
        return IRTensor(self, self.input(self.unique_name(name), spec))

    def register(self, paths: Mapping[object, str], names: Mapping[ModuleTensor, tuple[str, ...]]) -> None:
        """Give modules their paths, and parameters and buffers their names: those of a state dict, the own first."""
        self._paths |= paths
        self._names |= names

    def path_of(self, module: object) -> str | None:
        """Where a module is in the model; None for one that was not registered."""
        return self._paths.get(module)

    @property
    def is_within(self) -> bool:
        """Whether a module is emitting."""
        return bool(self._scopes)

    def read(self, stored: ModuleTensor) -> IRTensor:
        """The value of a parameter or a buffer, which is declared when it is first read.

        Raises:
            UsageError: no module of the model holds it.
        """
        if stored not in self._tensors:
            self._tensors[stored] = self._declare(stored)
        return self._tensors[stored]

    def update_stored(self, stored: ModuleTensor, after: IRTensor) -> None:
        """`stored` has the value of `after` when a step is done."""
        self.update(self.read(stored).vid, after.vid)

    def constant(self, data: torch.Tensor) -> IRTensor:
        """A constant of the graph."""
        return IRTensor(self, self.const(self._name_of("const"), _spec_of(data), TensorPayload(data)))

    def emit_one(
        self, kind: str, inputs: Sequence[IRTensor], spec: TensorSpec, attrs: Mapping[str, Attr] | None = None
    ) -> IRTensor:
        """Add an op with one result, named by the module that emits it."""
        name = self._name_of(label_of(kind))
        return self._emit(kind, inputs, [(name, spec)], attrs, name)[0]

    def emit_several(
        self,
        kind: str,
        inputs: Sequence[IRTensor],
        outputs: Mapping[str, TensorSpec],
        attrs: Mapping[str, Attr] | None = None,
    ) -> tuple[IRTensor, ...]:
        """Add an op with several results: how each is called in its module, and what it looks like."""
        declared = [(self._name_of(name), spec) for name, spec in outputs.items()]
        return self._emit(kind, inputs, declared, attrs, declared[0][0])

    def _emit(
        self,
        kind: str,
        inputs: Sequence[IRTensor],
        outputs: Sequence[tuple[str, TensorSpec]],
        attrs: Mapping[str, Attr] | None,
        name: str,
    ) -> tuple[IRTensor, ...]:
        strangers = [tensor for tensor in inputs if tensor.builder is not self]
        if strangers:
            raise self.refusal(f"{label_of(kind)} reads a tensor of another graph, {strangers[0].builder.name!r}")
        path = self._scopes[-1][0] if self._scopes else ""
        vids = self.emit(kind, [tensor.vid for tensor in inputs], outputs, attrs, name=name, origin=path)
        return tuple(IRTensor(self, vid) for vid in vids)

    def _name_of(self, label: str) -> str:
        path = self._scopes[-1][0] if self._scopes else ""
        return self.unique_name(f"{path}.{label}" if path else label)

    @contextmanager
    def within(self, path: str, title: str) -> Iterator[None]:
        """What is emitted meanwhile belongs to the module `title` at `path`, in names and in messages."""
        self._scopes.append((path, title))
        try:
            yield
        finally:
            self._scopes.pop()

    def refusal(self, problem: str) -> UsageError:
        """The error for what a module cannot take: its place in the model, and the problem."""
        if not self._scopes:
            return UsageError(problem)
        path, title = self._scopes[-1]
        return UsageError(f"layer {path!r}, {title}: {problem}" if path else f"{title}: {problem}")

    def build(self, outputs: Sequence[int]) -> Graph:
        """Freeze what was added, with the updates of buffers and the names of tied weights."""
        sources = {
            tensor.vid: self._names[stored] for stored, tensor in self._tensors.items() if len(self._names[stored]) > 1
        }
        facts = GraphFacts(updates=self._updates, sources=sources)
        return assemble(self.name, self._values, self._ops, self._inputs, outputs, self._payloads, facts)

    def _declare(self, stored: ModuleTensor) -> IRTensor:
        names = self._names.get(stored)
        if names is None:
            raise self.refusal(
                f"a parameter or buffer of shape {list(stored.data.shape)} is read that no module of the model holds; "
                "expected it as an attribute of a Module, or in a list that is one"
            )
        declare = self.param if isinstance(stored, Parameter) else self.state if self.training else self.const
        vid = declare(self.unique_name(names[0]), _spec_of(stored.data), TensorPayload(stored.data))
        return IRTensor(self, vid)

    def unique_name(self, name: str) -> str:
        """`name`, or with a number behind it where it was given before."""
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return name if not count else self.unique_name(f"{name}_{count}")


def label_of(kind: str) -> str:
    """How names and messages call an op: `aten.add.Tensor` is add."""
    return kind.split(".")[1] if is_call(kind) else kind.lower()


def _spec_of(data: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(data.shape), dtype_name(data.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class IRTensor:
    """A value of a graph that is being built. It computes with tensors, parameters, buffers and numbers."""

    builder: ModelBuilder
    vid: int

    @property
    def spec(self) -> TensorSpec:
        return self.builder.spec(self.vid)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.sizes

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def rank(self) -> int:
        return self.spec.rank

    def __add__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.add.Tensor", self, other)

    def __radd__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.add.Tensor", other, self)

    def __sub__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.sub.Tensor", self, other)

    def __rsub__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.sub.Tensor", other, self)

    def __mul__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.mul.Tensor", self, other)

    def __rmul__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.mul.Tensor", other, self)

    def __truediv__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.div.Tensor", self, other)

    def __rtruediv__(self, other: Operand) -> IRTensor:
        return emit_binary("aten.div.Tensor", other, self)

    def __neg__(self) -> IRTensor:
        return self.builder.emit_one("aten.neg.default", [self], self.spec)

    @classmethod
    def __torch_function__(cls, function: Callable[..., object], _: object, *operands: object) -> object:
        """Refuse what torch computes: its functions ask here when they are called with an IR tensor."""
        found = next(item for item in _leaves(operands) if isinstance(item, IRTensor))
        name = getattr(function, "__name__", str(function))
        raise found.builder.refusal(
            f"forward calls {name} of torch, which computes with numbers; expected the operations of "
            "pipeline.authoring.functional"
        )

    def __bool__(self) -> bool:
        raise self.builder.refusal(
            "an IR tensor has no numbers, so Python cannot decide by it; expected a decision by shapes or settings"
        )


def _leaves(item: object) -> Iterator[object]:
    """What is in nested sequences and mappings."""
    if isinstance(item, Mapping):
        item = tuple(item.values())
    if not isinstance(item, tuple | list):
        yield item
        return
    for part in item:
        yield from _leaves(part)


Operand: TypeAlias = IRTensor | ModuleTensor | float
"""What an elementwise operation takes: a number has the dtype of the tensor beside it."""


def builder_of(*operands: Operand) -> ModelBuilder:
    """The builder of the first IR tensor.

    Raises:
        UsageError: there is none.
    """
    for operand in operands:
        if isinstance(operand, IRTensor):
            return operand.builder
    found = ", ".join(type(operand).__name__ for operand in operands)
    raise UsageError(f"found {found}, expected an IR tensor among them: what a Module's forward is called with")


def emit_binary(kind: str, left: Operand, right: Operand) -> IRTensor:
    """An elementwise op of two operands, which are broadcast to one shape."""
    builder = builder_of(left, right)
    like = next(operand for operand in (left, right) if isinstance(operand, IRTensor))
    a, b = (_as_tensor(builder, operand, like) for operand in (left, right))
    if a.dtype != b.dtype:
        raise builder.refusal(f"{label_of(kind)} found {a.dtype} and {b.dtype}, expected one dtype: cast() one of them")
    return builder.emit_one(kind, [a, b], TensorSpec(_broadcast(builder, kind, a.shape, b.shape), a.dtype))


def _as_tensor(builder: ModelBuilder, operand: Operand, like: IRTensor) -> IRTensor:
    if isinstance(operand, IRTensor):
        return operand
    if isinstance(operand, ModuleTensor):
        return builder.read(operand)
    if isinstance(operand, float) and like.dtype not in FLOATS and not operand.is_integer():
        raise builder.refusal(
            f"found the number {operand} beside {like.dtype}, expected a whole one: cast() the tensor"
        )
    if not isinstance(operand, int | float) or not math.isfinite(operand):
        raise builder.refusal(f"found {operand!r}, expected an IR tensor, a parameter or a finite number")
    return builder.constant(torch.tensor(operand, dtype=torch_dtype(like.dtype)))


def _broadcast(builder: ModelBuilder, kind: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        raise builder.refusal(
            f"{label_of(kind)} found the shapes {list(a)} and {list(b)}, which do not broadcast"
        ) from None


Readable: TypeAlias = IRTensor | ModuleTensor
"""What an operation reads that computes with tensors alone."""

Pair: TypeAlias = int | tuple[int, int]
"""A number for height and width, or one for each."""


def _are_sizes(item: object) -> bool:
    return isinstance(item, tuple | list) and all(type(size) is int for size in item)


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
        "IRTensor": a(IRTensor, "an IR tensor"),
        "Buffer": a(ModuleTensor, "a Buffer"),
        "Readable": a((IRTensor, ModuleTensor), "an IR tensor, a Parameter or a Buffer"),
        "Operand": a((IRTensor, ModuleTensor, int, float), "an IR tensor, a Parameter, a Buffer or a number"),
        "Sequence[Readable]": Check(
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
