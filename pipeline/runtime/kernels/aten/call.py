"""Any operator of torch as a kernel: read its call, order its operands, and write its results into given storage.

Results are written by the operator's overload with `out=`, or by a copy. Some of these overloads take the memory of the
result for rows, whatever its strides are (`avg_pool3d`), or for the memory format of an operand (`native_batch_norm`),
and `triu` even writes beyond it. So such an overload is only called where operands and results lie in rows, or where
the operator is known to take any order.

A plan lays most values out as in the trace, but not all: a copy that changes no element is a view, an image of a train
step lies with its channels last. An operator that reads any strides does not mind; any other one gets a copy.

A call that draws random values has a new generator with its seed at each launch, so that runs repeat. A replay must not
repeat: its steps have the further attribute `generator`, which goes on from launch to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch

from pipeline.errors import SourceError, Unsupported
from pipeline.ir import Attr, InputRef
from pipeline.ir.graph import Value
from pipeline.ops.aten import takes_any_order
from pipeline.ops.layout import Layout
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs, OverloadCall, copy_result
from pipeline.runtime.operators import DRAWS, argument, find_operator, tensors_in
from pipeline.runtime.tensors import has_strides


@dataclass(frozen=True, slots=True)
class AtenCall:
    """An operator with its arguments: by position where the schema allows, else by name."""

    kind: str
    operator: torch._ops.OpOverload
    given: Mapping[str, Any]
    """Every argument that was given, by name."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    unread: Collection[int] = ()
    """Results that nobody reads, by number."""


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """A call whose arguments are decoded except for its tensors."""

    kind: str
    operator: torch._ops.OpOverload
    fixed: Mapping[str, Any]
    """Arguments by name; undecoded where they have tensors."""
    tensors: Mapping[str, Attr]
    """The arguments that contain tensors, undecoded."""
    positional: Sequence[str]
    named: Sequence[str]
    unread: Collection[int]

    def call(self, ins: Ins) -> AtenCall:
        """The call on the tensors `ins`."""
        given = {**self.fixed, **{name: argument(item, ins) for name, item in self.tensors.items()}}
        args, kwargs = [given[name] for name in self.positional], {name: given[name] for name in self.named}
        return AtenCall(self.kind, self.operator, given, args, kwargs, self.unread)


def read_call(attrs: Attrs) -> CallTemplate:
    """The call of a kernel of the kind Aten.

    Raises:
        SourceError: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    operator = pure_operator(attrs["op"])
    items: Mapping[str, Attr] = attrs["call"]
    tensors = {name: item for name, item in items.items() if _has_tensors(item)}
    fixed = {name: item if name in tensors else argument(item, ()) for name, item in items.items()}
    positional = []
    for parameter in operator._schema.arguments:
        if parameter.kwarg_only or parameter.name not in items:
            break
        positional.append(parameter.name)
    named = [name for name in items if name not in positional]
    return CallTemplate(attrs["op"], operator, fixed, tensors, positional, named, attrs.get("unread", ()))


def _has_tensors(item: Attr) -> bool:
    return isinstance(item, InputRef) or (isinstance(item, tuple) and any(map(_has_tensors, item)))


def pure_operator(kind: str) -> torch._ops.OpOverload:
    """The operator of this name, which must not write to its arguments.

    Raises:
        SourceError: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    operator = find_operator(kind)
    if operator._schema.is_mutable:
        raise Unsupported(f"{kind} writes to its arguments, and no op changes a value of a graph: {_instead(kind)}")
    return operator


def _instead(kind: str) -> str:
    """What to call in place of an operator that writes to its arguments."""
    namespace, name, overload = kind.split(".")
    pure = f"{namespace}.{name.removesuffix('_')}.{overload}"
    try:
        find_operator(pure)
    except SourceError:
        pure = kind
    advice = "take an operator that makes a new value" if pure == kind else f"take {pure}, which makes a new value"
    return f"{advice}; a program of torch.export is without such calls after `run_decompositions({{}})`"


def arguments(call: Mapping[str, Attr], ins: Ins, bodies: Sequence[Any] = ()) -> dict[str, Any]:
    """The arguments of a call by name, on these tensors and bodies."""
    return {name: argument(item, ins, bodies) for name, item in call.items()}


def write_out(call: AtenCall, outs: Outs) -> Launch:
    """Any operator, written into `outs`."""
    variant = find_out_variant(call.operator)
    if variant is None or call.kind in FUNCTIONAL or not may_write_into(call, outs):
        return make_and_copy(call, outs)
    overload, names = variant
    masked = False in call.given.get("output_mask", ())  # some results are None, or without elements
    if masked or len(names) != len(outs):
        return make_and_copy(call, outs)
    return OverloadCall.bind(overload, *call.args, **call.kwargs, **dict(zip(names, outs, strict=True)))


def may_write_into(call: AtenCall, outs: Outs) -> bool:
    """Whether the overload with `out=` writes what it should into `outs`, given the strides of all tensors."""
    tensors = (*tensors_in(list(call.given.values())), *outs)
    return takes_any_order(call.kind) or all(tensor.is_contiguous() for tensor in tensors)


def make_and_copy(call: AtenCall, outs: Outs) -> Launch:
    """Run the operator and copy its results into `outs`."""
    make, mask = OverloadCall.bind(call.operator, *call.args, **call.kwargs), call.given.get("output_mask", ())
    if False not in mask:
        return copy_result(make, outs, call.unread)
    traced = [at for at, asked in enumerate(mask) if asked or (at == 0 and call.kind in UNASKED)]
    unread = {*call.unread, *(place for place, at in enumerate(traced) if not mask[at])}
    return copy_result(partial(_results_at, make, traced), outs, unread)


UNASKED = frozenset({"aten.native_batch_norm_backward.default"})
"""Operators whose first result is in every trace; where the mask does not ask for it, it is None in a run."""


def _results_at(make: Callable[[], Any], places: Sequence[int]) -> tuple[Any, ...]:
    """The results that a trace has: `convolution_backward` makes some that its mask does not ask for."""
    results = make()
    return tuple(results[at] for at in places)


@cache
def find_out_variant(operator: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload with the same arguments and one `out=` for each result, and their names."""
    wanted = [(item.name, str(item.type)) for item in operator._schema.arguments]
    if not wanted or any(str(item.type) != "Tensor" for item in operator._schema.returns):
        return None
    packet = operator.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        items = overload._schema.arguments
        outs = tuple(item.name for item in items if item.is_out)
        rest = [(item.name, str(item.type)) for item in items if not item.is_out]
        if rest == wanted and outs and len(outs) == len(operator._schema.returns):
            return overload, outs
    return None


FUNCTIONAL = frozenset(
    {
        "aten.adaptive_avg_pool2d.default",  # the mean of a whole map in another order
        "aten.adaptive_avg_pool3d.default",
        "aten.linalg_lstsq.default",
        "aten.fft_ihfft2.default",  # writes nothing where the result is a conjugate view
        "aten.fft_ihfftn.default",
        "aten.binary_cross_entropy.default",  # resizes the result, and writes all differences to it
        "aten.huber_loss.default",
        "aten.multilabel_margin_loss.default",
        "aten.mse_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.soft_margin_loss.default",
    }
)
"""Operators whose overload with `out=` does not do the same."""


def launch_draw(generator: torch.Generator | None, call: AtenCall, outs: Outs) -> Launch:
    """`call` from `generator`, or from a new one at each launch."""
    draw = partial(DRAWN[call.kind], *call.args, **call.kwargs)
    return partial(_draw_into, outs, draw, generator, call.given["seed"])


def _draw_into(
    outs: Sequence[torch.Tensor], draw: Callable[..., Any], generator: torch.Generator | None, seed: int
) -> None:
    drawn = draw(generator=generator or torch.Generator(outs[0].device).manual_seed(seed))
    for out, result in zip(outs, tensors_in(drawn), strict=True):
        out.copy_(result)


DRAWN: Final[Mapping[str, Callable[..., Any]]] = {
    f"onnxline.{schema.partition('(')[0]}.default": function for schema, function in DRAWS.items()
}


Strides = tuple[int, ...]


def strides_in_trace(value: Value) -> Strides:
    """The strides of `value` in the trace, in elements; contiguous ones where the trace has others for no element.

    An expanded value has several elements in one place, which a copy cannot have.
    """
    rows = Layout.contiguous(value.spec.sizes)
    strides = tuple(stride for stride in value.strides or () if isinstance(stride, int))
    traced = Layout(rows.sizes, strides) if len(strides) == len(rows.sizes) else rows
    return traced.strides if traced.is_distinct else rows.strides


def bring_in_order(ins: Ins, traced: Sequence[Strides | None]) -> tuple[list[torch.Tensor], list[Launch]]:
    """`ins` with the strides `traced` (None for any), and the launches that copy the operands which lie otherwise."""
    brought, copies = list(ins), list[Launch]()
    for at, (operand, strides) in enumerate(zip(ins, traced, strict=True)):
        if strides is None or operand.stride() == strides or not operand.numel():
            continue
        if has_strides(operand, strides):
            brought[at] = operand.as_strided(operand.shape, strides, operand.storage_offset())
            continue
        brought[at] = operand.new_empty_strided(operand.shape, strides)
        copies.append(partial(brought[at].copy_, operand))
    return brought, copies
