"""Write a Graph as plain JSON data, and read it back: exact, versioned, without the bytes of stored values.

    {"format_version": 1, "name": "mlp", "inputs": ["x"], "outputs": ["y"],
     "tensors": [{"name": "x", "shape": [2, 4], "dtype": "float32", "device": "cpu", "role": "input"}, …],
     "ops": [{"kind": "LeakyRelu", "inputs": ["h"], "outputs": ["y"], "attrs": {"alpha": {"float": 0.01}},
              "constraints": {"inplace": {"ints": [0]}}, "name": "node_1", "origin": "act",
              "kernel": {"kind_id": 12, "attr_schema": "leaky/1", "attr_blob": "0ad7233c"}}]}

The index of a tensor is its vid. `kernel` is null where no emitter knew the kind. Written only where they are
not empty: of the graph `updates` {state: value after a run}, `sources` {stored value: names in a checkpoint},
`dims` {name: [least, most or null]} and `guards`; of a tensor `strides`; of an op `hints`, `saved`,
`node_type`, `line` and `bodies`, which are graphs like this one.

An attribute says its type: `{"float": 0.1}`, `{"ints": [0, 1]}`, `{"word": ["dtype", "bfloat16"]}`. A float that JSON
cannot spell is the string "inf", "-inf" or "nan"; a complex number is a pair of floats. A tuple of ints, of floats or
of strings is a plain list; any other tuple is a list of tagged parts, so it may be nested.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes.suggest import plural
from pipeline.argument_checks import MAPPING, Check, a, expects
from pipeline.errors import SourceError
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.check import violations
from pipeline.ir.graph import (
    Attr,
    BodyRef,
    DimRange,
    Graph,
    InputRef,
    KernelSpec,
    Op,
    Payload,
    Role,
    SymExpr,
    TensorSpec,
    TorchConst,
    Value,
)

FORMAT_VERSION = 1


@expects(graph=a(Graph, "a Graph"))
def to_json(graph: Graph) -> dict[str, Any]:
    """`graph` as dicts, lists, strings, numbers, booleans and null; `json.dumps(…, allow_nan=False)` takes it."""
    return {"format_version": FORMAT_VERSION, **write_graph(graph)}


def digest_graph(graph: Graph) -> str:
    """The SHA-256 of the graph's JSON with sorted keys and no spaces, in hex: by it a plan names its graph."""
    text = json.dumps(to_json(graph), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_graph(graph: Graph) -> dict[str, Any]:
    names = [value.name for value in graph.values]
    facts = {
        "updates": {names[vid]: names[after] for vid, after in graph.updates.items()},
        "sources": {names[vid]: list(keys) for vid, keys in graph.sources.items()},
        "dims": {name: [span.least, span.most] for name, span in graph.dims.items()},
        "guards": list(graph.guards),
    }
    return {
        "name": graph.name,
        "inputs": [names[vid] for vid in graph.inputs],
        "outputs": [names[vid] for vid in graph.outputs],
        "tensors": [write_tensor(value) for value in graph.values],
        "ops": [write_op(op, names) for op in graph.ops],
        **{key: fact for key, fact in facts.items() if fact},
    }


@expects(data=Check(MAPPING.accepts, "a dict, as to_json gives"), payloads=MAPPING.or_none())
def from_json(data: Mapping[str, Any], payloads: Mapping[str, Payload] | None = None) -> Graph:
    """The Graph that `data` describes; `payloads` is by value name.

    Raises:
        SourceError: another format version, or data that is not a graph or breaks a rule of the IR.
    """
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise SourceError(
            f"IR JSON: found format_version {version!r}, expected {FORMAT_VERSION}; "
            "write the file again with this release, or read it with the release that wrote it"
        )
    graph = read_graph(data, payloads)
    if wrong := violations(graph, read_payloads=False):
        lines = "\n".join(f"  - {violation}" for violation in wrong)
        raise SourceError(f"IR JSON: the graph {graph.name!r} breaks {plural(len(wrong), 'rule')} of the IR:\n{lines}")
    return graph


def read_graph(data: Mapping[str, Any], payloads: Mapping[str, Payload] | None = None) -> Graph:
    where = "the top level"
    try:
        decls = []
        for index, tensor in enumerate(items_of(data["tensors"])):
            where = f"tensors[{index}]"
            decls.append(read_tensor(tensor))
        vids = {decl.name: vid for vid, decl in enumerate(decls)}
        ops = []
        for index, op in enumerate(items_of(data["ops"])):
            where = f"ops[{index}]"
            ops.append(read_op(index, op, vids))
        where = "inputs or outputs"
        inputs, outputs = ([vids[name] for name in items_of(data[side])] for side in ("inputs", "outputs"))
        where = "updates, sources, dims or guards"
        facts = read_facts(data, vids)
        where = "the top level"
        return assemble(text_of(data["name"]), decls, ops, inputs, outputs, payloads, facts)
    except KeyError as error:
        raise SourceError(f"IR JSON: {where} needs {error}, which is not there; compare it with `to_json`") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"IR JSON: {where} cannot be read: {error}; compare it with `to_json`") from error


def read_facts(data: Mapping[str, Any], vids: Mapping[str, int]) -> GraphFacts:
    return GraphFacts(
        {vids[name]: vids[after] for name, after in data.get("updates", {}).items()},
        {vids[name]: tuple(map(text_of, items_of(keys))) for name, keys in data.get("sources", {}).items()},
        {name: DimRange(least, most) for name, (least, most) in data.get("dims", {}).items()},
        tuple(map(text_of, items_of(data.get("guards", ())))),
    )


def write_tensor(value: Value) -> dict[str, Any]:
    spec = value.spec
    return {
        "name": value.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "device": spec.device,
        "role": str(value.role),
        **({} if value.strides is None else {"strides": list(value.strides)}),
    }


def read_tensor(data: Mapping[str, Any]) -> ValueDecl:
    spec = TensorSpec(tuple(items_of(data["shape"])), data["dtype"], data["device"])
    strides = data.get("strides")
    return ValueDecl(data["name"], spec, Role(data["role"]), None if strides is None else tuple(items_of(strides)))


def write_op(op: Op, names: list[str]) -> dict[str, Any]:
    kernel = op.kernel
    return {
        "kind": op.kind,
        "inputs": [names[vid] for vid in op.inputs],
        "outputs": [names[vid] for vid in op.outputs],
        "attrs": {key: write_attr(item) for key, item in op.attrs.items()},
        "constraints": {key: write_attr(item) for key, item in op.constraints.items()},
        "name": op.name,
        "origin": op.origin,
        "kernel": kernel
        and {"kind_id": kernel.kind_id, "attr_schema": kernel.attr_schema, "attr_blob": kernel.attr_blob.hex()},
        **({"hints": {key: write_attr(item) for key, item in op.hints.items()}} if op.hints else {}),
        **({"saved": list(op.saved)} if op.saved else {}),
        **({"node_type": op.node_type} if op.node_type else {}),
        **({"line": op.line} if op.line else {}),
        **({"bodies": [write_graph(body) for body in op.bodies]} if op.bodies else {}),
    }


def read_op(oid: int, data: Mapping[str, Any], vids: Mapping[str, int]) -> Op:
    kernel = data["kernel"]
    return Op(
        oid,
        text_of(data["kind"]),
        tuple(vids[name] for name in items_of(data["inputs"])),
        tuple(vids[name] for name in items_of(data["outputs"])),
        {key: read_attr(item) for key, item in data["attrs"].items()},
        kernel and KernelSpec(kernel["kind_id"], kernel["attr_schema"], bytes.fromhex(kernel["attr_blob"])),
        {key: read_attr(item) for key, item in data["constraints"].items()},
        {key: read_attr(item) for key, item in data.get("hints", {}).items()},
        tuple(map(int_of, items_of(data.get("saved", ())))),
        text_of(data["name"]),
        text_of(data.get("node_type", "")),
        text_of(data["origin"]),
        text_of(data.get("line", "")),
        tuple(read_graph(body) for body in items_of(data.get("bodies", ()))),
    )


def write_attr(item: Attr) -> dict[str, Any]:
    if isinstance(item, tuple):
        kinds = {type(part) for part in item}
        if len(kinds) == 1 and (plain := PLURALS.get(kinds.pop())):
            return {plain: [spell(part) for part in item]}
        return {"list": [write_attr(part) for part in item]} if item else {"ints": []}
    tag, write = WRITERS[type(item)]
    return {tag: write(item)}


def read_attr(data: Mapping[str, Any]) -> Any:
    ((tag, item),) = data.items()
    if tag == "list":
        return tuple(read_attr(part) for part in items_of(item))
    if tag in SINGULARS:
        return tuple(SINGULARS[tag](part) for part in items_of(item))
    return READERS[tag](item)


def items_of(item: Any) -> Sequence[Any]:
    """`item` if it is a list: a text, or the keys of an object, would be taken for several items."""
    if not isinstance(item, list | tuple):
        raise ValueError(f"found {item!r:.60}, expected a list")
    return item


def text_of(item: Any) -> str:
    if not isinstance(item, str):
        raise ValueError(f"found {item!r:.60}, expected a text")
    return item


def int_of(item: Any) -> int:
    """`item` if it is an integer; 1.5 and true are none, though Python converts them."""
    if type(item) is not int:
        raise ValueError(f"found {item!r:.60}, expected an integer")
    return item


def float_of(item: Any) -> float:
    """A number, or the text for one that JSON does not have."""
    try:
        if type(item) in (int, float) or item in ("inf", "-inf", "nan"):
            return float(item)
    except OverflowError:
        pass
    raise ValueError(f"found {item!r:.60}, expected a number of float64, or the text inf, -inf or nan")


def bool_of(item: Any) -> bool:
    if type(item) is not bool:
        raise ValueError(f"found {item!r:.60}, expected true or false")
    return item


def spell(item: Any) -> Any:
    return repr(item) if isinstance(item, float) and not math.isfinite(item) else item


def same(item: Any) -> Any:
    return item


PLURALS: dict[type, str] = {int: "ints", float: "floats", str: "strings"}
SINGULARS: dict[str, Callable[[Any], Attr]] = {"ints": int_of, "floats": float_of, "strings": text_of}

WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    type(None): ("none", same),
    bool: ("bool", same),
    int: ("int", same),
    float: ("float", spell),
    str: ("string", same),
    complex: ("complex", lambda item: [spell(item.real), spell(item.imag)]),
    InputRef: ("use", lambda item: item.index),
    BodyRef: ("body", lambda item: item.index),
    TorchConst: ("word", lambda item: [item.kind, item.name]),
    SymExpr: ("size", lambda item: item.expression),
}

READERS: dict[str, Callable[[Any], Attr]] = {
    "none": lambda item: None,
    "bool": bool_of,
    "int": int_of,
    "float": float_of,
    "string": text_of,
    "complex": lambda item: complex(*map(float_of, items_of(item))),
    "use": lambda item: InputRef(int_of(item)),
    "body": lambda item: BodyRef(int_of(item)),
    "word": lambda item: TorchConst(*map(text_of, items_of(item))),
    "size": lambda item: SymExpr(text_of(item)),
}
