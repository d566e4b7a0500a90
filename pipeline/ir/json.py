"""Write a Graph as plain JSON data, and read it back: exact, versioned, without the bytes of stored values.

    {"format_version": 2, "name": "mlp", "inputs": ["x"], "outputs": ["y"],
     "tensors": [{"name": "x", "shape": [2, 4], "dtype": "float32", "device": "cpu", "role": "input"}, …],
     "ops": [{"kind": "LeakyRelu", "inputs": ["h"], "outputs": ["y"], "attrs": {"alpha": {"float": 0.01}},
              "constraints": {"inplace": {"ints": [0]}}, "name": "node_1", "origin": "act",
              "kernel": {"kind_id": 12, "attr_schema": "leaky/1", "attr_blob": "0ad7233c"}}]}

The index of a tensor is its vid. `kernel` is null where no emitter knew the kind. Written only where they are
not empty: of the graph `updates` {state: value after a run}, `sources` {stored value: names in a checkpoint},
`dims` {name: [least, most or null]} and `guards`; of a tensor `strides`; of an op `hints`, `saved`,
`node_type`, `line` and `bodies`, which are graphs like this one.

`tagged.py` says how attributes are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from passes.suggest import plural
from pipeline.argument_checks import MAPPING, Check, a, expects
from pipeline.errors import SourceError
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.check import violations
from pipeline.ir.codec import (
    ATTR,
    BLOB,
    TEXT,
    U32,
    Field,
    FieldError,
    Form,
    as_tuple,
    by_key,
    choice,
    only_json,
    optional,
    record,
    several,
)
from pipeline.ir.graph import Dim, DimRange, Graph, KernelSpec, Op, Payload, Role, TensorSpec
from pipeline.ir.tagged import items_of, same

FORMAT_VERSION: Final = 2
"""It grows when a key changes its meaning or is removed. Up to version 1, an op of ONNX had a kind of its own."""


@expects(graph=a(Graph, "a Graph"))
def to_json(graph: Graph) -> dict[str, Any]:
    """`graph` as dicts, lists, strings, numbers, booleans and null; `json.dumps(…, allow_nan=False)` takes it."""
    return {"format_version": FORMAT_VERSION, **_write_graph(graph)}


def digest_graph(graph: Graph) -> str:
    """The SHA-256 of the graph's JSON with sorted keys and no spaces, in hex: by it a plan names its graph."""
    text = json.dumps(to_json(graph), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_graph(graph: Graph) -> dict[str, Any]:
    return _graph_form([value.name for value in graph.values]).to_json(graph)


@expects(data=Check(MAPPING.accepts, "a dict, as to_json gives"), payloads=MAPPING.or_none())
def from_json(data: Mapping[str, Any], payloads: Mapping[str, Payload] | None = None) -> Graph:
    """The Graph that `data` describes.

    Args:
        data: what `to_json` returned, or what `json.loads` made of it.
        payloads: name of a stored value → its elements; a value without an entry has none.

    Raises:
        SourceError: another format version, or data that is not a graph or breaks a rule of the IR.
    """
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise SourceError(
            f"IR JSON: found format_version {version!r}, expected {FORMAT_VERSION}; "
            "write the file again with this release, or read it with the release that wrote it"
        )
    try:
        graph = _read_graph(data, payloads)
    except FieldError as error:
        place = error.place.lstrip(".") or "the top level"
        raise SourceError(f"IR JSON: {place} cannot be read: {error.reason}; compare it with `to_json`") from error
    if wrong := violations(graph, read_payloads=False):
        lines = "\n".join(f"  - {violation}" for violation in wrong)
        raise SourceError(f"IR JSON: the graph {graph.name!r} breaks {plural(len(wrong), 'rule')} of the IR:\n{lines}")
    return graph


def _read_graph(data: Any, payloads: Mapping[str, Payload] | None = None) -> Graph:
    (decls,) = record(as_tuple, Field("tensors", TENSORS)).from_json(data)
    form = _graph_form([decl.name for decl in decls])
    name, inputs, outputs, _, ops, *facts = form.from_json(data)
    ops = [Op(oid, *values) for oid, values in enumerate(ops)]
    try:
        return assemble(name, decls, ops, inputs, outputs, payloads, GraphFacts(*facts))
    except (TypeError, ValueError) as error:
        raise FieldError("", str(error)) from error


def _graph_form(names: Sequence[str]) -> Form:
    """A graph whose values have these names, by vid; read, it is the tuple of its fields."""
    vids = {name: vid for vid, name in enumerate(names)}

    def vid_of(name: Any) -> int:
        if name not in vids:
            raise ValueError(f"no tensor is called {name!r}")
        return vids[name]

    vid = only_json(names.__getitem__, vid_of)
    op = record(
        as_tuple,
        Field("kind", TEXT),
        Field("inputs", several(vid)),
        Field("outputs", several(vid)),
        Field("attrs", ATTRS),
        Field("kernel", KERNEL),
        Field("constraints", ATTRS),
        Field("hints", ATTRS, default={}),
        Field("saved", several(U32), default=()),
        Field("name", TEXT),
        Field("node_type", TEXT, default=""),
        Field("origin", TEXT),
        Field("line", TEXT, default=""),
        Field("bodies", several(only_json(_write_graph, _read_graph)), default=()),
    )
    return record(
        as_tuple,
        Field("name", TEXT),
        Field("inputs", several(vid)),
        Field("outputs", several(vid)),
        Field("tensors", only_json(TENSORS.to_json, same), "values"),
        Field("ops", several(op)),
        Field("updates", by_key(vid, vid), default={}),
        Field("sources", by_key(vid, several(TEXT)), default={}),
        Field("dims", by_key(TEXT, SPAN), default={}),
        Field("guards", several(TEXT), default=()),
    )


def make_decl(name: str, shape: Shape, dtype: str, device: str, role: Role, strides: Shape | None) -> ValueDecl:
    return ValueDecl(name, TensorSpec(shape, dtype, device), role, strides)


def dim_of(item: Any) -> Dim:
    if type(item) not in (int, str):
        raise ValueError(f"found {item!r:.60}, expected a size or the name of a dimension")
    return item


Shape = tuple[Dim, ...]

DIMS: Final = several(only_json(same, dim_of))

TENSORS: Final = several(
    record(
        make_decl,
        Field("name", TEXT),
        Field("shape", DIMS, "spec.shape"),
        Field("dtype", TEXT, "spec.dtype"),
        Field("device", TEXT, "spec.device"),
        Field("role", choice(Role)),
        Field("strides", optional(DIMS), default=None),
    )
)

KERNEL: Final = optional(
    record(KernelSpec, Field("kind_id", U32), Field("attr_schema", TEXT), Field("attr_blob", BLOB))
)

ATTRS: Final = by_key(TEXT, ATTR)

SPAN: Final = only_json(lambda span: [span.least, span.most], lambda item: DimRange(*items_of(item)))
