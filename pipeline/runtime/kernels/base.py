"""What a kernel is: told its tensors and attributes once, it gives a launch, and a run is one launch after the other.

Inputs may be views with any strides, a stride of 0 among them. Outputs lie row after row, so a kernel may take `.view`
of an output, and must not of an input. A launch writes every output in full, and reads no input after it wrote an
output that may share that input's storage (see INPLACE in the family's file under pipeline/lowering).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["Attrs", "Bind", "Ins", "Kernel", "Launch", "Outs", "each_time"]

Ins = Sequence[torch.Tensor]
Outs = Sequence[torch.Tensor]
Attrs = dict[str, Any]
"""What `lowering.unpack` gives. The schema fixes names and types, so a kernel does not look twice."""

Launch = Callable[[], object]
"""Computes the outputs from what the inputs hold at that moment; what it returns means nothing."""

Kernel = Callable[[Ins, Outs, Attrs], Launch]
"""Bind: reads no element, since the inputs are not computed yet; shapes, strides and addresses are final.

Raises RuntimeError, IndexError, ValueError or TypeError where the shapes do not fit."""

Bind = Callable[[Ins, Outs], Launch]
"""A kernel that knows its attributes."""


def each_time(function: Callable[[Ins, Outs, Attrs], None]) -> Kernel:
    """A kernel that decides nothing beforehand: `function(ins, outs, attrs)` at each launch."""

    def bind(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
        return partial(function, ins, outs, attrs)

    return bind
