"""Operators with bodies, which torch itself runs: a body is any function of tensors.

`CALLS` says how torch's higher-order operators are called: most of them take arguments by position alone. Those of
torch that refuse to run in a dispatch mode, as of a recording device, are written here.
`attrs["bodies"]` of a kernel call has the bodies as functions from a list of tensors to a list of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipeline.errors import Unsupported
from pipeline.runtime.kernels.aten.call import arguments
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.operators import tensors_in

Given = Mapping[str, Any]
Function = Callable[..., tuple[torch.Tensor, ...]]
Tensors = Sequence[torch.Tensor]


def higher_order(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """At each launch, run the operator and copy its results into `outs`."""
    name = attrs["op"].partition(".")[2]
    if name not in RUNNABLE:
        raise Unsupported(f"the higher-order operator {name!r} cannot run; expected one of {', '.join(RUNNABLE)}")
    bodies = [partial(_run_body, body) for body in attrs["bodies"]]
    return partial(_launch, name, arguments(attrs["call"], ins, bodies), outs)


def _launch(name: str, given: Given, outs: Outs) -> None:
    if "_all_bases" in given:  # their views are addressed as in rows, which the arena need not have
        given = {**given, "_all_bases": [base.contiguous() for base in given["_all_bases"]]}
    for result, out in zip(tensors_in(call_higher_order(name, given)), outs, strict=True):
        out.copy_(result)


def _run_body(body: Callable[[Tensors], Tensors], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Clones of the results, which are in the arena of the body: its next run writes there."""
    return tuple(result.clone() for result in body(tensors))


def call_higher_order(name: str, given: Given) -> Any:
    """Call `torch.ops.higher_order.<name>`.

    Args:
        name: such as `while_loop`.
        given: argument → its value, in the order of the schema; bodies are functions on tensors.
    """
    operator = getattr(torch.ops.higher_order, name)
    return CALLS.get(name, by_position)(operator, given)


def by_position(operator: Any, given: Given) -> Any:
    """Past the dispatcher, where a mode would have to know the operator."""
    return operator.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd, operator)(*given.values())


def cond(operator: Any, given: Given) -> Any:
    return given["true_fn" if given["pred"] else "false_fn"](*given["operands"])


def while_loop(operator: Any, given: Given) -> Any:
    return by_position(operator, {**given, "cond_fn": first_of(given["cond_fn"])})


def scan(operator: Any, given: Given) -> Any:
    """The first results of the body are carried on; the others are stacked."""
    carried, rows, more = list(given["init"]), [], given["additional_inputs"]
    for at in range(len(given["xs"][0])):
        results = given["combine_fn"](*carried, *(x[at] for x in given["xs"]), *more)
        carried = list(results[: len(carried)])
        rows.append(results[len(carried) :])
    return [*carried, *map(torch.stack, zip(*rows, strict=True))]


def flex_attention(operator: Any, given: Given) -> Any:
    """Torch vmaps the bodies over all pairs of positions, so each returns one tensor."""
    *blocks, mask = given["block_mask"]
    rest = {
        "score_mod": first_of(given["score_mod"]),
        "block_mask": (*blocks, first_of(mask)),
        "kernel_options": dict(given["kernel_options"]),
        "score_mod_other_buffers": tuple(given["score_mod_other_buffers"]),
        "mask_mod_other_buffers": tuple(given["mask_mod_other_buffers"]),
    }
    return operator(*{**given, **rest}.values())


def by_name(operator: Any, given: Given) -> Any:
    """Call an operator that writes into copies of its arguments and returns these after its results."""
    return operator(given["_mutable_op"], **{name: item for name, item in given.items() if name != "_mutable_op"})


def on_bases(operator: Any, given: Given) -> Any:
    """Version 2 addresses views by storage offset, so each base is cloned to start at offset 0."""
    return by_name(operator, {**given, "_all_bases": [base.clone() for base in given["_all_bases"]]})


def first_of(body: Function) -> Callable[..., torch.Tensor]:
    """A body as a function that returns its first result."""
    return lambda *tensors: body(*tensors)[0]


CALLS: Mapping[str, Callable[[Any, Given], Any]] = {
    "cond": cond,
    "while_loop": while_loop,
    "scan": scan,
    "flex_attention": flex_attention,
    "auto_functionalized": by_name,
    "auto_functionalized_v2": on_bases,
}

WHOLE_BODIES = frozenset({"cond", "while_loop", "scan", "wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Higher-order operators that call their bodies on whole tensors; others map over a dim."""

RUNNABLE = (*sorted(WHOLE_BODIES), "map_impl", "auto_functionalized", "auto_functionalized_v2")
"""Higher-order operators that a plan can hold: what vmaps a body would give it tensors without memory."""
