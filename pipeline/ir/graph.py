"""The IR: Values, Ops and the Graph that holds them. Data only, and frozen; `Builder` makes a Graph, `check` checks it.

An Op of the ONNX importer has attributes that are numbers, strings, or tuples of one type. An Op of the torch importer
(kind `aten.linear.default`) holds its whole call: every argument that was given, by its name in the operator's schema.
An `InputRef` stands for each tensor, so None among tensors, tensor lists and keyword tensors keep their positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from passes.suggest import describe_argument
from pipeline.errors import UsageError

Dim = int | str
"""A size, or the name of a dim whose size a run's inputs decide."""

DTYPE_BITS: Final[dict[str, int]] = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "uint16": 16,
    "int16": 16,
    "uint32": 32,
    "int32": 32,
    "uint64": 64,
    "int64": 64,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
}
"""Bits per element by dtype name; the names are torch's, without the `torch.`"""


class SpecError(UsageError, ValueError):
    """A shape or a dtype that no value can have."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and device of a value.

    `shape` holds sizes, or names of dynamic dims; `dtype` is a key of `DTYPE_BITS`.

    Raises:
        SpecError: (a UsageError and a ValueError) an unknown dtype, a shape that is no tuple, or a size that is
            negative, or neither an int nor a name.
    """

    shape: tuple[Dim, ...]
    dtype: str
    device: str = "cpu"
    """Where the value is, as torch writes it: `cpu` or `cuda:0`."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BITS:
            found = repr(self.dtype) if isinstance(self.dtype, str) else describe_argument(self.dtype)
            raise SpecError(f"unknown dtype {found}; known: {', '.join(DTYPE_BITS)}")
        if not isinstance(self.shape, tuple):
            raise SpecError(f"the shape is {describe_argument(self.shape)}; expected a tuple of sizes, such as (2, 3)")
        for axis, dim in enumerate(self.shape):
            if type(dim) is int and dim < 0:
                raise SpecError(f"a size may not be negative: found {dim} at axis {axis}")
            if type(dim) is not int and not (isinstance(dim, str) and dim):
                found = describe_argument(dim)
                raise SpecError(f"a size is an int, or the name of a dim: found {found} at axis {axis}")
        if not isinstance(self.device, str):
            raise SpecError(f"the device is {describe_argument(self.device)}; expected its name, such as 'cpu'")

    def __str__(self) -> str:
        device = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{device}"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether each dim is a size."""
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a static spec.

        Raises:
            ValueError: a dimension is still a name.
        """
        sizes = tuple(dim for dim in self.shape if isinstance(dim, int))
        if len(sizes) != len(self.shape):
            raise ValueError(f"shape {self.shape} still has named dims; give them sizes first, by fix_dims")
        return sizes

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this spec."""
        return self.numel * DTYPE_BITS[self.dtype] // 8


Plain: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""What a kernel's packed attributes and a constraint can hold."""


@dataclass(frozen=True, slots=True)
class InputRef:
    """Stands in `attrs` for the tensor `op.inputs[index]`."""

    index: int


@dataclass(frozen=True, slots=True)
class BodyRef:
    """Stands in `attrs` for the subgraph `op.bodies[index]`."""

    index: int


@dataclass(frozen=True, slots=True)
class TorchConst:
    """A constant of torch by its kind and name: `TorchConst("dtype", "bfloat16")`.

    Kinds: dtype, device, layout, memory_format; other kinds are carried along.
    """

    kind: str
    """Which kind of constant it is."""
    name: str
    """The name of the constant, as in torch: `bfloat16`, `cpu`, `channels_last`."""


@dataclass(frozen=True, slots=True)
class SymExpr:
    """A number that is computed from named dims, as an expression: `SymExpr("2*batch + 1")`."""

    expression: str
    """The text of the expression, in the names of the graph's dims."""


Scalar: TypeAlias = bool | int | float | complex | str | InputRef | BodyRef | TorchConst | SymExpr | None
Attr: TypeAlias = Scalar | tuple["Attr", ...]

SCALARS: Final = (bool, int, float, str, complex, InputRef, BodyRef, SymExpr, TorchConst, type(None))
"""The types of Scalar; the first four are those of Plain."""


def parts(item: Attr) -> Iterator[Scalar]:
    """The scalars in `item`, in order; tuples are flattened at every depth."""
    if isinstance(item, tuple):
        for part in item:
            yield from parts(part)
    else:
        yield item


class Role(StrEnum):
    """Where a value comes from (seed document 004: Builder.input / param / state / value)."""

    INPUT = "input"
    PARAM = "param"
    STATE = "state"
    CONST = "const"
    TMP = "tmp"
    OUTPUT = "output"


class Payload(Protocol):
    """The bytes of a param, state or const: referenced, never copied. `onnx_ir` tensors are payloads as they are."""

    def numpy(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class ArrayPayload:
    """An array as it is."""

    array: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.array


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph. `vid` is its index in `Graph.values` and in the slot table at run time."""

    vid: int
    name: str
    """Unique in the graph. A caller gives inputs and weights, and takes outputs, by their names."""
    spec: TensorSpec
    """Shape, dtype and device."""
    role: Role
    """Where the value comes from: the caller, the model or an op."""
    producer: int | None = None
    """Index in `Graph.ops` of the op that makes it; None for input, param, state and const."""
    users: tuple[int, ...] = ()
    """Indices in `Graph.ops` of the ops that read it, ascending, each once."""
    strides: tuple[Dim, ...] | None = None
    """Strides in the source, in elements; None where the value was contiguous there, or its strides are unknown. A plan
    keeps the strides of inputs and stored values, and may choose others for computed ones."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The part of a kernel call that never changes, fixed by the op's emitter when the op was built.

    `kind_id` names the kernel, `attr_schema` the layout of `attr_blob` (an ABI tag), `attr_blob` the packed attributes.
    """

    kind_id: int
    attr_schema: str
    attr_blob: bytes


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `attrs` is for people and passes; a kernel reads `kernel.attr_blob`."""

    oid: int
    """The op's index in `Graph.ops`."""
    kind: str
    """The operator with its overload, such as `aten.add.Tensor`."""
    inputs: tuple[int, ...]
    """The vids of the tensors that the op reads, in the order of the call."""
    outputs: tuple[int, ...]
    """The vids of the op's results, in order."""
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    kernel: KernelSpec | None = None
    """None in a graph of an importer until it is compiled, since a named dim or an order in memory may still be chosen;
    and where no emitter knows the kind: lowering lists such ops."""
    constraints: Mapping[str, Plain] = field(default_factory=dict)
    """Facts for the planner, e.g. `inplace: (0,)`: output 0 may reuse the storage of input 0."""
    hints: Mapping[str, Plain] = field(default_factory=dict)
    """Advice for the caller's own passes (`optimize_ir`, `optimize_plan`); nothing here depends on it."""
    saved: tuple[int, ...] = ()
    """What the gradient of the op reads: indices into `(*inputs, *outputs)`. A user's training policy sets it."""
    name: str = ""
    """The source's name of the node, for messages."""
    node_type: str = ""
    """The type that the source gives the node, where that is another than `kind`: ONNX's `PRelu`, of which an
    `aten.where.self` is a part."""
    origin: str = ""
    """The torch module path that the node came from, where it is known."""
    line: str = ""
    """The line of Python that made it, as `file:line`, where it is known."""
    bodies: tuple[Graph, ...] = ()
    """Subgraphs of a higher-order op (`cond`, `while_loop`); `attrs` says by `BodyRef` which is which."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))
        object.__setattr__(self, "constraints", MappingProxyType(dict(self.constraints)))
        object.__setattr__(self, "hints", MappingProxyType(dict(self.hints)))

    @property
    def operator(self) -> str:
        """The operator that messages name, as a user reads it in the source."""
        return self.node_type or self.kind

    def __reduce__(self) -> tuple[type[Op], tuple[Any, ...]]:
        """For pickle and copy, which cannot handle a MappingProxyType."""
        items = (getattr(self, entry.name) for entry in fields(self))
        return Op, tuple(dict(item) if isinstance(item, MappingProxyType) else item for item in items)


@dataclass(frozen=True, slots=True)
class DimRange:
    """The sizes that a named dim may have, both ends included; `most` is None where nothing bounds it."""

    least: int = 0
    """The smallest size."""
    most: int | None = None


SHOWN = 4
"""How many inputs and outputs the text of a graph names."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in a valid order over a table of values.

    `inputs` and `outputs` are vids in the order of the caller's signature. `payloads` maps the vid of a param, state or
    const to its bytes; a weight-free graph has none.
    """

    name: str
    """The name of the model or of the entry point, for messages and files."""
    values: tuple[Value, ...]
    """The table of values: a value's index is its vid."""
    ops: tuple[Op, ...]
    """The ops in the order in which they run: an op's index is its oid."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    payloads: Mapping[int, Payload] = field(default_factory=dict)
    updates: Mapping[int, int] = field(default_factory=dict)
    """{vid of a param, state or input: vid of the value that it has after a run}. Only these change between runs."""
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """{vid of a param, state or const: its names in a checkpoint}; several where weights are tied, its own first."""
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    """Named dims, and the sizes that the graph holds for."""
    guards: tuple[str, ...] = ()
    """Further conditions on named dims, as expressions: `Eq(Mod(batch, 2), 0)`."""

    def __repr__(self) -> str:
        sides = (
            ", ".join(f"{self.values[vid].name}: {self.values[vid].spec}" for vid in vids[:SHOWN])
            + (f", … ({len(vids)})" if len(vids) > SHOWN else "")
            for vids in (self.inputs, self.outputs)
        )
        inputs, outputs = sides
        return f"Graph({self.name!r}, {len(self.ops)} ops, {len(self.values)} values): ({inputs}) -> ({outputs})"

    def value(self, name: str) -> Value:
        """The value called `name`.

        Raises:
            KeyError: no value has this name.
        """
        for value in self.values:
            if value.name == name:
                return value
        raise KeyError(f"no value named {name!r} in graph {self.name!r}")

    def weight_names(self) -> dict[int, tuple[str, ...]]:
        """{vid of a param, state or const: the names under which its tensor may be given}, checkpoint names first.

        The value's own name comes last, unless another value has that name in a checkpoint: where a parameter is called
        `p_add`, that name never means the placeholder of a parameter `add`.
        """
        stored = self.with_role(Role.PARAM, Role.STATE, Role.CONST)
        owners = {key: vid for vid, keys in self.sources.items() for key in keys}
        names = {}
        for value in stored:
            own = (value.name,) if owners.get(value.name, value.vid) == value.vid else ()
            names[value.vid] = tuple(dict.fromkeys((*self.sources.get(value.vid, ()), *own)))
        return names

    def with_role(self, *roles: Role) -> tuple[Value, ...]:
        return tuple(value for value in self.values if value.role in roles)


AUTOCAST = "higher_order.wrap_with_autocast"


def to_device(graph: Graph, device: str) -> Graph:
    """`graph` and its bodies with every value on `device`, which torch calls `cuda:0`; the same graph if it is there.

    Operators that name a device where they make a tensor name `device` afterwards. Payloads stay where they are, until
    a program binds them.
    """
    if devices_of(graph) == (device,):
        return graph
    values = tuple(replace(value, spec=replace(value.spec, device=device)) for value in graph.values)
    return replace(graph, values=values, ops=tuple(_move(op, device) for op in graph.ops))


def devices_of(graph: Graph) -> tuple[str, ...]:
    """The devices of all values of `graph`, in the order of their first value."""
    return tuple(dict.fromkeys(value.spec.device for value in graph.values))


def _move(op: Op, device: str) -> Op:
    attrs = {name: _name_device(item, device) for name, item in op.attrs.items()}
    if op.kind == AUTOCAST:  # it names the kind of device by a string
        attrs["device_type"] = device.partition(":")[0]
    bodies = tuple(to_device(body, device) for body in op.bodies)
    return replace(op, attrs=attrs, bodies=bodies, kernel=None)  # a kernel has the attributes packed


def _name_device(item: Attr, device: str) -> Attr:
    return TorchConst("device", device) if isinstance(item, TorchConst) and item.kind == "device" else item
