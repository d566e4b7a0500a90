"""AIMET's rotations: the names that it goes by, mistakes, and, where AIMET is installed, a decoder."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import pytest

import passes
from passes.catalog.listing import rows_of
from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.preparation import Rotate, name_after_modules
from tests.support.onnx_models import detached, matrix, model_of
from tests.support.onnx_text import arrays_of

HAS_AIMET = importlib.util.find_spec("aimet_onnx") is not None

WIDTH, HEAD, WORDS = 16, 8, 32

NORM = """
    {0}_square = Mul ({1}, {1})
    {0}_mean = ReduceMean <keepdims = 1> ({0}_square, last)
    {0}_lifted = Add ({0}_mean, epsilon)
    {0}_root = Sqrt ({0}_lifted)
    {0}_inverse = Reciprocal ({0}_root)
    {0}_unit = Mul ({1}, {0}_inverse)
    {0} = Mul ({0}_scale, {0}_unit)
"""

BLOCK = """
    q = MatMul (n1, "layers.0.q_proj.weight")
    k = MatMul (n1, "layers.0.k_proj.weight")
    v = MatMul (n1, "layers.0.v_proj.weight")
    qs = Reshape (q, heads)
    ks = Reshape (k, heads)
    vs = Reshape (v, heads)
    qh = Transpose <perm = [0, 2, 1, 3]> (qs)
    kh = Transpose <perm = [0, 2, 3, 1]> (ks)
    vh = Transpose <perm = [0, 2, 1, 3]> (vs)
    scores = MatMul (qh, kh)
    weights = Softmax <axis = -1> (scores)
    mixed = MatMul (weights, vh)
    turned = Transpose <perm = [0, 2, 1, 3]> (mixed)
    joined = Reshape (turned, whole)
    o = MatMul (joined, "layers.0.o_proj.weight")
    r1 = Add (x, o)
"""

MLP = """
    gate = MatMul (n2, "layers.0.gate_proj.weight")
    up = MatMul (n2, "layers.0.up_proj.weight")
    bent = Sigmoid (gate)
    silu = Mul (gate, bent)
    product = Mul (silu, up)
    down = MatMul (product, "layers.0.down_proj.weight")
    r2 = Add (r1, down)
"""


def decoder() -> onnx.ModelProto:
    """A decoder of one layer, with an embedding that has outlier channels."""
    text = f"""g (int64[1, 6] tokens) => (float[1, 6, {WORDS}] logits) {{
        x = Gather ("embed_tokens.weight", tokens)
        {NORM.format("n1", "x")} {BLOCK} {NORM.format("n2", "r1")} {MLP} {NORM.format("n3", "r2")}
        logits = MatMul (n3, "lm_head.weight")
    }}"""
    names = [f"layers.0.{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    weights = {name: matrix(WIDTH, WIDTH, seed) for seed, name in enumerate(names)}
    table = matrix(WORDS, WIDTH, 7)
    table[:, [2, 9]] *= 20
    scales = {f"n{at}_scale": np.linspace(0.5, 1.5, WIDTH, dtype=np.float32) for at in (1, 2, 3)}
    shapes = {"heads": np.array([1, 6, WIDTH // HEAD, HEAD]), "whole": np.array([1, 6, WIDTH]), "last": np.array([-1])}
    weights |= {"embed_tokens.weight": table, "lm_head.weight": matrix(WIDTH, WORDS, 8), **scales, **shapes}
    return model_of(text, epsilon=np.array(1e-5, np.float32), **weights)


def test_nodes_are_named_after_what_they_project() -> None:
    model = decoder()
    for node in model.graph.node:
        node.name = node.output[0]
    names = name_after_modules(model)
    known = {node.output[0]: node.name for node in model.graph.node}
    assert known["v"] == "/layers/0/v_proj/MatMul_10"
    assert known["logits"] == "/lm_head/MatMul_45"
    assert known["scores"] == "scores", "no weight, no module"
    assert names[known["v"]] == "v"


@pytest.mark.skipif(HAS_AIMET, reason="says what is said where AIMET is missing")
def test_without_aimet_the_extra_is_named(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"'rotate' needs aimet_onnx, an extra: pip install 'onnxline\[aimet\]'"):
        passes.optimize(decoder(), ["rotate"], context=context)
    [row] = rows_of(Rotate(), context)
    assert (row.runs, row.note) == (
        "missing",
        "the pass 'rotate' needs aimet_onnx, an extra: pip install 'onnxline[aimet]'",
    )


@pytest.mark.skipif(not HAS_AIMET, reason="aimet-onnx is an extra")
@pytest.mark.parametrize("options", [{}, {"r2": True, "head_size": HEAD}, {"r1": False, "r2": True, "head_size": HEAD}])
def test_a_decoder_is_rotated_and_proven(options: dict[str, object], context: PassContext) -> None:
    model = decoder()
    run = passes.optimize(model, [{"rotate": options}], context=context)
    [row] = run.rows
    assert (row.status.value, row.changed, row.reason) == ("ran", True, "")
    old, new = arrays_of(detached(model)), arrays_of(run.model)
    moved = {name for name in old if name not in new or not np.array_equal(old[name], new[name])}
    r1 = {f"n{at}_scale" for at in (1, 2, 3)} | {"embed_tokens.weight", "lm_head.weight"}
    r1 |= {f"layers.0.{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert moved == (r1 if options.get("r1", True) else {"layers.0.v_proj.weight", "layers.0.o_proj.weight"})
    if options.get("r1", True):
        assert np.abs(new["embed_tokens.weight"]).max() < 0.6 * np.abs(old["embed_tokens.weight"]).max()


@pytest.mark.skipif(not HAS_AIMET, reason="aimet-onnx is an extra")
@pytest.mark.parametrize(
    ("options", "message"),
    [({"r1": False}, "r1 and r2 are both false"), ({"r2": True, "head_size": 0}, "head_size is 0")],
)
def test_mistakes(options: dict[str, object], message: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=message):
        passes.optimize(decoder(), [{"rotate": options}], context=context)
