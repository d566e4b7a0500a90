"""Operators with bodies. `attrs["bodies"]` has the bodies as functions from tensors to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipeline.errors import Unsupported
from pipeline.runtime.kernels.aten.call import arguments
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.operators import tensors_in

Tensors = Sequence[torch.Tensor]
Function = Callable[[Tensors], Tensors]
Given = Mapping[str, Any]


def higher_order(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """At each launch, run the operator and copy its results into `outs`."""
    name = attrs["op"].partition(".")[2]
    run = REGIONS.get(name)
    if run is None:
        raise Unsupported(f"the higher-order operator {name!r} cannot run; expected one of {', '.join(REGIONS)}")
    return partial(_launch, run, arguments(attrs["call"], ins, attrs["bodies"]), outs)


def _launch(run: Callable[[Given], Tensors], given: Given, outs: Outs) -> None:
    for result, out in zip(run(given), outs, strict=True):
        out.copy_(result)


def cond(given: Given) -> Tensors:
    return given["true_fn" if given["pred"] else "false_fn"](given["operands"])


def while_loop(given: Given) -> Tensors:
    carried, more = list(given["carried_inputs"]), given["additional_inputs"]
    while given["cond_fn"]([*carried, *more])[0]:
        carried = _clone_results(given["body_fn"]([*carried, *more]))
    return carried


def scan(given: Given) -> Tensors:
    """The first results of the body are carried on; the others are stacked."""
    carried, rows = list(given["init"]), []
    for at in range(len(given["xs"][0])):
        results = _clone_results(
            given["combine_fn"]([*carried, *(x[at] for x in given["xs"]), *given["additional_inputs"]])
        )
        carried, row = results[: len(carried)], results[len(carried) :]
        rows.append(row)
    return [*carried, *map(torch.stack, zip(*rows, strict=True))]


def map_rows(given: Given) -> Tensors:
    xs, more = given["xs"], given["pos_args"]
    rows = [_clone_results(given["f"]([*(x[at] for x in xs), *more])) for at in range(len(xs[0]))]
    return [*map(torch.stack, zip(*rows, strict=True))]


def in_grad_mode(given: Given) -> Tensors:
    """Nothing here is differentiated, so either mode computes the same."""
    return given["wrapped_func"](_operands(given))


def in_autocast(given: Given) -> Tensors:
    settings = {name: given[name] for name in ("device_type", "dtype", "enabled", "cache_enabled")}
    with torch.autocast(**settings):
        return given["wrapped_func"](_operands(given))


def writing_into_copies(version: str, given: Given) -> Tensors:
    """A user's operator that writes: torch runs it on copies, and returns these after its results.

    Version 2 addresses views by storage offset, which is not that of the arena, so each base is cloned.
    """
    rest = {name: item for name, item in given.items() if name != "_mutable_op"}
    if "_all_bases" in rest:
        rest["_all_bases"] = [base.clone(memory_format=torch.contiguous_format) for base in rest["_all_bases"]]
    return list(tensors_in(getattr(torch.ops.higher_order, version)(given["_mutable_op"], **rest)))


def _operands(given: Given) -> Tensors:
    return [tensor for name, tensor in given.items() if name.startswith("operand_")]


def _clone_results(results: Tensors) -> list[torch.Tensor]:
    """Clones of a body's results, which are in its arena: its next run writes there."""
    return [tensor.clone() for tensor in results]


REGIONS: dict[str, Callable[[Given], Tensors]] = {
    "cond": cond,
    "while_loop": while_loop,
    "scan": scan,
    "map_impl": map_rows,
    "wrap_with_set_grad_enabled": in_grad_mode,
    "wrap_with_autocast": in_autocast,
    **{name: partial(writing_into_copies, name) for name in ("auto_functionalized", "auto_functionalized_v2")},
}
