"""Write a Graph as text that people read and `parse.from_text` reads back.

    graph "mlp" (%0 "x": float32[2, 4]) {
      param %1 "fc.weight": float32[4, 8]

      %2 "h": float32[2, 8] = MatMul(%0, %1) @"fc" node "node_MatMul_0"
      %3 "y": float32[2, 8] = LeakyRelu(%2) {alpha: 0.01} where {inplace: [0]} kernel 12 "leaky/1" 0x0ad7233c

      return %3
    }

A value is written with its vid, name and spec where it is declared, and as its vid afterwards. Stored values come
first, in the order of their vids; `on "cuda:0"` follows a spec that is not on the CPU, `strides [1, 4]` one that was
not contiguous in the source, `from "name", …` a stored value that has names in a checkpoint. An op has, where they are
not empty, `{attributes}`, `@"origin"`, `node "its name in the source"`, `of "its type there"`, `line "file:line"`,
`where {constraints}`, `hints {advice}`, `saves [0, 2]`, `kernel kind_id "attr_schema" 0xattr_blob` and `with [graph …,
graph …]`, its bodies, whose vids are their own. Before `return` come `update %state = %value`, `dim name: 1 .. 64` and
`guard "condition"`. As well as plain data, an attribute is `none`, `$0` (the op's first input), `body(0)`,
`size("2*batch")`, `complex(0.0, 1.0)` or a constant of torch by kind and name: `word("dtype", "bfloat16")`. Strings are
escaped like JSON; line breaks mean nothing; `#` starts a comment. Payloads are not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from pipeline.argument_checks import a, expects
from pipeline.ir.graph import (
    Attr,
    BodyRef,
    Dim,
    Graph,
    InputRef,
    KernelSpec,
    Op,
    Role,
    SymExpr,
    TensorSpec,
    TorchConst,
    Value,
)


@expects(graph=a(Graph, "a Graph"))
def to_text(graph: Graph) -> str:
    """`graph` in the form above, ending in a line break."""
    return "".join(f"{line}\n" for line in lines(graph))


def lines(graph: Graph) -> Iterator[str]:
    yield f"graph {quote(graph.name)} ({join(declare(graph.values[vid]) for vid in graph.inputs)}) {{"
    stored = graph.with_role(Role.PARAM, Role.STATE, Role.CONST)
    yield from (f"  {value.role} {declare(value)}{sources(graph, value)}" for value in stored)
    if stored:
        yield ""
    yield from (f"  {operation(graph, op)}" for op in graph.ops)
    if graph.ops:
        yield ""
    yield from (f"  update %{vid} = %{after}" for vid, after in graph.updates.items())
    yield from (f"  dim {word(name)}: {span.least} .. {span.most or ''}".rstrip() for name, span in graph.dims.items())
    yield from (f"  guard {quote(guard)}" for guard in graph.guards)
    yield f"  return {join(f'%{vid}' for vid in graph.outputs)}".rstrip()
    yield "}"


def operation(graph: Graph, op: Op) -> str:
    results = join(declare(graph.values[vid]) for vid in op.outputs) or "()"
    parts = [f"{results} = {word(op.kind)}({join(f'%{vid}' for vid in op.inputs)})"]
    if op.attrs:
        parts.append(table(op.attrs))
    if op.origin:
        parts.append(f"@{quote(op.origin)}")
    if op.name:
        parts.append(f"node {quote(op.name)}")
    if op.node_type:
        parts.append(f"of {quote(op.node_type)}")
    if op.line:
        parts.append(f"line {quote(op.line)}")
    if op.constraints:
        parts.append(f"where {table(op.constraints)}")
    if op.hints:
        parts.append(f"hints {table(op.hints)}")
    if op.saved:
        parts.append(f"saves {literal(op.saved)}")
    if op.kernel is not None:
        parts.append(kernel(op.kernel))
    if op.bodies:
        parts.append(f"with [{join(indent(to_text(body)) for body in op.bodies)}]")
    return " ".join(parts)


def indent(text: str) -> str:
    return text.rstrip().replace("\n", "\n    ")


def sources(graph: Graph, value: Value) -> str:
    keys = graph.sources.get(value.vid, ())
    return f" from {join(map(quote, keys))}" if keys else ""


def declare(value: Value) -> str:
    text = f"%{value.vid} {quote(value.name)}: {tensor(value.spec)}"
    return text if value.strides is None else f"{text} strides [{join(map(size, value.strides))}]"


def tensor(spec: TensorSpec) -> str:
    text = f"{spec.dtype}[{join(map(size, spec.shape))}]"
    return text if spec.device == "cpu" else f"{text} on {quote(spec.device)}"


def size(dim: Dim) -> str:
    return word(dim) if isinstance(dim, str) else str(dim)


def table(attrs: Mapping[str, Attr]) -> str:
    return "{" + join(f"{word(key)}: {literal(item)}" for key, item in attrs.items()) + "}"


def literal(item: Attr) -> str:
    """One attribute as text. A float keeps its point, exponent or name (inf, nan), so it never becomes an int."""
    match item:
        case tuple():
            return f"[{join(literal(part) for part in item)}]"
        case bool():
            return "true" if item else "false"
        case str():
            return quote(item)
        case None:
            return "none"
        case InputRef(index):
            return f"${index}"
        case BodyRef(index):
            return f"body({index})"
        case SymExpr(expression):
            return f"size({quote(expression)})"
        case TorchConst(kind, name):
            return f"word({quote(kind)}, {quote(name)})"
        case complex():
            return f"complex({item.real!r}, {item.imag!r})"
        case _:
            return repr(item)


def kernel(spec: KernelSpec) -> str:
    return f"kernel {spec.kind_id} {quote(spec.attr_schema)} 0x{spec.attr_blob.hex()}"


def word(text: str) -> str:
    """`text` unquoted where it is one word, else quoted."""
    return text if WORD.fullmatch(text) else quote(text)


def quote(text: str) -> str:
    return json.dumps(text)


def join(parts: Iterable[str]) -> str:
    return ", ".join(parts)


WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
