"""Write a Graph as text that people read and `parse.from_text` reads back.

    graph "mlp" (%0 "x": float32[2, 4]) {
      param %1 "fc.weight": float32[4, 8]

      %2 "h": float32[2, 8] = MatMul(%0, %1) @"fc" node "node_MatMul_0"
      %3 "y": float32[2, 8] = LeakyRelu(%2) {alpha: 0.01} where {inplace: [0]} kernel 12 "leaky/1" 0x0ad7233c

      return %3
    }

A value shows its vid, name and spec where it begins, and its vid afterwards. Stored values come first, in the order of
their vids; `on "cuda:0"` follows a spec that is not on the CPU. An op shows, each only where there is something to
show, `{attributes}`, `@"origin"`, `node "its name in the source"`, `where {constraints}` and
`kernel kind_id "attr_schema" 0xattr_blob`. Strings are escaped like JSON; line breaks mean nothing; `#` starts a
comment. Payloads are not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from pipeline.ir.graph import Attr, Graph, KernelSpec, Op, Role, Value
from pipeline.ir.spec import TensorSpec

__all__ = ["to_text"]


def to_text(graph: Graph) -> str:
    """`graph` in the form above, ending in a line break."""
    return "".join(f"{line}\n" for line in lines(graph))


def lines(graph: Graph) -> Iterator[str]:
    yield f"graph {quote(graph.name)} ({joined(declare(graph.values[vid]) for vid in graph.inputs)}) {{"
    stored = graph.with_role(Role.PARAM, Role.STATE, Role.CONST)
    yield from (f"  {value.role} {declare(value)}" for value in stored)
    if stored:
        yield ""
    yield from (f"  {operation(graph, op)}" for op in graph.ops)
    if graph.ops:
        yield ""
    yield f"  return {joined(f'%{vid}' for vid in graph.outputs)}".rstrip()
    yield "}"


def operation(graph: Graph, op: Op) -> str:
    made = joined(declare(graph.values[vid]) for vid in op.outputs) or "()"
    parts = [f"{made} = {word(op.kind)}({joined(f'%{vid}' for vid in op.inputs)})"]
    if op.attrs:
        parts.append(table(op.attrs))
    if op.origin:
        parts.append(f"@{quote(op.origin)}")
    if op.name:
        parts.append(f"node {quote(op.name)}")
    if op.constraints:
        parts.append(f"where {table(op.constraints)}")
    if op.kernel is not None:
        parts.append(kernel(op.kernel))
    return " ".join(parts)


def declare(value: Value) -> str:
    return f"%{value.vid} {quote(value.name)}: {tensor(value.spec)}"


def tensor(spec: TensorSpec) -> str:
    text = f"{spec.dtype}[{joined(word(dim) if isinstance(dim, str) else str(dim) for dim in spec.shape)}]"
    return text if spec.device == "cpu" else f"{text} on {quote(spec.device)}"


def table(attrs: Mapping[str, Attr]) -> str:
    return "{" + joined(f"{word(key)}: {literal(item)}" for key, item in attrs.items()) + "}"


def literal(item: Attr) -> str:
    """One attribute. A float keeps its point, its exponent or its name (inf, nan), so it never reads back as an int."""
    match item:
        case tuple():
            return f"[{joined(literal(part) for part in item)}]"
        case bool():
            return "true" if item else "false"
        case str():
            return quote(item)
        case _:
            return repr(item)


def kernel(spec: KernelSpec) -> str:
    return f"kernel {spec.kind_id} {quote(spec.attr_schema)} 0x{spec.attr_blob.hex()}"


def word(text: str) -> str:
    """`text` bare where it reads as one word, else quoted."""
    return text if WORD.fullmatch(text) else quote(text)


def quote(text: str) -> str:
    return json.dumps(text)


def joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)


WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
