"""Random graphs for the written forms: odd names, every attribute type, stored values made between ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pipeline.ir import (
    DTYPE_BITS,
    BodyRef,
    DimRange,
    Graph,
    InputRef,
    KernelSpec,
    Op,
    Role,
    SymExpr,
    TensorSpec,
    TorchConst,
)
from pipeline.ir.builder import Builder, FindEmitter

INTS = st.integers(-(2**70), 2**70)
FLOATS = st.floats(allow_nan=False)
PLAIN = st.one_of(
    st.booleans(), INTS, FLOATS, st.text(), *(st.lists(part).map(tuple) for part in (INTS, FLOATS, st.text()))
)
NAMED = st.one_of(
    st.none(),
    st.complex_numbers(allow_nan=False),
    st.builds(TorchConst, st.text(), st.text()),
    st.builds(SymExpr, st.text()),
)
ATTRS = st.recursive(PLAIN | NAMED, lambda part: st.lists(part, max_size=3).map(tuple), max_leaves=5)
SAVED = st.lists(st.integers(0, 3), max_size=2)
CONSTRAINTS = st.dictionaries(st.text(), PLAIN, max_size=3)
TABLES = st.dictionaries(st.text(), ATTRS, max_size=3)
DIMS = st.dictionaries(st.text(), st.builds(DimRange, st.integers(0, 9), st.none() | st.integers(9, 2**40)), max_size=2)
SPECS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 2**40) | st.text(min_size=1), max_size=4).map(tuple),
    st.sampled_from(sorted(DTYPE_BITS)),
    st.sampled_from(["cpu", "cuda:0"]) | st.text(),
)
KERNELS = st.builds(KernelSpec, st.integers(-9, 2**40), st.text(), st.binary())


def kernel_of(kernel: KernelSpec | None) -> FindEmitter:
    """Emitters that give the kind "K" this kernel."""
    return lambda kind: None if kernel is None or kind != "K" else lambda attrs, inputs, outputs: kernel


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A valid graph of up to 12 values."""
    names = iter(draw(st.lists(st.text(min_size=1), min_size=12, max_size=12, unique=True)))
    b = Builder(draw(st.text()), kernel_of(draw(st.none() | KERNELS)))
    vids: list[int] = []
    for step in draw(st.lists(st.sampled_from(["input", "param", "state", "const", "op", "op"]), max_size=6)):
        if step != "op":
            vids.append(getattr(b, step)(next(names), draw(SPECS)))
            continue
        inputs = draw(st.lists(st.sampled_from(vids), max_size=3)) if vids else []
        outputs = [(next(names), draw(SPECS)) for _ in range(draw(st.integers(0, 2)))]
        kind = draw(st.sampled_from(["K", "Add", "return", "com.microsoft::Attention"]))
        details: dict[str, Any] = {"name": draw(st.text()), "origin": draw(st.text()), "node_type": draw(st.text())}
        saved = [place for place in draw(SAVED) if place < len(inputs)]
        advice = {"constraints": draw(CONSTRAINTS), "hints": draw(CONSTRAINTS), "saved": saved}
        vids += b.emit(kind, inputs, outputs, draw(TABLES), **advice, **details)
    built = b.build(draw(st.lists(st.sampled_from(vids), max_size=3)) if vids else [])
    return with_facts(draw, replace(built, ops=tuple(spell_call(draw, op) for op in built.ops)))


def spell_call(draw: st.DrawFn, op: Op) -> Op:
    """`op`, maybe with its call spelled out, a body and a line."""
    if not draw(st.booleans()):
        return op
    body = Builder(draw(st.text()))
    body = body.build([body.input("x", draw(SPECS))])
    uses = tuple(InputRef(index) for index in range(len(op.inputs)))
    attrs = {key: item for key, item in op.attrs.items() if key not in ("call", "body")}
    return replace(op, attrs={**attrs, "call": uses, "body": BodyRef(0)}, bodies=(body,), line=draw(st.text()))


def with_facts(draw: st.DrawFn, graph: Graph) -> Graph:
    """`graph` with strides, updates of its states by themselves, names in a checkpoint, dims and guards."""
    values = [
        replace(value, strides=draw(st.none() | st.just(tuple(reversed(value.spec.shape))))) for value in graph.values
    ]
    return replace(
        graph,
        values=tuple(values),
        updates={value.vid: value.vid for value in graph.with_role(Role.STATE) if draw(st.booleans())},
        sources={value.vid: (value.name, "tied") for value in graph.with_role(Role.PARAM) if draw(st.booleans())},
        dims=draw(DIMS),
        guards=tuple(draw(st.lists(st.text(), max_size=2))),
    )
