"""Numbers that Python asks for while a step is recorded, where they follow from what no step changes.

A recording runs on tensors without numbers. Yet `bool((mask == causal).all())`, as torch's own TransformerEncoder asks
of its mask, follows from a stored mask and constants alone. So during the recording, what follows from such tensors is
computed, as long as nothing else takes part; an answer that follows from anything else is refused, with its line.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.errors import Unsupported

UNREGISTERED = ""
"""Stands for a tensor that is neither a parameter nor a buffer; it is a constant of the recording."""

LARGEST = 2**22
"""Elements of a result up to which it is computed."""


class AskedForNumber(Unsupported):
    """Python asked for a number that only the step itself computes."""


@dataclass(frozen=True, slots=True)
class KnownValue:
    """Numbers, and the names of the stored tensors that they follow from."""

    tensor: torch.Tensor
    sources: frozenset[str] = frozenset()


class KnownValues(TorchDispatchMode):
    """Follows each operator of a recording, and answers what Python asks of a tensor whose numbers are known."""

    def __init__(self, name_of: Callable[[object], str] = lambda _: "") -> None:
        """`name_of` names the attribute that holds a tensor."""
        super().__init__()
        self._name_of = name_of
        self.decided_by: set[str] = set()
        """The names of the stored tensors that an answer followed from."""
        self._known: Any = WeakIdKeyDictionary()

    def add(self, traced: torch.Tensor, name: str, stored: torch.Tensor) -> None:
        """Say that `traced` stands for the stored tensor `name`."""
        self._known[traced] = KnownValue(stored, frozenset([name]))

    def numbers_of(self, traced: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor of this recording, or zeros where they are not known."""
        fact = self._find(traced)
        return torch.zeros(traced.shape, dtype=traced.dtype) if fact is None else fact.tensor.detach().clone()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        facts = [self._find(tensor) for tensor in tensors]
        known = [fact for fact in facts if fact is not None]
        is_known = len(known) == len(facts)
        if torch.Tag.data_dependent_output in func.tags:
            if not is_known:
                raise AskedForNumber(
                    f"Python asks for a number of a tensor ({func}, {place_outside()}), which is only known when the "
                    "step runs: use torch.where or another operator in place of if, float(), int() or .item()"
                )
            self.decided_by |= frozenset().union(*(fact.sources for fact in known))
            return self._compute(func, args, kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, is_known)
        result = func(*args, **kwargs)
        _refuse_open_sizes(func, result)
        if is_known and torch.Tag.nondeterministic_seeded not in func.tags and _is_small(result):
            sources = frozenset().union(*(fact.sources for fact in known))
            computed = pytree.tree_leaves(self._compute(func, args, kwargs))
            for traced, tensor in zip(pytree.tree_leaves(result), computed, strict=True):
                if isinstance(traced, torch.Tensor):
                    self._known[traced] = KnownValue(tensor, sources)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: bool) -> Any:
        """Call an operator that writes to its operands; what it writes to is known only if it is made here."""
        given = {**dict(zip((entry.name for entry in func._schema.arguments), args, strict=False)), **kwargs}
        targets = [
            given.get(entry.name) for entry in func._schema.arguments if entry.alias_info and entry.alias_info.is_write
        ]
        tensors = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
        facts = [self._find(tensor) for tensor in tensors]
        for tensor, fact in zip(tensors, facts, strict=True):
            if fact is not None and UNREGISTERED in fact.sources:
                name = self._name_of(tensor)
                raise Unsupported(
                    f"the step writes to {f'{name!r}, ' if name else ''}a tensor that is neither a parameter nor a "
                    f"buffer when the recording begins ({func}, {place_outside()}), so no step can keep it for the "
                    "next one: register it by register_buffer in __init__, or call the module once before"
                )
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if known and not seeded and all(fact is not None and not fact.sources for fact in facts):
            self._compute(func, args, kwargs)
        else:
            self._forget([fact.tensor for fact in facts if fact is not None])
        return func(*args, **kwargs)

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget what lies in the memory of these tensors."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for traced, fact in list(self._known.items()):
            if fact.tensor.untyped_storage().data_ptr() in memory:
                del self._known[traced]

    def _find(self, tensor: torch.Tensor) -> KnownValue | None:
        return KnownValue(tensor, frozenset([UNREGISTERED])) if is_plain(tensor) else self._known.get(tensor)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        def value_of(leaf: Any) -> Any:
            fact = self._find(leaf) if isinstance(leaf, torch.Tensor) else None
            return leaf if fact is None else fact.tensor

        own_args, own_kwargs = pytree.tree_map(value_of, (args, dict(kwargs)))
        with _disable_current_modes(), torch.no_grad():
            return func(*own_args, **own_kwargs)


def _refuse_open_sizes(func: Any, result: Any) -> None:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape):
            raise Unsupported(
                f"the size of a result follows from the numbers in the input ({func}, {place_outside()}); expected "
                "sizes that stay from step to step: use torch.where or multiply by a mask in place of a selection"
            )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers: it comes from outside of the recording."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_small(result: Any) -> bool:
    return all(leaf.numel() <= LARGEST for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def place_outside(frames: traceback.StackSummary | None = None) -> str:
    """The line of the user's code that is being recorded: the innermost one that belongs neither to torch nor to us.

    frames: those of an error, by default those that run now.
    """
    for frame in reversed(traceback.extract_stack() if frames is None else frames):
        path = Path(frame.filename)
        if path.parent == HERE and path.name not in WATCHING:
            break  # the recording itself: what is outside of it only called it
        if not frame.filename.startswith("<") and not any(path.is_relative_to(home) for home in HOMES):
            return f"{path.name}:{frame.lineno}"
    return NO_PLACE


NO_PLACE = "no place known"

HERE = Path(__file__).parent

WATCHING = (Path(__file__).name, "frozen_numbers.py", "mixed_norms.py")
"""Files here whose code stands between an operator and the code that called it."""

HOMES = (Path(torch.__file__).parent, HERE.parent)
"""Folders whose code is not the user's."""
