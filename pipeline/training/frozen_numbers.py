"""Numbers of Python that are others at each call, of which a recorded step would keep those of the recording.

`x * random.random()`, a counter or the time leaves a constant in the graph. So forward pass and loss are recorded once
more, and their operators are compared with those of the first time.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeline.errors import Unsupported
from pipeline.training.known_values import is_plain, place_outside

__all__ = ["CallLog", "RecurrentCalls", "counters_as_they_were", "repeats_needed"]

Call: TypeAlias = tuple[str, ...]
"""An operator, and a text for each of its operands and arguments."""


class CallLog(TorchDispatchMode):
    """Writes down each operator that is called, and compares with an earlier log, if there is one."""

    def __init__(self, earlier: CallLog | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._earlier = earlier
        self._random = _random_states()

    @property
    def drew_numbers(self) -> bool:
        """Whether Python or numpy has drawn random numbers since this was made."""
        return self._random != _random_states()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = (str(func), *map(_text_of, pytree.tree_leaves((args, kwargs or {}))))
        if self._earlier is not None:
            before = self._earlier.calls[len(self.calls)] if len(self.calls) < len(self._earlier.calls) else ()
            if call != before:
                raise Unsupported(_describe_difference(before, call))
        self.calls.append(call)
        return func(*args, **(kwargs or {}))


class RecurrentCalls(TorchFunctionMode):
    """Refuses calls of torch.lstm and its like with dropout between their layers, which torch does not record."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in RECURRENT:
            # Both forms of each, for padded and for packed sequences, have these behind the list of weights.
            first = next((place for place, item in enumerate(args) if isinstance(item, bool)), len(args))
            given = {
                **dict(zip(("has_biases", "num_layers", "dropout", "train"), args[first:], strict=False)),
                **kwargs,
            }
            if given.get("train") and given.get("dropout", 0) > 0 and given.get("num_layers", 1) > 1:
                raise Unsupported(
                    f"torch.{name} is called with {given['num_layers']} layers and dropout={given['dropout']} "
                    f"({place_outside()}), which torch leaves out of a recording: call it once for each layer with "
                    "torch.nn.functional.dropout between them"
                )
        return func(*args, **kwargs)


def repeats_needed(log: CallLog) -> int:
    """How often a recording is compared with a further one: a branch that a random number takes may be the same."""
    return 8 if log.drew_numbers else 1


@contextmanager
def counters_as_they_were(module: nn.Module) -> Iterator[None]:
    """Put plain numbers that the forward pass counts in its modules back, with a warning that a step counts none."""
    before = {name: (part, _numbers_of(part)) for name, part in module.named_modules()}
    try:
        yield
    finally:
        changed = []
        for name, (part, numbers) in before.items():
            now = _numbers_of(part)
            for key in sorted(key for key in numbers if key in now and now[key] != numbers[key]):
                changed.append(f"{name}.{key}" if name else key)
                vars(part)[key] = numbers[key]
    if changed:
        warnings.warn(
            f"the forward pass changes {', '.join(map(repr, changed))}, a number of Python, which no recorded step "
            "does: register it by register_buffer, and change it by an operator such as add_",
            stacklevel=2,
        )


def _numbers_of(part: nn.Module) -> dict[str, int | float]:
    return {key: value for key, value in vars(part).items() if isinstance(value, int | float)}


def _random_states() -> tuple[object, object]:
    """Of Python's and numpy's global generators, to compare."""
    return random.getstate(), repr(np.random.get_state())


def _text_of(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, int | float | complex | str | torch.dtype) else type(leaf).__name__
    form = f"{leaf.dtype}{list(leaf.shape)}"
    if not is_plain(leaf) or leaf.layout is not torch.strided or leaf.is_meta:
        return form
    with _disable_current_modes():
        numbers = leaf.detach().cpu().contiguous().reshape(-1)
        if leaf.numel() <= SHOWN:
            return f"{form} of {numbers.tolist()}"
        digest = hashlib.blake2b(numbers.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return f"{form} with the digest {digest}"


def _describe_difference(before: Call, now: Call) -> str:
    if before[:1] == now[:1] and len(before) == len(now):
        old, new = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
        found = f"computes with another number when it is recorded again: {old}, then {new}, in {now[0]}"
    else:
        found = f"calls other operators when it is recorded again: {before[0] if before else 'none'}, then {now[0]}"
    return (
        f"the forward pass or the loss {found} ({place_outside()}); a step would keep the first. Randomness of Python, "
        "counters and times are no part of a recording: draw by torch, count in a buffer, or give it with the batch"
    )


RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

SHOWN: Final = 4
"""Elements of a constant up to which a message shows them."""
