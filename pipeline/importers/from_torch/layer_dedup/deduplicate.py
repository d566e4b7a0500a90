"""The entry point: trace only the distinct layers of a module, and build the Graph of the whole from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.layer_dedup.layer_runs import TRACED, LayerRun, NotRepeatable, runs_in
from pipeline.importers.from_torch.layer_dedup.meta_trace import Call, MetaTrace
from pipeline.importers.from_torch.layer_dedup.proof import Proof, match_outputs, prove_equal_units
from pipeline.importers.from_torch.layer_dedup.shortened import TracedModule, find_short_model, trace_module
from pipeline.importers.from_torch.layer_dedup.whole_graph import ModuleCall, blocks_of, whole_graph
from pipeline.ir import Graph

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

    The Graph equals the one of `trace(module, args, kwargs)`. The proof is a run of the whole model on meta, in which
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
        others = [one for one in others if one.path not in run.beside]
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

    def _describe_call(self, one: TracedModule) -> ModuleCall:
        return ModuleCall(one.module, one.call, self.tied, self.constants)


def _find_equal_units(run: LayerRun, others: Sequence[LayerRun], whole: MetaTrace) -> tuple[LayerRun, Proof]:
    """`run`, or the first of its alternatives whose units make equal calls, with the proof.

    The last to be tried are runs joined with the lists whose layers are called between those of `run`.
    """
    reasons: list[NotRepeatable] = []
    beside = [one for one in others if _is_between(one, run, whole)]
    joined = run.join(beside) if beside else None
    for one in (run, *run.alternatives(), *((joined, *joined.alternatives()) if joined else ())):
        try:
            return one, prove_equal_units(one, whole)
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
        raise NotRepeatable(f"its dims {', '.join(graph.dims)} have no fixed size, as the run without numbers has")
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
