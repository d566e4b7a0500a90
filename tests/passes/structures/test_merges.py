"""Products of one input that a pass merges, and that no structure holds, are named by their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from passes.context import PassContext
from passes.structures.merges import find_merged_products, has_siblings
from tests.support.onnx_models import detached
from tests.support.structure_models import drawn, run

HEAD = (
    "g (float[2, 6, 8] x) => (float[2, 6, 8] y) "
    "<float[8, 8] wa, float[8, 8] wb, float[8, 4] wc, float[8, 8] w0, float[8] gamma>"
)
# No attention, and no gate: three products whose curves are added.
PARTS = """
    n = LayerNormalization (x, gamma)
    a = MatMul (n, wa) b = MatMul (n, wb) c = MatMul (n, wc)
"""
REST = """
    ta = Tanh (a) tb = Sin (b) sum = Add (ta, tb) d = ReduceMean (c) e = Add (sum, d) f = MatMul (e, w0) y = Add (f, x)
"""
APART = f"{HEAD} {{ {PARTS} {REST} }}"


SQUARE = APART.replace("float[8, 4] wc", "float[8, 8] wc")


def weights() -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in drawn(APART).graph.initializer}


def merged(wide: np.ndarray, nodes: str) -> onnx.ModelProto:
    """The model whose `nodes` make a, b and c from n and the wide matrix."""
    dims = ", ".join(map(str, wide.shape))
    text = f"{HEAD[:-1]}, float[{dims}] wide> {{ n = LayerNormalization (x, gamma) {nodes} {REST} }}"
    model = drawn(text)
    for tensor in model.graph.initializer:
        if tensor.name == "wide":
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(wide), "wide"))
    read = {name for node in model.graph.node for name in node.input}
    unread = [tensor for tensor in model.graph.initializer if tensor.name not in read]
    for tensor in unread:
        model.graph.initializer.remove(tensor)
    return model


def side_by_side(w: dict[str, np.ndarray]) -> onnx.ModelProto:
    return merged(
        np.concatenate([w["wa"], w["wb"], w["wc"]], 1),
        "m = MatMul (n, wide) sizes = Constant <value_ints = [8, 8, 4]> () a, b, c = Split <axis = -1> (m, sizes)",
    )


def turned(w: dict[str, np.ndarray]) -> onnx.ModelProto:
    return merged(
        np.concatenate([w["wa"], w["wb"], w["wc"]], 1).T,
        """rows = Constant <value_ints = [12, 8]> () flat = Reshape (n, rows) m0 = Gemm <transB = 1> (flat, wide)
        back = Constant <value_ints = [2, 6, 20]> () m = Reshape (m0, back)
        sizes = Constant <value_ints = [8, 8, 4]> () a, b, c = Split <axis = -1> (m, sizes)""",
    )


def head_by_head(w: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Two heads of a, then of b; c stays."""
    heads = np.concatenate([w["wa"].reshape(8, 2, 4), w["wb"].reshape(8, 2, 4)], -1).reshape(8, 16)
    return merged(
        heads,
        """m0 = MatMul (n, wide) four = Constant <value_ints = [2, 6, 2, 8]> () m = Reshape (m0, four)
        sizes = Constant <value_ints = [4, 4]> () ah, bh = Split <axis = -1> (m, sizes)
        shape = Constant <value_ints = [2, 6, 8]> ()
        a = Reshape (ah, shape) b = Reshape (bh, shape) c = MatMul (n, wc)""",
    )


def stacked(w: dict[str, np.ndarray]) -> onnx.ModelProto:
    return merged(
        np.stack([w["wa"], w["wb"]])[:, None],
        """zero = Constant <value_ints = [0]> () n1 = Unsqueeze (n, zero) m = MatMul (n1, wide)
        a0, b0 = Split <axis = 0, num_outputs = 2> (m)
        a = Squeeze (a0, zero) b = Squeeze (b0, zero) c = MatMul (n, wc)""",
    )


def pointwise(w: dict[str, np.ndarray]) -> onnx.ModelProto:
    return merged(
        np.concatenate([w["wa"], w["wb"], w["wc"]], 1).T[:, :, None],
        """t = Transpose <perm = [0, 2, 1]> (n) m0 = Conv (t, wide) m = Transpose <perm = [0, 2, 1]> (m0)
        sizes = Constant <value_ints = [8, 8, 4]> () a, b, c = Split <axis = -1> (m, sizes)""",
    )


def scaled(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], onnx.ModelProto]:
    """a and b in one matrix that `change` makes, as a step that folds factors or quantizes; c stays."""

    def merge(w: dict[str, np.ndarray]) -> onnx.ModelProto:
        model = merged(
            np.concatenate([w["wa"] * 0.35, w["wb"]], 1),
            "m = MatMul (n, wide) a, b = Split <axis = -1, num_outputs = 2> (m) c = MatMul (n, wc)",
        )
        for tensor in model.graph.initializer:
            if tensor.name == "wide":
                tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), "wide"))
        return model

    return merge


def not_folded(w: dict[str, np.ndarray]) -> onnx.ModelProto:
    joined = """wide = Concat <axis = 1> (wa, wb) m = MatMul (n, wide) sizes = Constant <value_ints = [8, 8]> ()
        a, b = Split <axis = -1> (m, sizes) c = MatMul (n, wc)"""
    return drawn(f"{HEAD} {{ n = LayerNormalization (x, gamma) {joined} {REST} }}")


GAMMA = np.linspace(0.5, 2, 8, dtype=np.float32)[:, None]
ALL, TWO = ("wa", "wb", "wc"), ("wa", "wb")
WAYS: dict[str, tuple[Callable[[dict[str, np.ndarray]], onnx.ModelProto], tuple[str, ...]]] = {
    "side by side": (side_by_side, ALL),
    "transposed, in a Gemm": (turned, ALL),
    "head by head": (head_by_head, TWO),
    "stacked": (stacked, TWO),
    "a 1×1 Conv": (pointwise, ALL),
    "a Concat that is not folded": (not_folded, TWO),
    "a factor for one": (scaled(lambda wide: wide), TWO),
    "factors of a norm, in half precision": (scaled(lambda wide: (wide * GAMMA).astype(np.float16)), TWO),
    "int8": (scaled(lambda wide: np.rint(wide / np.abs(wide).max(0) * 127).astype(np.int8)), TWO),
    "uint8": (scaled(lambda wide: np.rint(wide / np.abs(wide).max(0) * 127 + 128).astype(np.uint8)), TWO),
}


@pytest.mark.parametrize("way", WAYS)
def test_names_what_was_merged(way: str) -> None:
    merge, names = WAYS[way]
    (found,) = find_merged_products(detached(drawn(APART)), detached(merge(weights())))
    assert found.names == names


def test_attention_of_onnxruntime_and_quantized_matrices() -> None:
    """Whatever operator reads the wide matrix, and in whatever type it is stored."""
    quantized = APART.replace("float[8, 8] wa, float[8, 8] wb", "int8[8, 8] wa, int8[8, 8] wb, float[1] s").replace(
        PARTS,
        "n = LayerNormalization (x, gamma) fa = DequantizeLinear (wa, s) fb = DequantizeLinear (wb, s)"
        " a = MatMul (n, fa) b = MatMul (n, fb) c = MatMul (n, wc)",
    )
    before, after = drawn(quantized), drawn(quantized)
    numbers = np.random.default_rng(0).integers(-128, 128, (8, 16), np.int8)
    for name, part in (("wa", numbers[:, :8]), ("wb", numbers[:, 8:])):
        tensor = next(tensor for tensor in before.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(part), name))
    del after.graph.node[:]
    after.graph.initializer.append(numpy_helper.from_array(numbers, "wide"))
    after.graph.node.append(helper.make_node("QAttention", ["x", "wide"], ["y"], domain="com.microsoft"))
    (found,) = find_merged_products(detached(before), detached(after))
    assert found.names == TWO


@pytest.mark.parametrize(
    "change",
    [
        lambda w: merged(
            np.concatenate([w["wa"], w["wb"][::-1]], 1),
            "m = MatMul (n, wide) a, b = Split <axis = -1, num_outputs = 2> (m) c = MatMul (n, wc)",
        ),
        lambda w: merged(
            w["wa"].T, "t = Transpose <perm = [1, 0]> (wide) a = MatMul (n, t) b = MatMul (n, wb) c = MatMul (n, wc)"
        ),
        lambda w: drawn(APART),
    ],
    ids=["other numbers", "a transpose that is folded", "nothing"],
)
def test_other_changes_are_no_merges(change: Callable[[dict[str, np.ndarray]], onnx.ModelProto]) -> None:
    assert find_merged_products(detached(drawn(APART)), detached(change(weights()))) == ()


def test_row_and_note_name_the_pass_and_the_products(context: PassContext) -> None:
    found = run(drawn(SQUARE), context, ["fuse_qkv"], keep=["op:Add"])
    (row,) = found.rows
    assert row.reason == "fuse_qkv merges wa, wb and wc, products of one input, into one"
    (note,) = found.describe_merges(["op:Add"], ["fuse_qkv"])
    assert note.startswith(row.reason)
    assert found.describe_merges([], ["fuse_qkv"]) == (), "the recipe names the pass: its user asked for that"
    assert len(found.describe_merges([], ["default"])) == 1


def test_a_pass_inside_of_a_step_is_named(context: PassContext) -> None:
    found = run(drawn(SQUARE), context, ["onnxsim"])
    assert [merge.partition(" ")[0] for row in found.rows for merge in row.merges] == ["onnxsim/fuse_qkv"]


def test_products_of_one_value_are_siblings_but_for_those_that_are_known() -> None:
    model = detached(drawn(APART))
    digests = {tensor.name: model.digest(tensor) for tensor in model.proto.graph.initializer}
    assert has_siblings(model, ())
    assert has_siblings(model, [frozenset({digests["wa"], digests["wb"]})])
    assert not has_siblings(model, [frozenset(digests[name] for name in ("wa", "wb", "wc"))])
