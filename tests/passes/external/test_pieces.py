"""A large graph goes to onnxoptimizer in pieces: what comes out is the same, and the work grows with its nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxoptimizer
import pytest
from onnxoptimizer import onnx_opt_cpp2py_export as library  # type: ignore[attr-defined]

from passes.external import pieces
from passes.external.pieces import GraphPieces, can_be_cut
from passes.model.canonical import canonical_digest
from tests.support.onnx_models import detached, matrix, model_of, vector

DEFAULT = [name for name in onnxoptimizer.get_fuse_and_elimination_passes() if name != "fuse_qkv"]

LAYER = """
    turned{i} = Transpose <perm = [1, 0]> (w{i})
    product{i} = MatMul (h{i}, turned{i})
    one{i} = Transpose <perm = [1, 0]> (product{i})
    two{i} = Transpose <perm = [1, 0]> (one{i})
    half{i} = Constant <value = float {{0.5}}> ()
    less{i} = Mul (two{i}, half{i})
    dead{i} = Exp (less{i})
    deader{i} = Neg (dead{i})
    shape{i} = Shape (x)
    long{i} = Cast <to = 7> (shape{i})
    flat{i} = Reshape (less{i}, long{i})
    same{i} = Identity (flat{i})
    moved{i} = Add (same{i}, b{i})
    h{n} = Add (h{i}, moved{i})
"""


def layers(count: int) -> onnx.ModelProto:
    """A residual stream, with something to do for many passes in each layer, and the same shapes in all of them."""
    body = "".join(LAYER.format(i=i, n=i + 1) for i in range(count))
    text = f"g (float[8, 8] x) => (float[8, 8] y) {{ h0 = Relu (x) {body} y = Identity (h{count}) }}"
    stored = {f"w{i}": matrix(8, 8, i) for i in range(count)} | {f"b{i}": vector(8, i % 8) for i in range(count)}
    return model_of(text, **stored, unread=np.zeros(3, np.float32))


class Library:
    """The library, with the squares of the nodes that it was given: what its time goes by."""

    def __init__(self) -> None:
        self.work = 0

    def __call__(self, model: bytes, names: Sequence[str]) -> bytes:
        self.work += len(onnx.load_from_string(model).graph.node) ** 2
        return library.optimize(model, list(names))


@pytest.mark.parametrize(("window", "seam"), [(20, 8), (37, 12)])
def test_pass_by_pass_the_same_comes_out_as_of_the_whole(
    window: int, seam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "WHOLE_NODES", 30)
    monkeypatch.setattr(pieces, "WINDOW", window)
    monkeypatch.setattr(pieces, "SEAM", seam)
    whole = layers(9)
    changed = []
    for name in DEFAULT:
        assert can_be_cut(whole)
        expected = onnx.load_from_string(library.optimize(whole.SerializeToString(), [name]))
        change = GraphPieces(whole, Library()).run([name])
        result = whole if change is None else change.model
        onnx.checker.check_model(result)
        assert canonical_digest(detached(result)) == canonical_digest(detached(expected)), name
        assert len(result.graph.initializer) == len(expected.graph.initializer), name
        changed += [name] if change is not None else []
        whole = result
    assert {"eliminate_identity", "eliminate_deadend", "fuse_consecutive_transposes"} <= set(changed)
    assert {"eliminate_common_subexpression", "eliminate_duplicate_initializer"} <= set(changed)


def test_the_work_grows_with_the_nodes() -> None:
    """Counted, and not timed: a graph that is four times as large is at most five times the work."""
    work = []
    for count in (100, 400):
        counting = Library()
        for name in ("nop", "eliminate_identity", "eliminate_nop_cast"):
            GraphPieces(layers(count), counting).run([name])
        work.append(counting.work)
    assert work[1] < 5 * work[0]


def test_a_small_graph_and_one_with_branches_go_whole() -> None:
    assert not can_be_cut(layers(9))
    assert can_be_cut(layers(100))
    branches = layers(100)
    body = onnx.parser.parse_graph("b () => (float[8, 8] z) { z = Neg (x) }")
    branches.graph.node[0].attribute.append(onnx.helper.make_attribute("body", body))
    assert not can_be_cut(branches)


def test_a_tensor_whose_texts_the_library_drops_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxscript writes metadata on the weights that it has turned: each pass stored all of them once more."""
    monkeypatch.setattr(pieces, "WHOLE_NODES", 30)
    monkeypatch.setattr(pieces, "WINDOW", 20)
    model = layers(12)
    for tensor in model.graph.initializer:
        tensor.metadata_props.add(key="made by", value="a turn")
        tensor.doc_string = "a weight"
    found = GraphPieces(model, Library()).run(["fuse_consecutive_transposes"])
    assert found is not None
    assert sorted(map(str, found.model.graph.initializer)) == sorted(map(str, model.graph.initializer))
