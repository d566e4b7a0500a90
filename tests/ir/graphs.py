"""Random graphs for the written forms: odd names, every attribute type, stored values made between ops."""

from __future__ import annotations

from hypothesis import strategies as st

from pipeline.ir import DTYPE_BITS, Builder, Graph, KernelSpec, TensorSpec

__all__ = ["graphs", "kernel_of"]

INTS = st.integers(-(2**70), 2**70)
FLOATS = st.floats(allow_nan=False)
ATTRS = st.one_of(
    st.booleans(), INTS, FLOATS, st.text(), *(st.lists(part).map(tuple) for part in (INTS, FLOATS, st.text()))
)
TABLES = st.dictionaries(st.text(), ATTRS, max_size=3)
SPECS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 2**40) | st.text(min_size=1), max_size=4).map(tuple),
    st.sampled_from(sorted(DTYPE_BITS)),
    st.sampled_from(["cpu", "cuda:0"]) | st.text(),
)
KERNELS = st.builds(KernelSpec, st.integers(-9, 2**40), st.text(), st.binary())


def kernel_of(kernel: KernelSpec | None) -> dict:
    """Emitters that give the kind "K" this kernel."""
    return {} if kernel is None else {"K": lambda attrs, inputs, outputs: kernel}


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
        details = {"name": draw(st.text()), "origin": draw(st.text())}
        vids += b.emit(kind, inputs, outputs, draw(TABLES), constraints=draw(TABLES), **details)
    return b.build(draw(st.lists(st.sampled_from(vids), max_size=3)) if vids else [])
