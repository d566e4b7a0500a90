"""An If of a known condition, by shapes or constants, is the branch that it takes."""

from __future__ import annotations

import pytest

from pipeline.errors import Unsupported
from tests.pipeline.importers.from_onnx.import_text import ops

# What torch exports for x.squeeze(1): ask for the size, and leave a size other than 1 alone.
SQUEEZE = """
g (float[2, n, 3] x) => (float[2, k] y) {
    all = Shape(x)
    one = Constant <value_ints = [1]> ()
    n = Gather(all, one)
    is_one = Equal(n, one)
    squeezed = If (is_one) <
        then_branch = small () => (s) { axis = Constant <value_ints = [1]> () s = Squeeze(x, axis) },
        else_branch = large () => (i) { i = Identity(x) }
    >
    y = Relu(squeezed)
}
"""


def test_the_condition_decides_at_import() -> None:
    assert ops(SQUEEZE, shapes={"x": (2, 1, 3)}) == (
        '%1 "s": float32[2, 3] = aten.reshape.default(%0) {shape: [2, 3]}\n'
        '%2 "y": float32[2, 3] = aten.relu.default(%1)'
    )
    assert ops(SQUEEZE, dims={"n": 4}) == '%1 "y": float32[2, 4, 3] = aten.relu.default(%0)'


def test_two_ifs_may_use_the_same_names_inside() -> None:
    branch = "then_branch = a () => (t) { t = Neg(x) }, else_branch = b () => (t) { t = Abs(x) }"
    text = (
        "g (float[2] x) => (float[2] y) { c = Constant <value_int = 1> () yes = Cast <to = 9> (c) no = Not(yes) "
        f"p = If (yes) <{branch}> q = If (no) <{branch}> y = Add(p, q) }}"
    )
    assert ops(text).splitlines() == [
        '%1 "t": float32[2] = aten.neg.default(%0)',
        '%2 "t.branch": float32[2] = aten.abs.default(%0)',
        '%3 "y": float32[2] = aten.add.Tensor(%1, %2)',
    ]


def test_a_later_node_may_have_a_name_of_the_branch() -> None:
    branch = "then_branch = a () => (z) { z = Neg(x) }, else_branch = b () => (z) { z = Abs(x) }"
    text = (
        "g (float[2] x) => (float[2] z) { c = Constant <value_int = 1> () yes = Cast <to = 9> (c) "
        f"p = If (yes) <{branch}> z = Exp(p) }}"
    )
    assert ops(text) == '%1 "z.branch": float32[2] = aten.neg.default(%0)\n%2 "z": float32[2] = aten.exp.default(%1)'


def test_an_if_inside_of_an_if() -> None:
    inner = "then_branch = c () => (u) { u = Neg(t) }, else_branch = d () => (u) { u = Abs(t) }"
    text = (
        "g (float[2] x) => (float[2] y) { t = Exp(x) c = Constant <value_int = 1> () yes = Cast <to = 9> (c) "
        f"y = If (yes) <then_branch = a () => (v) {{ no = Not(yes) v = If (no) <{inner}> }}, "
        "else_branch = b () => (w) { w = Identity(x) }> }"
    )
    assert ops(text) == '%1 "t": float32[2] = aten.exp.default(%0)\n%2 "y": float32[2] = aten.abs.default(%1)'


def test_a_condition_of_the_run_is_refused() -> None:
    branch = "then_branch = a () => (t) { t = Neg(x) }, else_branch = b () => (t) { t = Abs(x) }"
    text = f"g (float[2] x, bool c) => (float[2] y) {{ y = If (c) <{branch}> }}"
    with pytest.raises(Unsupported, match=r"- If \(its condition is known only at run time\): 1 × at 'y'"):
        ops(text)
