"""Call torch's higher-order operators with arguments by name and functions as bodies.

Torch's operators accept any function as a body; most of them take arguments by position only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Given = Mapping[str, Any]
Function = Callable[..., tuple[torch.Tensor, ...]]


def call(name: str, given: Given) -> Any:
    """The result of `torch.ops.higher_order.<name>` for these arguments."""
    operator = getattr(torch.ops.higher_order, name)
    return CALLS.get(name, in_order)(operator, given)


def in_order(operator: Any, given: Given) -> Any:
    return operator(*given.values())


def while_loop(operator: Any, given: Given) -> Any:
    return operator(*{**given, "cond_fn": first_of(given["cond_fn"])}.values())


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
    "while_loop": while_loop,
    "flex_attention": flex_attention,
    "auto_functionalized": by_name,
    "auto_functionalized_v2": on_bases,
}
