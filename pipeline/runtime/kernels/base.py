"""The kernel protocol: a kernel binds tensors and attributes once and returns a launch; a run calls all launches.

Inputs may be views with any strides, a stride of 0 among them. Outputs are contiguous, so a kernel may take `.view`
of an output, and must not of an input. A launch writes every output in full, and reads no input after it wrote an
output that may share that input's storage (see `inplace=` in the family's file under pipeline/ops).

A launch that is a function of Python can only be called. One in a form of this module (several in turn, or a result
that is copied), over functions of torch, can be read as calls of operators (`pipeline.runtime.capture.call_graphs`).
Kernels are chosen for as many threads of torch as it had when the program was compiled.

An error of a launch is classified here. Shapes were checked before, so an index out of range comes from the feed, and a
result of another dtype or shape from the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch

from pipeline.errors import DataError
from pipeline.ir import Op, TensorSpec
from pipeline.runtime.devices import CPU, TARGET, Device
from pipeline.runtime.operators import tensors_in

Named = tuple[str, TensorSpec]


class ResultMismatch(RuntimeError):
    """An op made another dtype or shape than the graph says, as an op traced on another device may."""


def is_data_error(error: Exception) -> bool:
    """Whether torch complains about the data, such as `index 9 is out of bounds for dimension 0 with size 4`."""
    return isinstance(error, IndexError | LinAlgError) or any(words in str(error) for words in OF_DATA)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch's allocator, or numpy's, got no memory for what a kernel computes on the side."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in OF_MEMORY)


def data_error(place: str, ins: Iterable[Named], error: Exception) -> DataError:
    """The DataError for `error` of the op at `place`, which reads `ins`."""
    if BY_ZERO in str(error):
        return DataError(f"{place} failed: it divides integers by 0; look for a 0 in what it divides by")
    if isinstance(error, LinAlgError):
        return DataError(f"{place} failed: {error}; look at the matrices in the feed")
    indices = [f"{name}: {spec.dtype}{list(spec.shape)}" for name, spec in ins if "int" in spec.dtype]
    read = f"; the op reads it from {' or '.join(indices)}" if indices else ""
    return DataError(f"{place} failed: {error}; look for an index that is out of range in the feed{read}")


def place_of(op: Op) -> str:
    """How messages name an op: `op 'index_copy' (aten.index_copy.default, model.py:5)`; its number for no name."""
    return f"op {repr(op.name) if op.name else op.oid} ({', '.join(filter(None, (op.operator, op.line)))})"


OF_MEMORY = ("can't allocate memory", "CUDA out of memory")

LinAlgError: Final[type[RuntimeError]] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
"""What torch raises for a matrix without an inverse."""

BY_ZERO = "ZeroDivisionError"

OF_DATA = ("out of range", "out of bounds", BY_ZERO)
"""In messages of torch's RuntimeErrors (torch 2.13), where operators have no IndexError."""


Ins = Sequence[torch.Tensor]
Outs = Sequence[torch.Tensor]
Attrs = dict[str, Any]
"""What `ops.unpack` gives. The schema fixes names and types, so a kernel does not check them."""

Launch = Callable[[], object]
"""Computes the outputs from the current values of the inputs; its return value is ignored.

A `partial` of a function with its arguments, or a method of a tensor, never a closure: a context lists the tensors in
it, and may point them at other memory between runs. So a launch holds no address."""

Kernel = Callable[[Ins, Outs, Attrs], Launch]
"""Bind: reads no element, since the inputs are not computed yet; shapes, strides and addresses are final.

Raises RuntimeError, IndexError, ValueError or TypeError where the shapes do not fit."""

Bind = Callable[[Ins, Outs], Launch]
"""A kernel with its attributes bound."""


PLANNED_THREADS: Final[ContextVar[int]] = ContextVar("PLANNED_THREADS", default=0)
"""torch.get_num_threads() at compile time of the program that is being bound; 0 outside of binding."""


@contextmanager
def kernels_for_threads(threads: int, device: Device = CPU) -> Iterator[None]:
    """Choose kernels for `device` and `threads` threads of torch. A context that is made later than its program chooses
    the kernels of the program, whatever the number is now: other kernels sum in another order."""
    token, target = PLANNED_THREADS.set(threads), TARGET.set(device)
    try:
        yield
    finally:
        PLANNED_THREADS.reset(token)
        TARGET.reset(target)


def planned_threads() -> int:
    """The number that kernels are chosen for. Every kernel that looks at threads asks here, and not torch."""
    return PLANNED_THREADS.get() or torch.get_num_threads()


class OverloadCall(partial[Any]):
    """A call of the function of an OpOverload, which costs 1 µs less than to call that itself."""

    overload: torch._ops.OpOverload

    @classmethod
    def bind(cls, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> OverloadCall:
        call = cls(overload._op, *args, **kwargs)
        call.overload = overload
        return call


def in_turn(*launches: Launch | None) -> Launch:
    """One launch after the other; those that are None are left out."""
    wanted = [launch for launch in launches if launch is not None]
    return wanted[0] if len(wanted) == 1 else partial(call_in_turn, tuple(wanted))


def call_in_turn(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def give_result(make: Launch, call: OverloadCall, rest: tuple[Any, ...]) -> Launch:
    """Give the result of `make` to `call`, before further arguments, without a copy."""
    return partial(call_with_result, make, call, rest)


def call_with_result(make: Launch, call: OverloadCall, rest: tuple[Any, ...]) -> None:
    call(make(), *rest)


def copy_result(make: Callable[[], Any], outs: Sequence[torch.Tensor], unread: Collection[int] = ()) -> Launch:
    """Copy the results of `make` into `outs`, except those that nobody reads."""
    if len(outs) != 1:
        return partial(copy_all, make, outs, unread)
    return partial(copy_one, make, outs[0])


def copy_one(make: Callable[[], Any], out: torch.Tensor) -> None:
    result = make()
    if type(result) is not torch.Tensor:
        (result,) = tensors_in(result)
    if result.shape != out.shape or result.dtype is not out.dtype:
        raise misfit(result, out)
    out.copy_(result)


def copy_all(make: Callable[[], Any], outs: Sequence[torch.Tensor], unread: Collection[int]) -> None:
    """Results that nobody reads are skipped: some (offsets that only a gradient needs) have other sizes in traces, and
    the gradients that a mask leaves out are None.
    """
    made = make()
    results = made if isinstance(made, tuple) and len(made) == len(outs) else list(tensors_in(made))
    for at, (result, out) in enumerate(zip(results, outs, strict=True)):
        if at in unread:
            continue
        if result is None or result.shape != out.shape or not _holds(out.dtype, result.dtype):
            raise misfit(result, out)
        out.copy_(result)


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `wide` is `dtype` or a wider float: only traces have float32 statistics of a half batch_norm."""
    floating = wide.is_floating_point and dtype.is_floating_point
    return dtype is wide or (floating and torch.promote_types(wide, dtype) is wide)


def misfit(result: torch.Tensor | None, out: torch.Tensor) -> ResultMismatch:
    """The error for a result of another dtype or shape than `out`, which the graph declares."""
    made = "nothing" if result is None else f"{result.dtype}{list(result.shape)}"
    return ResultMismatch(
        f"it made {made}, and the graph says {out.dtype}{list(out.shape)}; "
        "a trace on another device than the CPU may differ there, and torch before 2.13 gives the states of an LSTM "
        "one dim more than they have: trace the model on the CPU, or with a newer torch"
    )
