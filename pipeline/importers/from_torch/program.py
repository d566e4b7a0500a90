"""torch's ExportedProgram → Graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.region import Region
from pipeline.importers.from_torch.tensors import TensorPayload, Tensors, holds_values
from pipeline.ir import Graph, Payload, Role
from pipeline.ir.builder import GraphFacts
from pipeline.ir.dims import names_in
from pipeline.ir.graph import DimRange

Tied = Mapping[str, Sequence[str]]


def from_torch(
    program: ExportedProgram,
    name: str = "",
    *,
    dims: Mapping[str, str] | None = None,
    tied: Tied | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """The Graph of `program`, op for op; op kinds are aten's (`aten.linear.default`).

    Params, buffers and lifted constants keep torch's placeholder names (`p_fc_weight`), and have their names in a
    checkpoint in `sources`; `tied` adds further names {"lm_head.weight": ["model.embed_tokens.weight"]}. Values that
    only the program has (lifted constants, non-persistent buffers) come as payloads, unless they are on meta and not
    among `constants` {name: value}. `dims` names torch's symbols: {"s77": "batch"}.

    Raises:
        Unsupported: something that the IR cannot hold; the message names the node, its module and its line.
    """
    dims, known = dims or {}, {**program.constants, **(constants or {})}
    region = Region(program.graph_module, Tensors(dims))
    changed = {spec.target for spec in program.graph_signature.output_specs if spec.kind in UPDATES}
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    targets: dict[str, int] = {}
    sources: dict[int, tuple[str, ...]] = {}
    inputs: list[int] = []
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            _refuse_objects(spec)
            region.declare_number(node)
            continue
        vid = region.declare(node, _role(spec, changed), _payload(spec, known))
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(vid)
        key = spec.target or node.name
        targets[key] = vid
        if spec.target is not None:
            sources[vid] = (spec.target, *(tied or {}).get(spec.target, ()))
    region.read()
    outputs, updates = _leaving(program, region, targets)
    facts = GraphFacts(updates, sources, ranges(program, dims), guards(program, dims))
    return region.graph(name, inputs, outputs, facts)


def _leaving(program: ExportedProgram, region: Region, targets: Mapping[str, int]) -> tuple[list[int], dict[int, int]]:
    outputs: list[int] = []
    updates: dict[int, int] = {}
    (results,) = program.graph.output_node().args
    for spec, item in zip(program.graph_signature.output_specs, _several(results), strict=True):
        if spec.kind is OutputKind.TOKEN or not isinstance(spec.arg, TensorArgument):
            continue
        vid = region.result_of(item)
        if type(vid) is not int:
            raise Unsupported(f"the output {spec.arg.name!r} is no tensor; the IR gives back tensors")
        if spec.kind in UPDATES and spec.target is not None:
            _refuse_another_shape(spec.target, region, targets[spec.target], vid)
            updates[targets[spec.target]] = vid
        else:
            outputs.append(vid)
    return outputs, updates


def _refuse_another_shape(target: str, region: Region, before: int, after: int) -> None:
    was, is_now = (region.spec(vid) for vid in (before, after))
    if was != is_now:
        shown = [f"{spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in (was, is_now)]
        raise Unsupported(
            f"the model makes {shown[1]} of {target!r}, which is {shown[0]}, as `out=` and `resize_` do where sizes "
            "differ; a static IR keeps the size of what it stores: give it its final size from the beginning"
        )


def _several(results: object) -> Sequence[object]:
    return results if isinstance(results, list | tuple) else (results,)


def _role(spec: InputSpec, changed: set[str | None]) -> Role:
    if spec.kind is InputKind.USER_INPUT:
        return Role.INPUT
    if spec.target in changed:
        return Role.STATE
    return Role.PARAM if spec.kind is InputKind.PARAMETER else Role.CONST


def _payload(spec: InputSpec, known: Mapping[str, Any]) -> Payload | None:
    """What no checkpoint has: lifted constants and non-persistent buffers."""
    held = known.get(spec.target or "")
    return TensorPayload(held) if isinstance(held, torch.Tensor) and holds_values(held) else None


def _refuse_objects(spec: InputSpec) -> None:
    if spec.kind is InputKind.CUSTOM_OBJ:
        raise Unsupported(
            f"{spec.target or spec.arg.name!r} is an object of C++ (torch.ScriptObject); the IR holds tensors, numbers "
            "and names: keep it outside of the model"
        )


UPDATES = frozenset({OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION})


SYMBOL = re.compile(r"[A-Za-z_]\w*")
UNBOUNDED = 2**62
"""torch writes "no limit" as its own infinity, or as the largest integer that it can index with."""


def ranges(program: ExportedProgram, dims: Mapping[str, str]) -> dict[str, DimRange]:
    """{name: the sizes that the program was traced for}; `dims` renames symbols.

    Only symbols of the inputs count: functionalizing leaves ranges of symbols that the program no longer has.
    """
    found = {}
    known = {str(symbol) for size in _named_sizes(program) for symbol in size.node.expr.free_symbols}
    for symbol, span in program.range_constraints.items():
        name = str(symbol)
        if name in known:
            most = int(span.upper) if span.upper.is_finite and span.upper < UNBOUNDED else None
            found[dims.get(name, name)] = DimRange(int(span.lower), most)
    return found


def guards(program: ExportedProgram, dims: Mapping[str, str]) -> tuple[str, ...]:
    """Conditions on named dims that the trace relied on, beyond their ranges: `Eq(Mod(batch, 2), 0)`.

    Guards on torch's internal symbols are left out: no caller can break them.
    """
    environment = _environment(program)
    if environment is None:
        return ()
    texts = [str(guard.expr.xreplace(environment.replacements)) for guard in environment.guards]
    renamed = [SYMBOL.sub(lambda found: dims.get(found[0], found[0]), text) for text in texts]
    known = ranges(program, dims).keys()
    return tuple(text for text in dict.fromkeys(renamed) if text != "True" and names_in(text) <= known)


def _environment(program: ExportedProgram) -> Any:
    """What torch knows of its symbols; None where every size is a number."""
    return next((size.node.shape_env for size in _named_sizes(program)), None)


def _named_sizes(program: ExportedProgram) -> Iterator[torch.SymInt]:
    """Sizes of the inputs that are no numbers."""
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                yield size
