"""Shield a run from what the caller's thread has switched on in torch: a graph says all that decides its results.

Autocast casts the operands of operators, torch's default dtype is what integers divide to, and a default device is
where new tensors are made. A region of autocast inside a graph is an op of it, and works all the same. Other modes of
torch are left on: a tracer has to see what is run.

What torch's dispatcher leaves out while launches are warmed up, recorded and replayed: autograd and autocast.

Inference mode would leave out as much, but its guard costs 0.46 µs of a replay, and a copy that is made in it is an
inference tensor, which its caller could not train with. A guard of the dispatcher can be made once and entered at
each replay, which costs 0.3 µs. It leaves grad mode on, by which SDPA and LSTM choose kernels, so whoever enters it
switches that off too. Autocast is on where the dispatcher has its key, and torch knows it by nothing else.
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
    """A context in which torch computes as it does by default. It costs next to nothing where that is so already."""
    is_plain = has_plain_defaults() and not (is_autocast_enabled("cpu") or is_autocast_enabled("cuda"))
    return PLAIN if is_plain else _shield()


def has_plain_defaults() -> bool:
    """Whether tensors are made as by default. A replay asks this alone, since its guard leaves autocast out."""
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
    """A context in which the default dtype is float32. All threads share that dtype, so the last one to leave puts the
    caller's back."""

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
    """Entered as often as one likes, and by one thread at a time: it keeps what it has to put back."""

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
    """The state of replays for warm-ups and records. What launches keep from them is no inference tensor of a caller
    in that mode, since a later replay, in no such mode, may write to it."""
    with torch.inference_mode(mode=False), torch.no_grad(), make_guard():
        yield
