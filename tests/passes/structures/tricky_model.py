"""Attention blocks of which one thing is written in an unusual way, and what they hold.

A model is a head that makes `q`, `k` and `v` of `x`, and a tail that makes `y` of these. `{r}` stands for each of the
three roles. What is declared in a text and not computed is a weight, drawn by its name (`structure_models.drawn`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from tests.support.structure_models import drawn


@dataclass(frozen=True)
class Tricky:
    """`weights` are the names of the stored tensors of Q, K and V; `products` the values that they make, where these
    lie in the model's own graph and have a type, so that they can be pinned."""

    model: onnx.ModelProto
    weights: tuple[str, str, str] = ("wq", "wk", "wv")
    products: tuple[str, str, str] | None = ("q0", "k0", "v0")


WEIGHTS = "float[32, 32] wq, float[32, 32] wk, float[32, 32] wv"
PLAIN = "{r}0 = MatMul (x, w{r}) {r} = Identity ({r}0)"
HEADS = """
    shape = Constant <value_ints = [2, 8, 2, 16]> ()
    flat = Constant <value_ints = [2, 8, 32]> ()
    qh = Reshape (q, shape)
    kh = Reshape (k, shape)
    vh = Reshape (v, shape)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    kt = Transpose <perm = [0, 2, 1, 3]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
"""
SCORES = "ku = Transpose <perm = [0, 1, 3, 2]> (kt) s = MatMul (qt, ku)"
CONTEXT = "c = MatMul (p, vt) ct = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (ct, flat)"
SOFTMAX = "p = Softmax <axis = -1> (s)"
BLOCK = f"{HEADS} {SCORES} {SOFTMAX} {CONTEXT}"


def model(projected: str = PLAIN, tail: str = BLOCK, weights: str = WEIGHTS, once: str = "") -> onnx.ModelProto:
    """`projected` is written for each role, `once` before them."""
    heads = " ".join(projected.replace("{r}", role) for role in "qkv")
    # Some fusions leave a graph's own input alone.
    return drawn(f"g (float[2, 8, 32] a) => (float[2, 8, 32] y) <{weights}> {{ x = Relu (a) {once} {heads} {tail} }}")


def weigh_scores(weighting: str, tail: str = CONTEXT) -> onnx.ModelProto:
    """Scores are weighed by `weighting`, which makes `p` of `s`."""
    return model(tail=f"{HEADS} {SCORES} {weighting} {tail}")


def with_tensors(model: onnx.ModelProto, **tensors: np.ndarray) -> onnx.ModelProto:
    """The same with other numbers in some weights."""
    for tensor in model.graph.initializer:
        if tensor.name in tensors:
            tensor.CopyFrom(numpy_helper.from_array(tensors[tensor.name], tensor.name))
    return model


def with_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """The weights in Constant nodes."""
    stored = list(model.graph.initializer)
    del model.graph.initializer[:]
    nodes = [onnx.helper.make_node("Constant", [], [constant.name], value=constant) for constant in stored]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])
    return model


def declare(**others: str) -> str:
    """The three weights, and others for each role, by the dims that they have: `g="float[32]"` declares gq, gk, gv."""
    return WEIGHTS + "".join(f", {dims} {name}{role}" for name, dims in others.items() for role in "qkv")
