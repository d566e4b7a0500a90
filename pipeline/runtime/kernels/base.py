"""The kernel protocol: a kernel binds tensors and attributes once and returns a launch; a run calls all launches.

Inputs may be views with any strides, a stride of 0 among them. Outputs are contiguous, so a kernel may take `.view`
of an output, and must not of an input. A launch writes every output in full, and reads no input after it wrote an
output that may share that input's storage (see `inplace=` in the family's file under pipeline/ops).

For how many threads of torch kernels are chosen: those that torch had when the program was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch

Ins = Sequence[torch.Tensor]
Outs = Sequence[torch.Tensor]
Attrs = dict[str, Any]
"""What `ops.unpack` gives. The schema fixes names and types, so a kernel does not check them."""

Launch = Callable[[], object]
"""Computes the outputs from the inputs' current numbers; its return value is ignored.

A `partial` of a function with its arguments, or a method of a tensor, never a closure: a context lists the tensors in
it, and may point them at other memory between runs. So a launch holds no address, and an array
only where it compares addresses at each call (`blocked.HeldArrays`)."""

Kernel = Callable[[Ins, Outs, Attrs], Launch]
"""Bind: reads no element, since the inputs are not computed yet; shapes, strides and addresses are final.

Raises RuntimeError, IndexError, ValueError or TypeError where the shapes do not fit."""

Bind = Callable[[Ins, Outs], Launch]
"""A kernel with its attributes bound."""


def each_time(function: Callable[[Ins, Outs, Attrs], None]) -> Kernel:
    """A kernel that prepares nothing: `function(ins, outs, attrs)` at each launch."""

    def bind(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
        return partial(function, ins, outs, attrs)

    return bind


PLANNED_THREADS: Final[ContextVar[int]] = ContextVar("PLANNED_THREADS", default=0)
"""Threads of torch when the program was compiled whose launches are bound now; 0 where none is."""


@contextmanager
def kernels_for_threads(threads: int) -> Iterator[None]:
    """Choose kernels as for so many threads of torch. A context that is made later than its program chooses those that
    it had then, whatever the number is now: other kernels sum in another order."""
    token = PLANNED_THREADS.set(threads)
    try:
        yield
    finally:
        PLANNED_THREADS.reset(token)


def planned_threads() -> int:
    """The number that kernels are chosen for. Every kernel that looks at threads asks here, and not torch."""
    return PLANNED_THREADS.get() or torch.get_num_threads()
