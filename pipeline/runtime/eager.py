"""The plain reference for the planned runtime: a Graph op by op with torch's operators, as eager torch would run it.

No plan, no emitters, no kernels. A value is freed after its last use.

`REFUSED` says of the kinds that are no operators of torch why torch cannot run them:
importers make none of these kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pipeline.errors import Unsupported, UsageError
from pipeline.ir import Graph, Op, Role, Value
from pipeline.ir.dims import dim_names, dims_of, fix_dims
from pipeline.ops import Kind
from pipeline.ops.aten import CALL_KINDS, HIGHER_ORDER, is_call, takes_any_order
from pipeline.runtime.kernels.aten.regions import WHOLE_BODIES, Function, call_higher_order
from pipeline.runtime.kernels.base import data_error, is_data_error, place_of
from pipeline.runtime.operators import CPU_FALLBACKS, argument, find_operator, tensors_in
from pipeline.runtime.tensors import as_tensor, dtype_name, resolve_views
from pipeline.runtime.torch_state import plain_state

FUSED = "it is made only when a plan is compiled, after which nothing is trained"

REFUSED: Mapping[Kind, str] = {
    Kind.SGD: "it is the update of a train step, which has no gradient",
    Kind.Adam: "it is the update of a train step, which has no gradient",
    Kind.NotFinite: "it decides about the update of a train step, which has no gradient",
    Kind.CountStep: "it counts the updates of a train step, which has no gradient",
    Kind.LinearPointwise: FUSED,
    Kind.ConvPointwise: FUSED,
    Kind.ScaledDotProductAttention: FUSED,
    Kind.SmallAttention: FUSED,
    Kind.ReluProduct: FUSED,
    Kind.RowProgram: FUSED,
    Kind.OnnxNode: "it is run by another runtime, outside of torch",
    **dict.fromkeys(CALL_KINDS, "an operator of torch is run by torch"),
}
"""kind → why torch has no function for an op of this name."""


def why_not_differentiable(op: Op) -> str:
    """Why torch has no function for an op, as the end of a sentence; empty for an operator of torch."""
    if op.kind not in Kind.__members__:
        return ""
    if op.kind == Kind.OnnxNode.name:
        return f"{op.attrs['op']} is run by another runtime, outside of torch"
    return REFUSED[Kind[op.kind]]


def refuse_kinds(graph: Graph) -> dict[str, Callable[[Op, Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Functions that refuse the ops of `graph` that are no operators of torch, as `run_eager(own=…)` takes them."""
    return dict.fromkeys((op.kind for op in graph.ops if op.kind in Kind.__members__), _refuse)


def _refuse(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    del ins
    raise Unsupported(f"{place_of(op)} cannot be computed by torch: {why_not_differentiable(op)}")


Tensors = Mapping[str, torch.Tensor]

Step = tuple[Op, Sequence[torch.Tensor]]
"""An op with its results."""

Observer = Callable[[Op, Sequence[torch.Tensor]], None]
"""Called with every op of the graph and its results, in order; not for ops of bodies."""

Own = Mapping[str, Callable[[Op, Sequence[torch.Tensor]], Sequence[torch.Tensor]]]
"""The caller's functions by kind of op, (op, inputs) -> outputs. They take precedence over torch's operators."""


@dataclass(frozen=True, slots=True)
class EagerResult:
    """Outputs by name, and the values after the run of states and inputs that have an update, by name."""

    outputs: dict[str, torch.Tensor]
    updates: dict[str, torch.Tensor] = field(default_factory=dict)


def run_eager(
    graph: Graph, tensors: Tensors, *, check: bool = True, observe: Observer | None = None, own: Own | None = None
) -> EagerResult:
    """Run `graph` op by op. Named dims are bound to the sizes of the inputs.

    Args:
        graph: the graph.
        tensors: input or weight → its tensor, which is never written to; the graph's payloads are the default.
        check: False takes tensors of other shapes and dtypes than the declared ones, for graphs whose ops allow it.
        observe: is called with each op and its results.
        own: functions in place of torch's operators.

    Raises:
        UsageError: tensors are missing, or are not what the graph declares (all of them in one message).
        DataError: an index in the inputs is out of range (a UsageError too).
        SourceError: an operator that torch does not know.
    """
    graph, slots = _bind(graph, tensors, check=check)
    with plain_state(), torch.no_grad():
        results, after = _run(graph, slots, own or {}, observe)
    names = [value.name for value in graph.values]
    return EagerResult(
        {names[vid]: tensor for vid, tensor in zip(graph.outputs, results, strict=True)},
        {names[vid]: tensor for vid, tensor in zip(graph.updates, after, strict=True)},
    )


def walk_eager(
    graph: Graph, tensors: Tensors, *, check: bool = True, own: Own | None = None, into_bodies: bool = False
) -> Iterator[Step]:
    """Every op of the graph with its results, in order, as `run_eager` computes them.

    `into_bodies`: also the ops of branches, loops and regions, each as often as it ran, with copies of its results;
    they come before the op that the body belongs to, and also where that op fails afterwards.

    Raises:
        UsageError, DataError, SourceError: as `run_eager`.
    """
    graph, slots = _bind(graph, tensors, check=check)
    steps = _apply_all(graph, slots, own or {}, [] if into_bodies else None)
    while True:
        with plain_state(), torch.no_grad():  # for each op alone, since the caller's code runs in between
            step = next(steps, None)
        if step is None:
            return
        yield step


def _bind(graph: Graph, tensors: Tensors, *, check: bool) -> tuple[Graph, dict[int, torch.Tensor]]:
    """The graph for the sizes of its inputs, and its slots before the first op."""
    if dim_names(graph):
        named = {graph.values[vid].name for vid in graph.inputs}
        graph = fix_dims(graph, dims_of(graph, {name: tensors[name].shape for name in tensors.keys() & named}))
    with plain_state():
        return graph, dict(_bind_inputs(graph, tensors, check=check))


def _bind_inputs(graph: Graph, tensors: Tensors, *, check: bool) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    wrong = []
    for value in graph.values:
        if value.producer is not None:
            continue
        tensor = tensors.get(value.name)
        if tensor is None and value.vid in graph.payloads:
            tensor = as_tensor(graph.payloads[value.vid].numpy())
        if tensor is None:
            if value.users or value.vid in (*graph.inputs, *graph.outputs):
                wrong.append(f"{value.role} {value.name!r} is not given")
            continue
        if check and (problem := _misfit(value, tensor)):
            wrong.append(problem)
        found[value.vid] = as_traced(tensor.detach(), value)
    if wrong:
        raise UsageError(f"graph {graph.name!r} cannot run:\n" + "\n".join(f"  - {problem}" for problem in wrong))
    return found


def as_traced(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """`tensor` with the strides of the trace, which `as_strided` and `view` rely on; copied only if they differ."""
    tensor = resolve_views(tensor)
    if tuple(tensor.shape) != value.spec.shape:
        return tensor
    if value.strides is None:
        return tensor.contiguous() if tensor.layout is torch.strided else tensor
    strides = tuple(stride for stride in value.strides if isinstance(stride, int))
    if tensor.stride() == strides or 0 in strides or len(strides) != tensor.dim():
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def with_strides_of_trace(
    graph: Graph, op: Op, ins: Sequence[torch.Tensor], own: Collection[str] = ()
) -> Sequence[torch.Tensor]:
    """`ins` for `op`, with the strides of the trace where the operator depends on them: kernels may choose others."""
    if op.kind in own or not is_call(op.kind) or op.kind.startswith(HIGHER_ORDER) or takes_any_order(op.kind):
        return ins
    schema = find_operator(op.kind)._schema
    if any(item.alias_info is not None for item in schema.arguments):  # a copy would hide a write, or cut a view off
        return ins
    return [as_traced(tensor, graph.values[vid]) for tensor, vid in zip(ins, op.inputs, strict=True)]


def _misfit(value: Value, tensor: torch.Tensor) -> str:
    spec = value.spec
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) == (spec.sizes, spec.dtype):
        return ""
    found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    return f"{value.role} {value.name!r} is {found}; the graph declares {spec.dtype}{list(spec.shape)}"


def _run(
    graph: Graph, slots: dict[int, torch.Tensor], own: Own, observe: Observer | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and the new values of updated states and inputs."""
    for op, results in _apply_all(graph, slots, own):
        if observe is not None:
            observe(op, results)
    return [slots[vid] for vid in graph.outputs], [slots[vid] for vid in graph.updates.values()]


def _apply_all(
    graph: Graph, slots: dict[int, torch.Tensor], own: Own, inner: list[Step] | None = None
) -> Iterator[Step]:
    """Each op with its results, which go into `slots`; dead values are removed from there.

    With `inner`, a list, the ops of an op's bodies are collected there while it runs, and come before it.
    """
    kept = {*graph.outputs, *graph.updates.values()}
    for op in graph.ops:
        ins = with_strides_of_trace(graph, op, [slots[vid] for vid in op.inputs], own)
        try:
            results = _apply(graph, op, ins, own, inner)
        finally:
            if inner:
                yield from inner
                inner.clear()
        yield op, results
        slots.update(zip(op.outputs, results, strict=True))
        for vid in (*op.inputs, *op.outputs):
            if vid not in kept and _dies(graph.values[vid], op):
                slots.pop(vid, None)


def _apply(
    graph: Graph, op: Op, ins: Sequence[torch.Tensor], own: Own, inner: list[Step] | None = None
) -> list[torch.Tensor]:
    """`apply` with a DataError for an index out of range; errors of the caller's own functions are left as they are."""
    try:
        return apply(op, ins, own, inner)
    except (IndexError, RuntimeError) as error:
        if op.kind in own or op.bodies or not is_data_error(error):
            raise
        values = [graph.values[vid] for vid in op.inputs]
        raise data_error(place_of(op), [(value.name, value.spec) for value in values], error) from error


def _dies(value: Value, op: Op) -> bool:
    return value.role in (Role.TMP, Role.OUTPUT, Role.INPUT) and (not value.users or value.users[-1] == op.oid)


def apply(op: Op, ins: Sequence[torch.Tensor], own: Own, inner: list[Step] | None = None) -> list[torch.Tensor]:
    """The results of one op; into `inner` go the ops of its bodies, where these run on whole tensors."""
    if op.kind in own:
        return list(own[op.kind](op, ins))
    namespace, _, name = op.kind.partition(".")
    bodies = [as_function(body, own, inner if name in WHOLE_BODIES else None) for body in op.bodies]
    given = {name: argument(item, ins, bodies) for name, item in op.attrs.items()}
    if namespace != "higher_order":
        return list(tensors_in(call_operator(op.kind, given)))
    return list(tensors_in(call_higher_order(name, given)))


def round_straight(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Integers travel to their dequantizer as floats, since torch gives integers no gradient."""
    return apply(replace(op, attrs={**op.attrs, "as_floats": True}), ins, {})


STRAIGHT_THROUGH: Own = {"onnxline.quantize.default": round_straight}
"""The functions by which a rounding lets gradients through; `operators.py` says which gradients these are."""


def call_operator(kind: str, given: dict[str, Any]) -> Any:
    """What an operator returns: arguments by position up to the first missing one, then by name.

    Raises:
        SourceError: torch does not know the operator.
    """
    operator = find_operator(kind)
    positional: list[Any] = []
    for parameter in operator._schema.arguments:
        if parameter.kwarg_only or parameter.name not in given:
            break
        positional.append(given.pop(parameter.name))
    return CPU_FALLBACKS.get(kind, operator)(*positional, **given)


def as_function(body: Graph, own: Own, inner: list[Step] | None = None) -> Function:
    """A body as a function of its inputs in order, under the autocast that the operator around it switched on."""

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        slots = {vid: as_tensor(payload.numpy()) for vid, payload in body.payloads.items()}
        slots.update(zip(body.inputs, tensors, strict=True))
        if inner is None:
            return tuple(_run(body, slots, own)[0])
        for op, results in _apply_all(body, slots, own, []):
            inner.append((op, [tensor.clone() for tensor in results]))
        return tuple(slots[vid] for vid in body.outputs)

    return run
