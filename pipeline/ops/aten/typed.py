"""Emitters of torch's operators. The operators that nearly all calls of models are have kinds of kernels of their own.

A row is a kind and the signature of its operators (`signatures.py`). The fields of a call follow from the signature,
and so do its operands; what its result may be written over is a fact of the operator (`memory.py`). `order` is the
permutation from the stored form of the result, or empty (`pipeline/lowering/memory_order.py`).

All other calls are of the kind Aten: operators without a row, and calls that no signature covers, such as a product
with a complex number. Its schema lists the arguments that were given, and each argument says its type
(`pipeline.ir.tagged`), so that a runtime without Python reads a call: `aten/2:op=s,call={self,dim,keepdim},orders=v`.
HigherOrder is the same for operators with bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, InputRef, KernelSpec
from pipeline.ops import shape
from pipeline.ops.aten.memory import CHANGED, ORDERS, POINTWISE, WRITTEN_LAST
from pipeline.ops.aten.signatures import OperatorSignature
from pipeline.ops.aten.views import as_view
from pipeline.ops.kinds import OPERATORS, Kind
from pipeline.ops.rows import (
    HOST_SYNC,
    RUNS_BODIES,
    Check,
    Count,
    KernelKind,
    OpCall,
    Specs,
    everywhere,
    kind,
    signature,
)

TWO_RESULTS = (Kind["MaxDim"], Kind["Topk"], Kind["StableTopk"], Kind["Sort"], Kind["Dropout"])

RESULTS: Final[Mapping[Kind, Count]] = {**dict.fromkeys(TWO_RESULTS, 2), Kind["Recurrent"]: (2, 3)}
"""How many results a call has, where it is not one."""

DRAWING: Final = (Kind["RandomNormal"], Kind["RandomUniform"], Kind["Bernoulli"], Kind["Multinomial"], Kind["Dropout"])
"""Kinds of calls that draw numbers by a seed of their own."""

READS_HOST: Final = frozenset(
    {
        "_linalg_check_errors", "_linalg_eigh", "_linalg_eigvals", "_linalg_svd", "cholesky", "inverse",
        "linalg_cholesky", "linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "linalg_inv",
        "linalg_ldl_factor", "linalg_lstsq", "linalg_lu_factor", "linalg_matrix_rank", "linalg_pinv", "linalg_solve",
        "linalg_svd", "linalg_svdvals", "linalg_tensorinv", "linalg_tensorsolve", "multinomial", "pinverse", "svd",
    }
)  # fmt: skip
"""Operators of torch, in `aten`, that look at values for a mistake before they return (a matrix without an inverse,
probabilities below zero), and have no tag that says so."""

WAITS_ON_CUDA: Final = frozenset(
    {
        "aten.histc.default", "aten.linalg_ldl_solve.default", "aten.linalg_lu.default",
        "aten.linalg_lu_factor_ex.default", "aten.linalg_matrix_exp.default", "aten.linspace.Scalar_Tensor",
        "aten.linspace.Tensor_Scalar", "aten.linspace.Tensor_Tensor", "aten.logspace.Scalar_Tensor",
        "aten.logspace.Tensor_Scalar", "aten.logspace.Tensor_Tensor",
    }
)  # fmt: skip
"""Operators whose host code for CUDA waits for the device, or copies pageable memory (torch 2.11)."""

OBSTACLES: Final[Mapping[Kind, Mapping[str, str]]] = {
    Kind["Inverse"]: everywhere(HOST_SYNC),
    Kind["RoiAlign"]: everywhere(HOST_SYNC),
}
"""Device → why a capture there cannot hold a call, by kind; all others can be held."""

SAME_OPERATOR: Final[Mapping[str, str]] = {
    "aten.multiply.Tensor": "aten.mul.Tensor",
    "aten.concat.default": "aten.cat.default",
    **{
        f"aten.__{name}__.{overload}": f"aten.bitwise_{name}.{overload}"
        for name in ("and", "or")
        for overload in ("Tensor", "Scalar")
    },
}
"""Operators that torch has under a second name."""


CONVERSIONS: Final = frozenset(
    {"aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten._to_copy.default"}
)

CAST: Final = next(row for row in shape.KINDS if row.kind is Kind.Cast)


@dataclass(frozen=True, slots=True)
class TypedCall:
    """A kind of kernel for calls of one signature."""

    row: KernelKind
    signature: OperatorSignature

    @classmethod
    def of(cls, number: Kind, text: str) -> TypedCall:
        calls = OperatorSignature.parse(text)
        results = RESULTS.get(number, 1)
        layout = ",".join(filter(None, (calls.layout(), "order=i[]" if results == 1 else "")))
        values = signature(_has_its_operands(calls), inputs=(0, None), outputs=results)
        return cls(kind(number, values, layout, inplace=_inplace(calls), obstacles=OBSTACLES.get(number)), calls)


def _inplace(calls: OperatorSignature) -> tuple[int, ...]:
    """The operands that `inplace_of` allows; a call with fewer operands has fewer."""
    if calls.operators[0] in POINTWISE:
        return tuple(range(sum(argument.code in ("T", "T?", "T|n") for argument in calls.arguments)))
    return (0,) if calls.operators[0] in CHANGED | WRITTEN_LAST else ()


def _has_its_operands(calls: OperatorSignature) -> Check:
    def check(call: OpCall) -> str | None:
        wanted = calls.count_operands(call.attrs)
        return None if len(call.ins) == wanted else f"{len(call.ins)} operands; expected {wanted} by its fields"

    return check


TYPED: Final[Mapping[Kind, TypedCall]] = MappingProxyType(
    {Kind(number): TypedCall.of(Kind(number), text) for number, _, text in OPERATORS}
)

BY_OPERATOR: Final[Mapping[str, TypedCall]] = MappingProxyType(
    {operator: typed for typed in TYPED.values() for operator in typed.signature.operators}
)

KINDS = tuple(typed.row for typed in TYPED.values())


def as_typed(operator: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec | None:
    """The kernel of a call that a kind of its own covers; None for every other call."""
    if operator in CONVERSIONS:
        return _as_cast(attrs, ins, outs)
    operator = SAME_OPERATOR.get(operator, operator)
    typed = BY_OPERATOR.get(operator)
    if typed is None or _is_decided_by_data(operator, ins):
        return None
    orders = attrs.get(ORDERS, ())
    fields = typed.signature.pack(operator, {name: item for name, item in attrs.items() if name != ORDERS})
    if fields is None or not isinstance(orders, tuple):
        return None
    if typed.row.kind not in RESULTS:
        fields["order"] = orders[0] if orders else ()  # type: ignore[assignment]
    elif any(orders):
        return None
    return typed.row.emit(fields, ins, outs)


def call_attrs(operator: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
    """The attributes of a call whose operands come in the order of its signature; `given` are the other arguments.

    An operator without a row has the operands `self` and `other`, as most of torch's own.
    """
    typed = BY_OPERATOR.get(operator)
    if typed is not None:
        return typed.signature.refer(operands, given)
    if any(isinstance(item, InputRef) for item in given.values()):
        return dict(given)
    return {**dict(zip(("self", "other"), map(InputRef, range(operands)), strict=False)), **given}


def _as_cast(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec | None:
    """A conversion to another dtype. Conversions to float8 stay calls of torch, whose kernel rounds as it does."""
    orders, to = attrs.get(ORDERS, ()), outs[0].dtype
    is_plain = len(ins) == 1 and ins[0].shape == outs[0].shape and isinstance(orders, tuple) and not any(orders)
    return CAST.emit({"to": to}, ins, outs) if is_plain and not to.startswith("float8") else None


def _is_decided_by_data(operator: str, ins: Specs) -> bool:
    """Whether a mask among the indices decides how many elements are read or written."""
    places = {"aten.index.Tensor": ins[1:], "aten.index_put.default": ins[1:-1]}.get(operator, ())
    return any(spec.dtype in ("bool", "uint8") for spec in places)


def untyped_call(number: Kind, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the attributes of a call of the kind Aten would be: `op`, `call` and `orders`."""
    operator, call = TYPED[number].signature.unpack(fields)
    return {"op": operator, "call": call, "orders": (fields["order"],) if "order" in fields else ()}


HIGHER_ORDER = "higher_order."

ANY = signature(inputs=(0, None), outputs=(0, None))
ATEN = kind(Kind.Aten, ANY, "op=s,call={},orders=v", version=2)
BODIES = kind(Kind.HigherOrder, ANY, "op=s,call={}", version=2, obstacles=everywhere(RUNS_BODIES))


def is_call(kind: str) -> bool:
    """Whether `kind` names an operator of torch: `namespace.name.overload`, or `higher_order.name`."""
    return kind.count(".") == 2 or kind.startswith(HIGHER_ORDER)


def emitter_of(kind: str) -> Emitter:
    """The emitter of the operator `kind`."""
    return partial(_emit, kind)


def _emit(kind: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec:
    view = as_view(kind, attrs, ins, outs)
    if view is not None:
        return view
    typed = as_typed(kind, attrs, ins, outs)
    if typed is not None:
        return typed
    call = {name: item for name, item in attrs.items() if name != ORDERS}
    if kind.startswith(HIGHER_ORDER):
        return _with_names(BODIES, call).emit({"op": kind, "call": call}, ins, outs)
    return _with_names(ATEN, call).emit({"op": kind, "call": call, "orders": attrs.get(ORDERS, ())}, ins, outs)


def _with_names(row: KernelKind, call: Mapping[str, Attr]) -> KernelKind:
    """`row` with the names of the arguments in its schema."""
    return replace(row, schema=row.schema.replace("{}", f"{{{','.join(call)}}}"))
