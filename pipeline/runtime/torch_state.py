"""Shield a run from what the caller's thread has switched on in torch: a graph says all that decides its numbers.

Autocast casts the operands of operators, torch's default dtype is what integers divide to, and a default device is
where new tensors are made. A region of autocast inside a graph is an op of it, and works all the same. Other modes of
torch are left on: a tracer has to see what is run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

get_default_dtype, float32 = torch.get_default_dtype, torch.float32
len_torch_function_stack = vars(torch._C)["_len_torch_function_stack"]


def plain_state() -> AbstractContextManager[None]:
    """A context in which torch computes as it does by default. It costs next to nothing where that is so already."""
    return PLAIN if has_plain_defaults() and not torch.is_autocast_enabled("cpu") else _shield()


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
    with FLOAT32, torch.autocast("cpu", enabled=False), device:
        yield


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
