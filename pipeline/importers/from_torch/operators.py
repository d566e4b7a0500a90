"""Facts of a traced program: its graphs and stored tensors, the source of each node, and what each operator is.

Names of ops and values are torch.fx's: `linear`, `linear_1`, and `sum_1` where `sum` is Python's own. We number them
again, in the order of the ops: so ops that torch dropped after tracing leave no gap, and a graph with repeated layers
has the names of one that was traced whole.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pipeline.errors import Unsupported


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """`module` itself and all graph modules nested in it."""
    return (body for body in module.modules() if isinstance(body, GraphModule))


def calls_in(module: GraphModule) -> Iterator[Node]:
    """All calls of operators, in bodies too."""
    return (node for body in bodies_of(module) for node in body.graph.nodes if node.op == "call_function")


def recompile(module: GraphModule) -> None:
    """Regenerate the code of all graphs in `module`, after some were changed."""
    for body in bodies_of(module):
        body.recompile()


def held_tensors(program: ExportedProgram) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(placeholder, its name in the model, the tensor), in order; a tensor with two names is listed twice."""
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        tensor = None if spec.target is None else held.get(spec.target)
        if isinstance(tensor, torch.Tensor):
            yield spec.arg.name, str(spec.target), tensor


FRAME = 'File "'
TORCH = str(Path(torch.__file__).parent)
PACKAGES = "site-packages/"


def module_of(node: Node) -> str:
    """The path of the innermost module, `encoder.layer.3.output`; empty at the top, or where torch did not say."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = next(reversed(stack.values()))
    return path.partition("@")[0]  # torch marks a second call of the same module as `layer@1`


def line_of(node: Node) -> str:
    """The innermost line that is not torch's own, as `transformers/models/bert/modeling_bert.py:175`."""
    trace = node.meta.get("stack_trace") or ""
    end = len(trace)
    while (start := trace.rfind(FRAME, 0, end)) >= 0:
        path, _, rest = trace[start + len(FRAME) : end].partition('", line ')
        if not path.startswith((TORCH, "<")):  # "<eval_with_key>.3" is code that torch wrote itself
            number = rest.partition(",")[0]
            return f"{path.rpartition(PACKAGES)[2]}:{number}"
        end = start
    return ""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of torch."""

    kind: str
    """`aten.linear.default`, or `higher_order.cond`."""
    base: str
    """What a node of it is called: `linear`."""
    arguments: tuple[str, ...]
    """The names of its arguments by position; further arguments of a higher-order operator are operands."""
    optional: frozenset[str]
    """Arguments that are None unless they are given."""
    nothing: bool = False
    """Whether it only checks something, and has no result. Static shapes and dtypes guarantee what it checks."""
    same: bool = False
    """Whether its result is its first argument, apart from what autograd records."""
    written: frozenset[str] = frozenset()
    """Arguments that it writes to."""
    viewed: frozenset[str] = frozenset()
    """Arguments that its results may be views of."""


@cache
def describe_operator(target: Any) -> Operator:
    """The Operator of a node's target; a higher-order one has no schema, so its arguments are listed here."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        if not isinstance(target, HigherOrderOperator):
            raise Unsupported(
                f"{getattr(target, '__name__', target)} is no operator of torch, but a function of Python"
                f"{MARKS if marks_vmap(target) else ''}"
            )
        name = target.name()
        return Operator(f"higher_order.{name}", name, HIGHER_ORDER.get(name, ()), frozenset())
    kind = str(target)
    arguments = schema.arguments
    aliased = [argument for argument in arguments if argument.alias_info is not None]
    written = [argument.name for argument in aliased if argument.alias_info.is_write and kind not in SAME]
    is_view = any(result.alias_info is not None for result in schema.returns)
    return Operator(
        kind,
        base_name(kind),
        tuple(argument.name for argument in arguments),
        frozenset(known.name for known in arguments if known.has_default_value() and known.default_value is None),
        kind in NOTHING,
        kind in SAME,
        frozenset(written),
        frozenset(argument.name for argument in aliased if is_view),
    )


def marks_vmap(target: object) -> bool:
    """Whether this is no call of the model's, but the begin or end of a `torch.vmap`."""
    return getattr(target, "__module__", "") == "torch._functorch.predispatch"


MARKS = ": the trace only marks where torch.vmap begins and ends; a program that is functionalized has whole batches"

HIGHER_ORDER: dict[str, tuple[str, ...]] = {
    "cond": ("pred", "true_fn", "false_fn", "operands"),
    "while_loop": ("cond_fn", "body_fn", "carried_inputs", "additional_inputs"),
    "scan": ("combine_fn", "init", "xs", "additional_inputs"),
    "associative_scan": ("combine_fn", "xs", "additional_inputs"),
    "map_impl": ("f", "xs", "pos_args"),
    "wrap_with_set_grad_enabled": ("enable_grad", "wrapped_func"),
    "wrap_with_autocast": ("device_type", "dtype", "enabled", "cache_enabled", "wrapped_func"),
    "flex_attention": (
        *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
        *("score_mod_other_buffers", "mask_mod_other_buffers"),
    ),
    "auto_functionalized": ("_mutable_op",),
    "auto_functionalized_v2": ("_mutable_op",),
}
"""Arguments of torch's higher-order operators, as their `__call__` names them (torch 2.13). Those of
`auto_functionalized` go on with the arguments of the operator that writes, by name."""

NOTHING = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)

SAME = frozenset({"aten.detach_.default", "aten.lift_fresh.default"})

WHEN_TRAINING = frozenset({"aten.batch_norm.default", "aten.instance_norm.default"})
"""They write to their running statistics when they train, which their schema does not say."""

RUNNING = frozenset({"running_mean", "running_var"})


RESERVED = frozenset(
    {*dir(builtins), *keyword.kwlist, "inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree"}
)
"""Names that torch.fx does not use without a number, since they mean something else in its generated code."""


def base_name(kind: str) -> str:
    """What an op of this kind is called: `linear` of aten.linear.default, `cond` of higher_order.cond."""
    parts = kind.split(".")
    return parts[-1] if parts[0] == "higher_order" else parts[-2]


class Names:
    """The names of one graph."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def new(self, base: str) -> str:
        """`base`, or `base_1`, `base_2`, … when that is taken or reserved."""
        name = base
        count = self._counts.get(base, 0)
        while name in self._taken or name in RESERVED:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count
        self._taken.add(name)
        return name
