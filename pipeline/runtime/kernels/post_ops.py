"""What a fused kernel computes on its result: by oneDNN while it is in a register, or by torch in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipeline.runtime.kernels.base import Attrs, Launch

nn: Any = vars(torch._C)["_nn"]  # its stubs leave this module out


@dataclass(frozen=True, slots=True)
class PostOp:
    """An activation: oneDNN's name, its algorithm where it has several, and torch's function with `out=`."""

    name: str
    algorithm: str = ""
    function: Callable[..., Any] | None = None
    fixed: tuple[float, ...] = ()
    """Numbers that only torch's function needs."""
    numbers: tuple[float, ...] = ()

    def bind_in_place(self, out: torch.Tensor) -> Launch | None:
        """Apply it to `out`; None where there is nothing to do."""
        return None if self.function is None else partial(self.function, out, *self.fixed, *self.numbers, out=out)


PLAIN = PostOp("none")


def post_op(attrs: Attrs) -> PostOp:
    """The activation of a fused call."""
    found = POST_OPS[attrs["activation"]]
    return PostOp(found.name, found.algorithm, found.function, found.fixed, tuple(attrs["numbers"]))


POST_OPS: Mapping[str, PostOp] = {
    "none": PLAIN,
    "relu": PostOp("relu", "", torch.clamp_min, (0,)),
    "gelu": PostOp("gelu", "none", nn.gelu),
    "gelu_tanh": PostOp("gelu", "tanh", partial(nn.gelu, approximate="tanh")),
    "silu": PostOp("swish", "", torch.ops.aten.silu.out),
    "sigmoid": PostOp("sigmoid", "", torch.sigmoid),
    "tanh": PostOp("tanh", "", torch.tanh),
    "hardswish": PostOp("hardswish", "", torch.ops.aten.hardswish.out),
    "clip": PostOp("hardtanh", "", torch.clamp),
    "leaky_relu": PostOp("leaky_relu", "", torch.ops.aten.leaky_relu.out),
}
"""By the activation of a fused kind."""
