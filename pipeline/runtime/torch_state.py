"""Shield a run from what the caller's thread has switched on in torch: a graph says all that decides its numbers.

Autocast casts the operands of operators, torch's default dtype is what integers divide to, and a mode such as
`torch.device("meta")` sees every call. A region of autocast inside a graph is an op of it, and works all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

__all__ = ["plain_state"]


def plain_state() -> AbstractContextManager[None]:
    """A context in which torch computes as it does by default. It costs next to nothing where that is so already."""
    if (
        torch.get_default_dtype() is torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and not FLOAT32.users
    ):
        return PLAIN
    return _shield()


@contextmanager
def _shield() -> Iterator[None]:
    with FLOAT32, torch.autocast("cpu", enabled=False), torch._C.DisableTorchFunction():
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
