"""Make inputs of a graph its states: caches that ONNX models take as `past` and give back as `present`."""

from __future__ import annotations

from collections.abc import Mapping

from passes.suggest import nearest
from pipeline.argument_checks import MAPPING, a, expects
from pipeline.errors import UsageError
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.graph import Graph, Role


@expects(graph=a(Graph, "a Graph"), pairs=MAPPING)
def as_states(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """`graph` with states in place of inputs: {input: output that is its value after a run}.

    These inputs and outputs are no longer in the signature: the values live with the program, which may write the new
    one over the old one. They have no value at first; `give_states` or the first feed gives it.

    Raises:
        UsageError: there is no such input or output, or the two have different shapes or dtypes.
    """
    inputs = {graph.values[vid].name: vid for vid in graph.inputs}
    outputs = {graph.values[vid].name: vid for vid in graph.outputs}
    for name, after in pairs.items():
        for kind, given, known in (("input", name, inputs), ("output", after, outputs)):
            if given not in known:
                raise UsageError(f"graph {graph.name!r} has no {kind} {given!r}{nearest(given, known)}")
        before, new = graph.values[inputs[name]].spec, graph.values[outputs[after]].spec
        if before != new:
            raise UsageError(
                f"input {name!r} is {before.dtype}{list(before.shape)} and output {after!r} is "
                f"{new.dtype}{list(new.shape)}; a state has one shape and one dtype: use a cache of fixed size"
            )
    states = {inputs[name]: outputs[after] for name, after in pairs.items()}
    decls = [
        ValueDecl(value.name, value.spec, Role.STATE if value.vid in states else value.role, value.strides)
        for value in graph.values
    ]
    payloads = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()}
    facts = GraphFacts({**graph.updates, **states}, graph.sources, graph.dims, graph.guards)
    kept_inputs = [vid for vid in graph.inputs if vid not in states]
    kept_outputs = [vid for vid in graph.outputs if vid not in states.values()]
    return assemble(graph.name, decls, graph.ops, kept_inputs, kept_outputs, payloads, facts=facts)
