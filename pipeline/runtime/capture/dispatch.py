"""What torch's dispatcher leaves out while launches are warmed up, recorded and replayed: autograd and autocast.

Inference mode would leave out as much, but its guard costs 0.46 µs of a replay, and a copy that is made in it is an
inference tensor, which its caller could not train with. A guard of the dispatcher can be made once and entered at
each replay, which costs 0.3 µs. It leaves grad mode on, by which SDPA and LSTM choose kernels, so whoever enters it
switches that off too. Autocast is on where the dispatcher has its key, and torch knows it by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Protocol

import torch


class DispatchGuard(Protocol):
    """Entered as often as one likes, and by one thread at a time: it keeps what it has to put back."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


set_grad_enabled = vars(torch._C)["_set_grad_enabled"]
"""What `torch.set_grad_enabled` calls, without an object for each call."""

Keys = torch._C.DispatchKeySet
Key = torch._C.DispatchKey

LEFT_OUT = reduce(
    or_, map(Keys, (Key.AutogradFunctionality, Key.AutogradOther, Key.AutogradNestedTensor, Key.AutocastCPU))
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
