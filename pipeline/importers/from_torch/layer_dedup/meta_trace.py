"""Run a model on meta tensors, and record its calls in order, with the origin of each tensor.

This is independent of torch.export, and costs a hundredth of it. Calls are recorded at two levels: as the model makes
them (`torch.nn.functional.dropout(x, 0.1, False)`, which may reach no operator), and as torch dispatches them
(`aten.addmm.default`), which includes calls from C++. The caller's module is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.layer_dedup.layer_runs import NotRepeatable
from pipeline.importers.from_torch.layer_dedup.recorder import CallRecorder, Event, MetaResults, Ref
from pipeline.importers.from_torch.modules import STANDARD, as_exporting, every_path, preserve_module_state


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a model. `keys` numbers the leaves of (args, kwargs); with fewer arguments they stay the same."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    keys: tuple[int, ...]

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call with all arguments, numbered from 0."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        return Call(tuple(args), dict(kwargs), tuple(range(len(leaves))))

    def tensors(self) -> dict[int, torch.Tensor]:
        """{key: tensor}, in the order of the call."""
        leaves, _ = self.flat()
        return {key: leaf for key, leaf in zip(self.keys, leaves, strict=True) if isinstance(leaf, torch.Tensor)}

    def flat(self) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
        """All leaves, and how they are arranged."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return tuple(leaves), spec

    def with_tensors(self, tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs with other tensors, in new containers: a model may write into a list or a cache."""
        leaves, spec = self.flat()
        return pytree.tree_unflatten(
            [tensors.get(key, leaf) for key, leaf in zip(self.keys, leaves, strict=True)], spec
        )

    def spare(self, module: nn.Module) -> dict[int, str]:
        """{key: torch.export's name} of the tensors that the forward takes as `*inputs`, of which it may get fewer."""
        takes = list(inspect.signature(module.forward).parameters.values())
        star = next(
            (index for index, parameter in enumerate(takes) if parameter.kind is inspect.Parameter.VAR_POSITIONAL), None
        )
        if star is None:
            return {}
        return {
            self.keys[place]: f"{takes[star].name.lower()}_{index - star}"
            for index, (place, item) in enumerate(zip(self._places(), self.args, strict=True))
            if index >= star and isinstance(item, torch.Tensor)
        }

    def without(self, keys: Collection[int]) -> Call:
        """The call without the arguments `keys`, which are among those of `spare`."""
        kept = [item for place, item in zip(self._places(), self.args, strict=True) if self.keys[place] not in keys]
        return Call(tuple(kept), self.kwargs, tuple(key for key in self.keys if key not in keys))

    def _places(self) -> list[int]:
        """Where the leaves of each positional argument begin."""
        return list(accumulate((len(pytree.tree_leaves(item)) for item in self.args[:-1]), initial=0))


@contextmanager
def sandbox(module: nn.Module, blank: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Replace buffers, and tensors that are plain attributes, by what `blank` makes of them, so that a run may write to
    them. On exit they are restored, with everything else that a run may set on a module.

    Yields:
        {id of such a tensor: its replacement}.
    """
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = blank(tensor)
        return made[id(tensor)]

    with preserve_module_state(module) as modules:
        for inner in modules:
            if inner._buffers:
                _replace(inner._buffers, once)
            if len(vars(inner)) > len(STANDARD):
                _replace(vars(inner), once)
        yield made


def _replace(held: dict[str, Any], blank: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = [(name, item) for name, item in held.items() if isinstance(item, torch.Tensor)]
    held.update((name, blank(item)) for name, item in tensors)


Place: TypeAlias = tuple[str, nn.Module]
"""A module and its path."""


@dataclass(frozen=True, slots=True)
class MetaTrace:
    """The record of one run. `spans` has the range of events of each call of each layer."""

    events: tuple[Event, ...]
    spans: Mapping[str, Sequence[tuple[int, int]]]
    outputs: tuple[Ref | None, ...]
    """The origin of each leaf of the result; None for one that is no tensor."""
    result: tuple[tuple[Any, ...], pytree.TreeSpec]
    """The leaves of the result, tensors on meta among them, and their pytree."""

    def span(self, layer: str) -> tuple[int, int]:
        """
        Raises:
            NotRepeatable: the layer is not called exactly once.
        """
        spans = self.spans.get(layer, ())
        inside = [span for path, (span, *_) in self.spans.items() if path.startswith(f"{layer}.")] if not spans else []
        if inside:  # a list or a dict is a layer, of which the modules in it are called
            return min(inside)[0], max(stop for _, stop in inside)
        if len(spans) != 1:
            raise NotRepeatable(
                f"{layer} is {'called more than once' if spans else 'not called as a module, or not at all'}"
            )
        return spans[0]


def walk(module: nn.Module, call: Call, layers: Mapping[str, nn.Module]) -> MetaTrace:
    """Run `module`, which is as before afterwards; `layers` {path: layer} are those whose spans are wanted.

    Raises:
        NotRepeatable: it cannot run without data.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    places = list(every_path(module))
    parameters, others, given = _parameters(places), _others(places), call.tensors()
    on_meta = all(tensor.is_meta for tensor in (*parameters.values(), *others.values(), *given.values()))
    with ExitStack() as stack:
        mode = None if on_meta else stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        blanks = stack.enter_context(sandbox(module, partial(_blank, mode=mode)))
        tensors = {key: _blank(tensor, mode) for key, tensor in given.items()}
        recorder = CallRecorder(MetaResults() if mode is None else None)
        for name, tensor in parameters.items():  # of several names the last stays, as in torch.export
            recorder.set_origin(tensor, ("stored", name))
        for name, tensor in others.items():
            recorder.set_origin(blanks[id(tensor)], ("stored", name))
        for key, tensor in tensors.items():
            recorder.set_origin(tensor, ("given", key))
        stack.enter_context(as_exporting())
        # Else `torch.cond` would be compiled here, and what that caches from this run fails in the trace.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_spans(recorder, layers, spans, _origins(places)))
        args, kwargs = call.with_tensors(tensors)
        stack.enter_context(recorder)
        try:
            result = module(*args, **kwargs)
        except NotRepeatable:
            raise
        except Exception as error:
            raise NotRepeatable(f"it does not run without data: {type(error).__name__}: {error}") from error
    leaves, spec = pytree.tree_flatten(result)
    outputs = [recorder.ref_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    return MetaTrace(tuple(recorder.events), spans, tuple(outputs), (tuple(leaves), spec))


def _blank(tensor: torch.Tensor, mode: FakeTensorMode | None) -> torch.Tensor:
    """A new tensor without data: the caller's may be two arguments at once, or a parameter."""
    own = tensor.detach() if mode is None else mode.from_tensor(tensor.detach())
    return own.requires_grad_(tensor.requires_grad)


def _parameters(places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """Parameters by all of their names."""
    return {
        f"{path}.{key}" if path else key: parameter
        for path, module in places
        for key, parameter in module._parameters.items()
        if parameter is not None
    }


def _others(places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """Buffers, and tensors that are plain attributes: torch makes constants of those, by these names."""
    found: dict[str, torch.Tensor] = {}
    for path, module in places:
        for held in (module._buffers, vars(module) if len(vars(module)) > len(STANDARD) else None):
            for key, item in held.items() if held else ():
                if isinstance(item, torch.Tensor):
                    found[f"{path}.{key}" if path else key] = item
    return found


def _origins(places: Sequence[Place]) -> dict[int, str]:
    """{id of a module: its path}, the first module where it has several."""
    return {id(module): path for path, module in reversed(places)}


@contextmanager
def _spans(
    recorder: CallRecorder,
    layers: Mapping[str, nn.Module],
    spans: dict[str, list[tuple[int, int]]],
    origins: Mapping[int, str],
) -> Iterator[None]:
    paths = {id(layer): path for path, layer in layers.items()}
    plain = nn.Module.__call__

    def record_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
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
    nn.Module.__call__ = record_call
    try:
        yield
    finally:
        nn.Module.__call__ = plain
