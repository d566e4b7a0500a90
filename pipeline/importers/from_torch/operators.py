"""Facts of an operator: its name, the names of its arguments, which of them it writes to or views.

Names of ops and values are torch.fx's: `linear`, `linear_1`, and `sum_1` where `sum` is Python's own. We number them
again, in the order of the ops: so ops that torch dropped after tracing leave no gap, and a graph with repeated layers
has the names of one that was traced whole.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch._ops import HigherOrderOperator

from pipeline.errors import Unsupported


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
    aliased = [one for one in schema.arguments if one.alias_info is not None]
    return Operator(
        kind,
        base_name(kind),
        tuple(one.name for one in schema.arguments),
        frozenset(one.name for one in schema.arguments if one.has_default_value() and one.default_value is None),
        kind in NOTHING,
        kind in SAME,
        frozenset(one.name for one in aliased if one.alias_info.is_write and kind not in SAME),
        frozenset(one.name for one in aliased if any(result.alias_info is not None for result in schema.returns)),
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
