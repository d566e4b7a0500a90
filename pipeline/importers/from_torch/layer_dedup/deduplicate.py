"""The entry point: trace only the distinct layers of a module, and build the Graph of the whole from them.

What is traced is a short copy of the model with only a few units of a run; the caller's module is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.layer_dedup.layer_runs import TRACED, LayerRun, NotRepeatable, runs_in
from pipeline.importers.from_torch.layer_dedup.meta_trace import Call, MetaTrace, walk
from pipeline.importers.from_torch.layer_dedup.proof import Proof, match_outputs, prove_equal_units
from pipeline.importers.from_torch.layer_dedup.recorder import Event
from pipeline.importers.from_torch.layer_dedup.whole_graph import ModuleCall, blocks_of, whole_graph
from pipeline.ir import Graph


def shorten_model(module: nn.Module, run: LayerRun, *, counts: bool = False) -> nn.Module:
    """A copy of `module` with few units of `run`. Only the modules from the root to the list are new objects.

    Layers keep their names. With `counts`, the attributes that count layers (COUNTS) of those modules and of their
    configs are set to the new number.

    Raises:
        Exception: whatever `copy.deepcopy` raises for an attribute on the way.
    """
    paths = (run.path, *run.siblings)
    ways = [_way(module, path) for path in paths]
    lists = {id(way[-1]): _shorten_list(run, path, way[-1]) for path, way in zip(paths, ways, strict=True)}
    above = {id(holder): holder for way in ways for holder in way[:-1]}
    memo: dict[int, Any] = {**lists}
    for holder in above.values():
        memo.update({id(child): child for child in holder.children() if id(child) not in above.keys() | lists.keys()})
        memo.update({id(item): item for item in _tensors(holder)})
    result = copy.deepcopy(module, memo)
    if counts:
        for holder in _way(result, run.path)[:-1]:
            _recount(holder, len(ways[0][-1]._modules), len(lists[id(ways[0][-1])]._modules))
    return result


def _shorten_list(run: LayerRun, path: str, layers: nn.Module) -> nn.Module:
    """A copy of the list with only the traced units and the layers in no unit."""
    short = copy.copy(layers)
    places = {name: run.locate(f"{path}.{name}" if path else name) for name in layers._modules}
    kept = {name: layers._modules[name] for name, place in places.items() if place is None or place[0] < TRACED}
    short.__dict__["_modules"] = kept
    return short


def _way(module: nn.Module, path: str) -> list[nn.Module]:
    way = [module]
    for name in path.split(".") if path else ():
        way.append(way[-1].get_submodule(name))
    return way


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [item for item in held if isinstance(item, torch.Tensor)]


def _recount(module: nn.Module, before: int, after: int) -> None:
    for holder in (module, getattr(module, "config", None)):
        for name in COUNTS:
            if holder is not None and getattr(holder, name, None) == before:
                setattr(holder, name, after)


COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")


@dataclass(frozen=True, slots=True)
class TracedModule:
    """A module, its call, and the meta trace of that call."""

    module: nn.Module
    call: Call
    walk: MetaTrace


def trace_module(module: nn.Module, call: Call, runs: Sequence[LayerRun]) -> TracedModule:
    """Trace `module` on meta, with spans of the layers of `runs`.

    Raises:
        NotRepeatable: it cannot run without data.
    """
    return TracedModule(module, call, walk(module, call, _layers(module, runs)))


def find_short_model(run: LayerRun, others: Sequence[LayerRun], whole: TracedModule, proof: Proof) -> TracedModule:
    """The first shortened model that makes the calls of the whole model around its layers.

    It has spans of the layers of `others` too, since it is the whole model when they are shortened.

    Raises:
        NotRepeatable: there is none.
    """
    parts = [whole.call]
    if spare := _spare(run, whole, proof):
        parts.append(whole.call.without(spare))
    reasons: list[NotRepeatable] = []
    for counts in (False, True):
        for part in parts:
            try:
                return _try_shortened(run, others, whole, proof, part, counts)
            except NotRepeatable as reason:
                reasons.append(reason)
    raise reasons[0]


def _try_shortened(
    run: LayerRun, others: Sequence[LayerRun], whole: TracedModule, proof: Proof, part: Call, counts: bool
) -> TracedModule:
    try:
        module = shorten_model(whole.module, run, counts=counts)
    except Exception as error:
        raise NotRepeatable(f"no copy of it can be made: {type(error).__name__}: {error}") from error
    try:
        found = trace_module(module, part, (replace(run, count=TRACED), *others))
    except NotRepeatable as reason:
        raise NotRepeatable(
            f"with {TRACED * run.period} layers in place of {run.count * run.period} {reason}"
        ) from reason
    match_outputs(run, whole.walk, found.walk, proof)
    return found


def _spare(run: LayerRun, whole: TracedModule, proof: Proof) -> set[int]:
    """Keys of inputs that only units without a trace read, and that the call can be made without."""
    later = range(proof.frames[TRACED - 1][1].start, proof.frames[-1][1].stop)
    events = whole.walk.events
    inside = _inputs_of(events[later.start : later.stop])
    around = _inputs_of((*events[: later.start], *events[later.stop :]))
    return whole.call.spare(whole.module).keys() & (inside - around)


def _inputs_of(events: Sequence[Event]) -> set[int]:
    return {ref[1] for event in events for ref in event.refs if ref[0] == "given"}


def _layers(module: nn.Module, runs: Sequence[LayerRun]) -> dict[str, nn.Module]:
    paths = [run.layer(unit, offset) for run in runs for unit in range(run.count) for offset in run.offsets]
    layers = {path: module.get_submodule(path) for path in paths}
    inside = [child for item in layers.items() for child in _modules_inside(*item)]
    return layers | dict(inside)


def _modules_inside(path: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a layer that is a list or a dict, which cannot be called itself."""
    if isinstance(layer, nn.ModuleList | nn.ModuleDict):
        for name, child in layer.named_children():
            yield f"{path}.{name}", child
            yield from _modules_inside(f"{path}.{name}", child)


Trace: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Graph]
"""Exports a module and reads the program."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The inputs or the outputs of a module, as torch's pytree flattens them."""

    leaves: tuple[Any, ...]
    spec: Any


@dataclass(frozen=True, slots=True)
class DeduplicatedGraph:
    """The `graph` of the whole model; `runs` say which layers were not traced."""

    graph: Graph
    runs: tuple[LayerRun, ...]
    inputs: Ends
    outputs: Ends
    """The tensors among these leaves correspond to the graph's inputs and outputs, in order."""
    left: tuple[str, ...] = ()
    """Why other runs of layers that look equal were traced: a sentence each."""


@dataclass(frozen=True, slots=True)
class TracedWhole:
    """No layer can be repeated: the model has to be traced whole, and `reason` says why, as a sentence."""

    reason: str
    run: LayerRun | None = None
    """What looked like equal layers; None where nothing did."""


def deduplicate_layers(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    trace: Trace,
    *,
    tied: Mapping[str, Sequence[str]] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> DeduplicatedGraph | TracedWhole:
    """Trace two layers of each run of equal layers in `module`, and repeat the second for the others.

    The Graph equals that of `trace(module, args, kwargs)`. The proof is a run of the whole model on meta, in which
    each layer has to make the same calls as the traced one. `module` is not changed. Sizes have to be numbers: a trace
    with named dims is not repeated. `tied` and `constants` are from_torch's, for the whole model.
    """
    runs = runs_in(module)
    alone = TracedWhole(f"{type(module).__name__} has no list of more than {TRACED} layers that look the same.")
    if not runs:
        return alone
    call = Call.of(args, kwargs)
    try:
        whole = trace_module(module, call, runs)
    except NotRepeatable as reason:
        layers = next((run for run in runs if not run.is_inside), None)
        return TracedWhole(_explain_whole(module, reason), layers)
    runs = [run for run in runs if not run.is_inside or run.layer(0, 0) in whole.walk.spans]
    if not runs:  # experts whose weights are stacked, say: nobody calls them
        return alone
    found, left = _Deduplicator(trace, tied or {}, constants or {}).first_of(runs, whole)
    if found is None:
        _refuse_counter(whole, runs)
        return TracedWhole(_explain_whole(module, *left), runs[0])
    return replace(found, left=left)


def _refuse_counter(whole: TracedModule, runs: Sequence[LayerRun]) -> None:
    """Refuse a model that counts its runs outside of its modules: the one on meta would shift the numbers of the trace.

    Raises:
        Unsupported: a second run makes calls with other numbers.
    """
    try:
        again = trace_module(whole.module, whole.call, runs).walk.events
    except NotRepeatable:
        return
    for first, second in zip(whole.walk.events, again, strict=False):
        if first.numbers() != second.numbers():
            found = [", ".join(event.numbers()) for event in (first, second)]
            raise Unsupported(
                f"{type(whole.module).__name__} computes something else each time that it runs: "
                f"{first.origin or 'it'} calls {first.name} with {found[0]}, and with {found[1]} in a second run; "
                "equal layers are found by a further run, so keep such a counter in the module, or extract "
                "without stamp=True"
            )


def _explain_whole(module: nn.Module, *reasons: object) -> str:
    further = f"; and {len(reasons) - 2} further lists cannot be repeated either" if len(reasons) > 2 else ""
    why = "; ".join(map(str, reasons[:2]))
    return f"{type(module).__name__} is traced whole, with the same graph in more time: {why}{further}."


class _RefusedByTrace(NotRepeatable):
    """A trace has shown that a run cannot be repeated. No other run is tried: each try would cost a trace."""


@dataclass(frozen=True, slots=True)
class _Deduplicator:
    """Shortens one run at a time: the shorter model is deduplicated by the next run, and the shortest one is traced.

    So each proof covers one run, and the two models it compares differ in nothing else.
    """

    trace: Trace
    tied: Mapping[str, Sequence[str]]
    constants: Mapping[str, torch.Tensor]

    def first_of(
        self, runs: Sequence[LayerRun], whole: TracedModule
    ) -> tuple[DeduplicatedGraph | None, tuple[str, ...]]:
        """Repeat the first of `runs` for which that is possible, and others within it; also why others were not."""
        left: list[str] = []
        for index, run in enumerate(runs):
            try:
                found = self._repeat_run(run, runs[index + 1 :], whole)
            except NotRepeatable as reason:
                left.append(str(reason))
                if isinstance(reason, _RefusedByTrace):
                    break
            else:
                return found, (*left, *found.left)
        return None, tuple(left)

    def _repeat_run(self, run: LayerRun, others: Sequence[LayerRun], whole: TracedModule) -> DeduplicatedGraph:
        run, proof = _find_equal_units(run, others, whole.walk)
        others = [rest for rest in others if rest.path not in run.siblings]
        short = find_short_model(run, others, whole, proof)
        within, left = self.first_of(others, short)
        try:
            traced = within.graph if within else _trace_short(self.trace, short)
            _check(replace(run, count=TRACED), traced, short.walk, self._describe_call(short))
            outputs = match_outputs(run, whole.walk, short.walk, proof)
            graph = whole_graph(run, traced, short.call, self._describe_call(whole), proof, outputs)
        except NotRepeatable as reason:
            raise _RefusedByTrace(*reason.args) from reason
        runs = (run, *within.runs) if within else (run,)
        return DeduplicatedGraph(graph, runs, Ends(*whole.call.flat()), Ends(*whole.walk.result), left)

    def _describe_call(self, traced: TracedModule) -> ModuleCall:
        return ModuleCall(traced.module, traced.call, self.tied, self.constants)


def _find_equal_units(run: LayerRun, others: Sequence[LayerRun], whole: MetaTrace) -> tuple[LayerRun, Proof]:
    """`run`, or the first of its alternatives whose units make equal calls, with the proof.

    The last to be tried are runs joined with the lists whose layers are called between those of `run`.
    """
    reasons: list[NotRepeatable] = []
    siblings = [candidate for candidate in others if _is_between(candidate, run, whole)]
    joined = run.join(siblings) if siblings else None
    for candidate in (run, *run.alternatives(), *((joined, *joined.alternatives()) if joined else ())):
        try:
            return candidate, prove_equal_units(candidate, whole)
        except NotRepeatable as reason:
            reasons.append(reason)
    raise reasons[0]


def _is_between(one: LayerRun, run: LayerRun, whole: MetaTrace) -> bool:
    """Whether layers of `one` are called between those of `run`."""
    try:
        first, last = (whole.span(one.layer(unit, 0)) for unit in (0, one.count - 1))
        ends = whole.span(run.layer(0, 0)), whole.span(run.layer(run.count - 1, 0))
        return one.path != run.path and first < ends[1] and last > ends[0]
    except NotRepeatable:
        return False


def _trace_short(trace: Trace, short: TracedModule) -> Graph:
    try:
        graph = trace(short.module, *short.call.with_tensors(short.call.tensors()))
    except Exception as error:
        raise NotRepeatable(f"its shortened copy cannot be traced: {type(error).__name__}: {error}") from error
    if graph.dims:
        raise NotRepeatable(f"its dims {', '.join(graph.dims)} have no fixed size, as the run without data has")
    if len(graph.outputs) != sum(ref is not None for ref in short.walk.outputs):
        raise NotRepeatable("torch gives back other tensors than the model does")
    return graph


def _check(run: LayerRun, traced: Graph, walk: MetaTrace, short: ModuleCall) -> None:
    """Check that repeating nothing, by the same rules, gives back the graph that was traced."""
    proof = prove_equal_units(run, walk)
    _check_reads(run, traced, walk, proof)
    again = whole_graph(run, traced, short.call, short, proof, match_outputs(run, walk, walk, proof))
    if replace(again, payloads={}) != replace(traced, payloads={}):
        raise NotRepeatable("torch orders or names things in a way that is not known here")


def _check_reads(run: LayerRun, traced: Graph, walk: MetaTrace, proof: Proof) -> None:
    """Check that the repeated ops read a tensor of the first unit only where the meta trace of the second did."""
    _, events, _ = proof.frames[0]
    seen = {ref[1] for event in walk.events[events.start : events.stop] for ref in event.refs if ref[0] == "stored"}
    for vid in {vid for oid in blocks_of(run, traced).second for vid in traced.ops[oid].inputs}:
        names = traced.sources.get(vid, ())
        places = [place for name in names if (place := run.locate(name)) is not None]
        if places and all(place[0] != 1 for place in places) and seen.isdisjoint(names):
            raise NotRepeatable(f"torch lists {names[0]} with the ops of {run.layer(1, 0)}")
