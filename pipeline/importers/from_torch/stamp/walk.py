"""One run of a model without numbers, written down: what it calls, in order, and where each tensor comes from.

It is independent of torch.export, and costs a hundredth of it. It sees calls twice: as the model makes them
(`torch.nn.functional.dropout(x, 0.1, False)`, which leaves nothing behind), and as torch breaks them down
(`aten.addmm.default`), which also shows what is called past Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.modules import STANDARD, as_exporting, every_path
from pipeline.importers.from_torch.stamp.aside import set_aside
from pipeline.importers.from_torch.stamp.call import Call
from pipeline.importers.from_torch.stamp.meta import MetaResults
from pipeline.importers.from_torch.stamp.record import Event, Recorder, Ref
from pipeline.importers.from_torch.stamp.unsuited import Unsuited

__all__ = ["Walk", "walk"]

Place: TypeAlias = tuple[str, nn.Module]
"""A module and its path."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What happened. `spans` has for each layer, and each call of it, where its events begin and end."""

    events: tuple[Event, ...]
    spans: Mapping[str, Sequence[tuple[int, int]]]
    outputs: tuple[Ref | None, ...]
    """For each leaf of what the model gave back; None for one that is no tensor."""
    result: tuple[tuple[Any, ...], pytree.TreeSpec]
    """Those leaves, tensors without numbers, and how they were arranged."""

    def span(self, layer: str) -> tuple[int, int]:
        """
        Raises:
            Unsuited: the layer is not called exactly once.
        """
        spans = self.spans.get(layer, ())
        inside = [span for path, (span, *_) in self.spans.items() if path.startswith(f"{layer}.")] if not spans else []
        if inside:  # a list or a dict is a layer, of which the modules in it are called
            return min(inside)[0], max(stop for _, stop in inside)
        if len(spans) != 1:
            raise Unsuited(
                f"{layer} is {'called more than once' if spans else 'not called as a module, or not at all'}"
            )
        return spans[0]


def walk(module: nn.Module, call: Call, layers: Mapping[str, nn.Module]) -> Walk:
    """Run `module`, which is as before afterwards; `layers` {path: layer} are those whose spans are wanted.

    Raises:
        Unsuited: it cannot run without numbers.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    places = list(every_path(module))
    parameters, others, given = _parameters(places), _others(places), call.tensors()
    on_meta = all(tensor.is_meta for tensor in (*parameters.values(), *others.values(), *given.values()))
    with ExitStack() as stack:
        mode = None if on_meta else stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        blanks = stack.enter_context(set_aside(module, partial(_blank, mode=mode)))
        tensors = {key: _blank(tensor, mode) for key, tensor in given.items()}
        recorder = Recorder(MetaResults() if mode is None else None)
        for name, tensor in parameters.items():  # of several names the last stays, as in torch.export
            recorder.know(tensor, ("stored", name))
        for name, tensor in others.items():
            recorder.know(blanks[id(tensor)], ("stored", name))
        for key, tensor in tensors.items():
            recorder.know(tensor, ("given", key))
        stack.enter_context(as_exporting())
        # Else `torch.cond` is compiled in here, and what that remembers of this run fails in the trace.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_spans(recorder, layers, spans, _origins(places)))
        args, kwargs = call.renewed(tensors)
        stack.enter_context(recorder)
        try:
            result = module(*args, **kwargs)
        except Unsuited:
            raise
        except Exception as error:
            raise Unsuited(f"it does not run without numbers: {type(error).__name__}: {error}") from error
    leaves, spec = pytree.tree_flatten(result)
    outputs = [recorder.known(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    return Walk(tuple(recorder.events), spans, tuple(outputs), (tuple(leaves), spec))


def _blank(tensor: torch.Tensor, mode: FakeTensorMode | None) -> torch.Tensor:
    """A tensor of its own: the caller's may be two arguments at once, or a parameter."""
    own = tensor.detach() if mode is None else mode.from_tensor(tensor.detach())
    return own.requires_grad_(tensor.requires_grad)


def _parameters(places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """By all their names."""
    return {
        f"{path}.{key}" if path else key: parameter
        for path, one in places
        for key, parameter in one._parameters.items()
        if parameter is not None
    }


def _others(places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """Buffers, and tensors that are plain attributes: torch makes constants of those, by these names."""
    found: dict[str, torch.Tensor] = {}
    for path, one in places:
        for held in (one._buffers, vars(one) if len(vars(one)) > len(STANDARD) else None):
            for key, item in held.items() if held else ():
                if isinstance(item, torch.Tensor):
                    found[f"{path}.{key}" if path else key] = item
    return found


def _origins(places: Sequence[Place]) -> dict[int, str]:
    """{id of a module: its path}, the first one where it has several."""
    return {id(one): path for path, one in reversed(places)}


@contextmanager
def _spans(
    recorder: Recorder,
    layers: Mapping[str, nn.Module],
    spans: dict[str, list[tuple[int, int]]],
    origins: Mapping[int, str],
) -> Iterator[None]:
    paths = {id(layer): path for path, layer in layers.items()}
    plain = nn.Module.__call__

    def seen(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        start, around = len(recorder.events), recorder.origin
        recorder.origin = origins.get(id(module), "")
        try:
            return plain(module, *args, **kwargs)
        finally:
            recorder.origin = around
            path = paths.get(id(module))
            if path is not None:
                spans.setdefault(path, []).append((start, len(recorder.events)))

    # As torch.fx does. Hooks would end a span before the caller's own, which belong to the module in a trace too.
    nn.Module.__call__ = seen
    try:
        yield
    finally:
        nn.Module.__call__ = plain
