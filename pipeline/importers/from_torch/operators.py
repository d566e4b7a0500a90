"""What is known of an operator before any call of it: its name, the names of its arguments, what it does to them.

Names of ops and values are torch.fx's: `linear`, `linear_1`, `sum_1` where the plain name is Python's own. They are
counted afresh here, in the order of the ops. So what torch numbered while it traced and threw away later leaves no gap,
and a graph that was traced in part and repeated has the names of one that was traced whole.
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

__all__ = ["RUNNING", "WHEN_TRAINING", "Names", "Operator", "base_name", "describe_operator", "marks_vmap"]


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of torch."""

    kind: str
    """`aten.linear.default`, or `higher_order.cond`."""
    base: str
    """What a node of it is called: `linear`."""
    arguments: tuple[str, ...]
    """The names of its arguments by position; what a higher-order operator is given beyond them are operands."""
    optional: frozenset[str]
    """Arguments that are None unless they are given."""
    nothing: bool = False
    """It looks, and makes nothing. What it looks for is settled by the static shapes and dtypes."""
    same: bool = False
    """Its result is its first argument: what it changes is for autograd."""
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
"""What torch.fx never uses as a name by itself, since its generated code has another meaning for it."""


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
