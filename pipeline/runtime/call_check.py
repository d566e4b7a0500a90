"""Hold calls against their operators: what an op declares that it makes, against what its operator makes of such
operands.

`find_mismatch` runs the operator on the device meta, which computes nothing, and looks at shapes and dtypes. Some
mistakes are only found by torch's kernels (a dtype that softmax does not take): `try_call` runs a small call on zeros
and on ones. `find_wrong_calls` asks once for equal calls, so a graph of many equal layers costs what one layer does.

This checks graphs, and shares no rule with the planner.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.suggest import plural
from pipeline.errors import UsageError
from pipeline.ir.check import violations
from pipeline.ir.graph import AUTOCAST, Attr, Graph, InputRef, Op, TensorSpec
from pipeline.lowering.lower import find_wrong_kernel
from pipeline.ops.aten import HIGHER_ORDER, is_call
from pipeline.ops.aten.memory import AS_STRIDED, ORDERS
from pipeline.runtime.call_schema import arguments, find_wrong_arguments
from pipeline.runtime.eager import call_operator
from pipeline.runtime.kernels.base import LinAlgError, place_of
from pipeline.runtime.operators import argument, find_operator
from pipeline.runtime.tensors import dtype_name, torch_dtype

Specs = Sequence[TensorSpec]

MOST_TRIED: Final = 2**14
"""Elements of operands and results up to which `try_call` computes; more would take longer than a message is worth."""


def find_mismatch(
    kind: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs, read: Collection[int] | None = None
) -> str:
    """What is wrong with a call of the operator `kind`: torch refuses it, or makes other results than `outs`.

    "" where nothing is, and for operators of which nobody knows the results beforehand: those that are no call of
    torch, that take bodies, or that do not run on meta; and for sizes that are still names.

    Args:
        kind: the operator.
        attrs: its attributes.
        ins: dtype and shape of each operand.
        outs: dtype and shape of each result.
        read: the places of the results that are compared; all for None.

    Raises:
        SourceError: torch does not know the operator.
    """
    if not _is_known(kind, (*ins, *outs)):
        return ""
    orders = attrs.get(ORDERS, ())
    attrs = {name: item for name, item in attrs.items() if name != ORDERS}
    if said := find_wrong_arguments(kind, attrs):
        return said
    made = _make_on_meta(kind, attrs, ins)
    if made is None or isinstance(made, str):
        return made or ""
    if said := _find_wrong_axis(attrs, ins, made):
        return said
    if isinstance(orders, tuple) and any(orders):
        outs = [_as_called(spec, order) for spec, order in zip(outs, orders, strict=False)]
    places = range(len(outs)) if read is None else read
    said = _compare(made, outs, places)
    if said and (traced := _make_as_traced(kind, attrs, ins)) is not None:
        return said if _compare(traced, outs, places) else ""
    return said


def try_call(kind: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str:
    """What torch says of a small call on the CPU, of zeros and of ones; "" for a call that nobody tries.

    A result whose size is the same for both has this size for all operands.
    """
    specs = (*ins, *outs)
    is_small = _is_known(kind, specs) and sum(spec.numel for spec in specs) <= MOST_TRIED
    return why_refused(kind, attrs, ins, outs) if is_small and all(spec.device == "cpu" for spec in specs) else ""


def why_refused(kind: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs | None = None) -> str:
    """As `try_call`, for a call of any size; results are compared where `outs` says what they should be."""
    made: list[Results] = []
    for fill in (0, 1):
        try:
            filled = [torch.full(spec.sizes, fill, dtype=torch_dtype(spec.dtype)) for spec in ins]
            with torch.random.fork_rng(devices=[]):
                made.append(_make(kind, attrs, filled))
        except LinAlgError:
            return ""  # the matrix has no inverse; others have one
        except Exception as error:
            if fill and not made:
                return _explain(ins, error)
    if outs is None or len(made) < 2 or len(made[0]) != len(made[1]):
        return ""
    fixed = [
        first if first is None or second is None else _merge(first, second) for first, second in zip(*made, strict=True)
    ]
    return _compare(fixed, outs, range(len(outs)))


Results = Sequence[TensorSpec | None]
"""What an operator makes, in order; None for a result that a mask of the call leaves out. A dim is "?" where the
elements of operands decide it."""


def _is_known(kind: str, specs: Specs) -> bool:
    return is_call(kind) and not kind.startswith(HIGHER_ORDER) and all(spec.is_static for spec in specs)


def _make_on_meta(kind: str, attrs: Mapping[str, Attr], ins: Specs) -> Results | str | None:
    """What a call makes, or why torch refuses it; None for an operator that does not run on meta."""
    try:
        operands = [torch.empty(spec.sizes, dtype=torch_dtype(spec.dtype), device="meta") for spec in ins]
    except (RuntimeError, TypeError):  # sizes that no machine has, of which the planner says so
        return None
    try:
        with torch.device("meta"):  # for operators without operands
            return _make(kind, attrs, operands)
    except Exception as error:
        unknown = isinstance(error, RuntimeError) and "meta" in str(error).lower()
        return None if unknown else _explain(ins, error)


def _make_as_traced(kind: str, attrs: Mapping[str, Attr], ins: Specs) -> Results | None:
    """What a call makes on the CPU, without computing: statistics of some norms have another form there than on meta.

    torch loads its symbolic shapes for it, in a second, so only a call that has another form on meta is made like this.
    None where torch refuses the call there.
    """
    with suppress(Exception), FakeTensorMode():
        return _make(kind, attrs, [torch.empty(spec.sizes, dtype=torch_dtype(spec.dtype)) for spec in ins])
    return None


def _make(kind: str, attrs: Mapping[str, Attr], tensors: Sequence[torch.Tensor]) -> Results:
    """The results of a call on these tensors."""
    given = {name: argument(item, tensors) for name, item in attrs.items()}
    place = tensors[0].device if tensors else torch.get_default_device()
    device = (arguments(kind) or {}).get("device")
    if given.get("device") is not None or (device is not None and device.required):
        given["device"] = place
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        made = call_operator(kind, given)
    if not find_operator(kind)._schema.returns:
        return []
    results = [part for item in _as_list(made) for part in _as_list(item)]
    return [
        None if result is None else TensorSpec(tuple(result.shape), dtype_name(result.dtype))
        for result in results
        if result is None or isinstance(result, torch.Tensor)
    ]


def _as_list(result: Any) -> Sequence[Any]:
    return result if isinstance(result, list | tuple) else [result]


def _as_called(stored: TensorSpec, order: Attr) -> TensorSpec:
    """A result that is stored with its axes permuted, as its operator makes it."""
    if not isinstance(order, tuple) or sorted(map(str, order)) != sorted(map(str, range(stored.rank))):
        return stored
    return TensorSpec(tuple(stored.shape[axis] for axis in order if isinstance(axis, int)), stored.dtype)


def _find_wrong_axis(attrs: Mapping[str, Attr], ins: Specs, made: Results) -> str:
    """An axis that is not there, which some operators (softmax) take on meta, and no kernel does."""
    dim, of = attrs.get("dim"), attrs.get("self", attrs.get("input"))
    if type(dim) is not int or not isinstance(of, InputRef) or not made or made[0] is None:
        return ""
    source = ins[of.index]
    limit = max(source.rank, 1)
    if made[0].rank > source.rank or -limit <= dim < limit:
        return ""
    return f"found axis {dim} of {_show([source])}, expected {-limit} to {limit - 1}"


def _merge(first: TensorSpec, second: TensorSpec) -> TensorSpec:
    if first.rank != second.rank:
        return second
    return TensorSpec(tuple(a if a == b else "?" for a, b in zip(first.shape, second.shape, strict=True)), second.dtype)


def _compare(made: Results, outs: Specs, read: Collection[int]) -> str:
    """How `outs` differs from the results that an operator makes, where they are read."""
    if len(made) != len(outs):  # an IR may leave out the results that a mask leaves out
        made = [spec for spec in made if spec is not None]
    if len(made) == len(outs) and all(_is_like(made[at], outs[at]) for at in read):
        return ""
    shown = [_show([spec]) for spec in made if spec is not None]
    return f"found {_show(outs) or 'nothing'} in the IR for what it makes, expected {', '.join(shown) or 'no tensor'}"


def _is_like(made: TensorSpec | None, out: TensorSpec) -> bool:
    if made is None:
        return True
    same = len(made.shape) == len(out.shape) and all(
        dim in (size, "?") for dim, size in zip(made.shape, out.shape, strict=True)
    )
    return same and made.dtype == out.dtype


def _explain(ins: Specs, error: Exception) -> str:
    said = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return f"torch refuses it on {_show(ins) or 'no tensors'} ({said})"


def _show(specs: Specs) -> str:
    return ", ".join(f"{spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in specs)


def find_wrong_calls(graph: Graph, approved: Collection[object] = (), *, tried: bool = False) -> Iterator[str]:
    """What is wrong with the calls of `graph` and its bodies, by op.

    Args:
        graph: the graph.
        approved: keys of calls (`call_keys`) that are not looked at.
        tried: small calls are tried as well.
    """
    said_of = dict.fromkeys(approved, "")
    kept = {*graph.outputs, *graph.updates.values()}
    for op in graph.ops:
        for body in () if op.kind == AUTOCAST else op.bodies:  # autocast decides about dtypes at the run
            yield from (f"{place_of(op)}, body {body.name!r}: {said}" for said in find_wrong_calls(body, tried=tried))
        key = key_of_call(graph, op)
        said = said_of.get(key)
        if said is None:
            said = said_of[key] = _find_problem(graph, op, kept, tried)
        if said:
            yield f"{place_of(op)}: {said.replace(' in the IR', '')}"


def call_keys(graph: Graph) -> frozenset[object]:
    """A key for each call of `graph`; equal calls have equal keys."""
    return frozenset(key_of_call(graph, op) for op in graph.ops)


def key_of_call(graph: Graph, op: Op) -> object:
    """What decides whether a call is right. True and 1 are equal, but not as arguments, so it has their text."""
    specs = (graph.values[vid].spec for vid in (*op.inputs, *op.outputs))
    return op.kind, repr(sorted(op.attrs.items())), op.kernel, len(op.inputs), *specs


def _find_problem(graph: Graph, op: Op, kept: Collection[int], tried: bool) -> str:
    ins, outs = ([graph.values[vid].spec for vid in vids] for vids in (op.inputs, op.outputs))
    if op.kind == AS_STRIDED and op.inputs and graph.values[op.inputs[0]].strides is not None:
        return ""  # it reads by the strides of the trace, in a memory that nobody describes
    read = [at for at, vid in enumerate(op.outputs) if vid in kept or graph.values[vid].users]
    said = find_mismatch(op.kind, op.attrs, ins, outs, read) or (
        try_call(op.kind, op.attrs, ins, outs) if tried else ""
    )
    return said or find_wrong_kernel(op, ins, outs)


def _is_decided_by_data(graph: Graph, op: Op) -> bool:
    """Whether the elements of operands decide the sizes of the results."""
    ins = [graph.values[vid].spec for vid in op.inputs]
    if not _is_known(op.kind, ins) or torch.Tag.dynamic_output_shape not in find_operator(op.kind).tags:
        return False
    return _make_on_meta(op.kind, op.attrs, ins) is None


def find_wrong_rules(graph: Graph) -> list[str]:
    """Every rule of the IR that `graph` breaks, also a graph with fields of other types."""
    try:
        return violations(graph, read_payloads=False)
    except (TypeError, AttributeError, ValueError, LookupError) as error:
        return [f"its fields have other types than those of a Graph ({error}); make it by a Builder"]


def refuse_wrong_graph(graph: Graph) -> None:
    """
    Raises:
        UsageError: the graph breaks a rule of the IR; the message lists all that it breaks.
    """
    if wrong := find_wrong_rules(graph):
        raise UsageError(_list(f"graph {graph.name!r} breaks {plural(len(wrong), 'rule')} of the IR", wrong))


def refuse_wrong_calls(graph: Graph) -> None:
    """
    Raises:
        UsageError: ops do not fit their operators; the message lists all of them.
        SourceError: torch does not know an operator.
    """
    if wrong := [*find_wrong_calls(graph)]:
        raise UsageError(_list(f"graph {graph.name!r}: {plural(len(wrong), 'op')} cannot be called as declared", wrong))


def refuse_sizes_of_data(graph: Graph) -> None:
    """
    Raises:
        UsageError: an op makes as many elements as its operands say, which no plan has room for; all of them.
    """
    if wrong := [place_of(op) for op in graph.ops if _is_decided_by_data(graph, op)]:
        title = f"graph {graph.name!r}: a plan has fixed sizes, and the data decide how many elements these ops make"
        raise UsageError(_list(title, wrong))


def _list(title: str, problems: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  - {problem}" for problem in problems)])
