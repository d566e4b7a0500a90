"""torch's state for a run: defaults in place of the caller's settings, and a dispatcher without autograd and autocast.

**Plain state** (`plain_state`). The graph alone decides the results of a run. So the caller's autocast, which casts
operands, default dtype, to which integers divide, and default device, where new tensors are made, are switched off. A
region of autocast inside a graph is an op of the graph, and still works. Other modes of torch stay on: a tracer has to
see what is run.

**Dispatch guard** (`make_guard`). While launches are warmed up, recorded and replayed, the dispatcher skips autograd
and autocast. Inference mode would skip as much, but entering it costs 0.46 µs of a replay, and a copy made in it is an
inference tensor, which its caller could not train with. A guard is made once and entered at each replay, which costs
0.3 µs. It leaves grad mode on, by which SDPA and LSTM choose kernels, so code that enters a guard also calls
`set_grad_enabled(False)`. torch stores whether autocast is on as a key of the dispatcher, so the guard switches it off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from operator import or_
from typing import Final, Protocol

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

get_default_dtype, float32 = torch.get_default_dtype, torch.float32
is_autocast_enabled, set_autocast_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
len_torch_function_stack = vars(torch._C)["_len_torch_function_stack"]


def plain_state() -> AbstractContextManager[None]:
    """A context in which torch computes by its defaults; nearly free if the caller has changed none of them."""
    is_plain = has_plain_defaults() and not (is_autocast_enabled("cpu") or is_autocast_enabled("cuda"))
    return PLAIN if is_plain else _shield()


def has_plain_defaults() -> bool:
    """Whether default dtype and default device are torch's own. Autocast is not asked for: a guard switches it off."""
    return (
        get_default_dtype() is float32
        and not FLOAT32.users
        and not (len_torch_function_stack() and _has_default_device())
    )


def _has_default_device() -> bool:
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


@contextmanager
def _shield() -> Iterator[None]:
    device = torch.device("cpu") if _has_default_device() else PLAIN
    is_on_card = is_autocast_enabled("cuda")
    with FLOAT32, torch.autocast("cpu", enabled=False), device:
        set_autocast_enabled("cuda", False)  # torch.autocast warns of it where there is no card
        try:
            yield
        finally:
            set_autocast_enabled("cuda", is_on_card)


class _Float32AsDefault:
    """A context in which the default dtype is float32. All threads share torch's default dtype, so the last thread to
    leave restores the caller's."""

    def __init__(self) -> None:
        self.users = 0
        self._callers = torch.float32
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self.users:
                self._callers = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self.users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                torch.set_default_dtype(self._callers)


PLAIN: Final = nullcontext()
FLOAT32: Final = _Float32AsDefault()


class DispatchGuard(Protocol):
    """A context manager that can be entered again and again, by one thread at a time: it stores what it restores."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


set_grad_enabled = vars(torch._C)["_set_grad_enabled"]
"""What `torch.set_grad_enabled` calls, without an object for each call."""

Keys = torch._C.DispatchKeySet
Key = torch._C.DispatchKey

LEFT_OUT = reduce(
    or_,
    map(
        Keys,
        (Key.AutogradFunctionality, Key.AutogradOther, Key.AutogradNestedTensor, Key.AutocastCPU, Key.AutocastCUDA),
    ),
)
"""The keys of `at::AutoDispatchBelowAutograd`, and that of autocast. Versions of tensors are still counted."""


def make_guard() -> DispatchGuard:
    """A guard for one capture; nothing is left out until it is entered."""
    guard: DispatchGuard = vars(torch._C)["_ExcludeDispatchKeyGuard"](LEFT_OUT)
    return guard


@contextmanager
def without_autograd() -> Iterator[None]:
    """The state of a replay, for warm-ups and records.

    Inference mode of the caller is switched off: launches keep tensors that they make here, and a replay outside of
    inference mode could not write to an inference tensor.
    """
    with torch.inference_mode(mode=False), torch.no_grad(), make_guard():
        yield
