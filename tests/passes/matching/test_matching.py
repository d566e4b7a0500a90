"""Which node after a pass is which one from before it, and what a made one stands for: a picture of each case."""

from __future__ import annotations

import numpy as np
import pytest

from passes.provenance import annotations_of
from tests.support.annotated_models import carry_annotations, replaced_nodes
from tests.support.onnx_models import matrix, model_of

WEIGHTS = {"w": matrix(8, 8, 0), "b": matrix(2, 8, 1)}

# Which old node a new one replaces, found from its neighbours.

REPLACED: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "a value between two made nodes kept its name": (
        "[a] v1 = Relu (x) [b] v2 = Tanh (v1) [c] v3 = Exp (v2) [d] y = Neg (v3)",
        "v2 = Selu (x) y = Softsign (v2)",
        {"v2": ("a", "b"), "y": ("c", "d")},
    ),
    "nothing between two made nodes kept its name": (
        "[a] v1 = Relu (x) [b] v2 = Tanh (v1) [c] v3 = Exp (v2) [d] y = Neg (v3)",
        "n1 = Selu (x) y = Softsign (n1)",
        {"n1": ("a", "b", "c", "d"), "y": ("a", "b", "c", "d")},
    ),
    "a product with the weights of another between made nodes": (
        "[a] v1 = Relu (x) [b] v2 = MatMul (v1, w) [c] v3 = Add (v2, b) [d] y = Tanh (v3)",
        "n1 = Selu (x) n2 = Gemm (n1, w, b) y = Softsign (n2)",
        {"n1": ("a",), "n2": ("b", "c"), "y": ("d",)},
    ),
    "products whose biases hold the same numbers": (
        "[a] v1 = MatMul (x, w) [b] v2 = Add (v1, b) [c] v3 = MatMul (v2, w2) [d] y = Add (v3, b2)",
        "n1 = Gemm (x, w, b) y = Gemm (n1, w2, b2)",
        {"n1": ("a", "b"), "y": ("c", "d")},
    ),
    "made nodes in a row, each with a share of its own": (
        "[a] v1 = Relu (x) [b] v2 = Tanh (v1) [c] v3 = Exp (v1) [d] v4 = Neg (v2) [e] v5 = Abs (v3) y = Add (v4, v5)",
        "n1 = Selu (x) n2 = Softsign (n1) n3 = Softplus (n1) n4 = Neg (n2) n5 = Abs (n3) y = Add (n4, n5)",
        {"n1": ("a", "b", "c"), "n2": ("a", "b"), "n3": ("a", "c")},
    ),
    "constants that were folded into it": (
        "[one] c1 = Constant <value_int = 1> () [fill] c2 = Expand (c1, eight) [a] v = Add (x, c2) [b] y = Tanh (v)",
        "y = Softsign (x)",
        {"y": ("a", "b")},
    ),
    "a shape that was computed beside it": (
        """
        [size] s1 = Shape (x) [pick] s2 = Gather (s1, zero) [join] s3 = Concat <axis = 0> (s2, eight)
        [a] v1 = Tanh (x) [view] v2 = Reshape (v1, s3) [end] y = Neg (v2)
        """,
        "n1 = Softsign (x) y = Neg (n1)",
        {"n1": ("a", "view")},
    ),
    "a constant that was folded": (
        "[one] c1 = Constant <value_float = 1.0> () [fill] c2 = Expand (c1, eight) [a] y = Add (x, c2)",
        "n = Constant <value_floats = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]> () y = Add (x, n)",
        {"n": ("one", "fill")},
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_what_a_made_node_stands_for(case: str) -> None:
    before, after, expected = REPLACED[case]
    stored = {**WEIGHTS, "w2": matrix(8, 8, 5), "b2": WEIGHTS["b"], "zero": np.array([0]), "eight": np.array([8])}
    frame = "g (float[2, 8] x) => (float[2, 8] y) {{ {} }}"
    result = carry_annotations(model_of(frame.format(before), **stored), model_of(frame.format(after), **stored))
    assert replaced_nodes(result) == expected


# After the pass: the name from before of each node that survived, None for a made one.

SURVIVING: dict[str, tuple[str, str, list[str | None]]] = {
    "another attribute and another input, the same name": (
        "[a] v1 = Relu (x) [t] v2 = Transpose <perm = [1, 0]> (v1) [u] v = Transpose <perm = [1, 0]> (v2) "
        "[b] y = Neg (v)",
        "[a] v1 = Relu (x) [u] n = Transpose <perm = [0, 1]> (v1) y = Neg (n)",
        ["a", "u", "b"],
    ),
    "another attribute between made nodes, the same two names": (
        "[a] v1 = Relu (x) [t] v2 = Transpose <perm = [1, 0]> (v1) [b] v3 = Exp (v2) [c] y = Neg (v3)",
        "n1 = Selu (x) [t] v2 = Transpose <perm = [0, 1]> (n1) n3 = Softsign (v2) y = Neg (n3)",
        [None, "t", None, "c"],
    ),
    "another attribute between added nodes, the same name": (
        "[a] v1 = Relu (x) [t] v2 = Transpose <perm = [1, 0]> (v1) [b] y = Neg (v2)",
        "[a] v1 = Relu (x) n1 = Abs (v1) [t] n2 = Transpose <perm = [0, 1]> (n1) n3 = Abs (n2) [b] y = Neg (n3)",
        ["a", None, "t", None, "b"],
    ),
    "of two that compute the same, the one that kept its name": (
        "[p] v1 = Relu (x) [q] v2 = Relu (x) [s] y = Add (v1, v2)",
        "[q] v2 = Relu (x) y = Add (v2, v2)",
        ["q", "s"],
    ),
    "of two that compute the same, each by its reader": (
        "[p] v1 = Relu (x) [q] v2 = Relu (x) [r] v3 = Tanh (v1) [s] v4 = Exp (v2) [t] y = Sub (v3, v4)",
        "n2 = Relu (x) n4 = Exp (n2) n1 = Relu (x) n3 = Tanh (n1) y = Sub (n3, n4)",
        ["q", "s", "p", "r", "t"],
    ),
    "of two that come to read the same, each by its name": (
        "[a] v1 = Relu (x) [p] v2 = Tanh (v1) [i] v3 = Abs (v1) [q] v4 = Tanh (v3) [s] y = Add (v2, v4)",
        "n0 = Neg (x) [a] v1 = Relu (n0) [q] n4 = Tanh (v1) [p] n2 = Tanh (v1) y = Add (n2, n4)",
        [None, "a", "q", "p", "s"],
    ),
    "after an Identity that went": (
        "[i] v1 = Identity (x) [p] v2 = Tanh (v1) [r] v3 = Relu (x) [j] v4 = Identity (v3) [q] v5 = Tanh (v4) "
        "[s] y = Add (v2, v5)",
        "n2 = Tanh (x) n3 = Relu (x) n5 = Tanh (n3) y = Add (n5, n2)",
        ["p", "r", "q", "s"],
    ),
    "not a product of other weights that took a name": (
        "[p] v1 = MatMul (x, w) [q] v2 = MatMul (x, v) [s] y = Add (v1, v2)",
        "[p] n1 = MatMul (x, wide) n2, n3 = Split <axis = 1, num_outputs = 2> (n1) y = Add (n2, n3)",
        [None, None, "s"],
    ),
    "not a node that took the name of one elsewhere": (
        "[p] v1 = Tanh (x) [q] v2 = Exp (v1) [r] v3 = Neg (v2) [s] v4 = Abs (v3) [t] y = Relu (v4)",
        "[p] v1 = Tanh (x) n2 = Exp (v1) n3 = Softsign (n2) [r] n4 = Neg (n3) n5 = Softplus (n4) y = Relu (n5)",
        ["p", "q", None, None, None, "t"],
    ),
}


@pytest.mark.parametrize("case", SURVIVING)
def test_who_survives(case: str) -> None:
    before, after, expected = SURVIVING[case]
    stored = {"w": matrix(8, 8, 0), "v": matrix(8, 8, 2), "wide": matrix(8, 16, 3)}
    frame = "g (float[8, 8] x) => (float[8, 8] y) {{ {} }}"
    result = carry_annotations(model_of(frame.format(before), **stored), model_of(frame.format(after), **stored))
    assert [None if annotations_of(node).author else node.name for node in result.graph.node] == expected
