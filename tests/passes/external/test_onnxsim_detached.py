"""onnxsim without the weights makes of a model what it makes of it with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.context import PassContext, open_context
from passes.errors import StepFailed, StepTimedOut
from passes.external.onnxsim import OnnxSim, simplify
from passes.external.onnxsim_detached import copy_with_references, names_to_send, simplify_references
from passes.external.through_files import through_files
from passes.model.canonical import value_digests
from passes.run.tracked import pin
from passes.structures import STRUCTURES
from passes.weights.detached import DetachedModel
from passes.worker.client import Worker
from tests.support.onnx_models import attention, biased_attention, detached, matrix, model_of

WIDE = 320
"""A matrix of this width is large enough to stay behind."""


def written(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    return model_of(f"g (float[8, {WIDE}] x) => (float[8, {WIDE}] y) {{ {text} }}", **weights)


def wide(seed: int) -> np.ndarray:
    return matrix(WIDE, WIDE, seed)


def nearly(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed[-1, -1] = np.nextafter(changed[-1, -1], np.float32(1))
    return changed


def guarded_attention() -> onnx.ModelProto:
    """With torch's guard: a row of the Softmax that is not a number becomes zeros."""
    model = biased_attention(WIDE)
    graph = model.graph
    at, softmax = next((at, node) for at, node in enumerate(graph.node) if node.op_type == "Softmax")
    result, softmax.output[0] = softmax.output[0], "bare"
    graph.node.insert(at + 1, helper.make_node("IsNaN", ["bare"], ["unknown"]))
    graph.node.insert(at + 2, helper.make_node("Where", ["unknown", "zero", "bare"], [result]))
    graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    return model


def rotated_attention() -> onnx.ModelProto:
    """With queries and keys that depend on positions, as a rotary embedding has them."""
    model = biased_attention(WIDE)
    graph = model.graph
    for name in ("wq", "wk"):
        at, node = next((at, node) for at, node in enumerate(graph.node) if name in node.input)
        result, node.output[0] = node.output[0], f"{name} still"
        graph.node.insert(at + 1, helper.make_node("Mul", [f"{name} still", "h"], [result]))
    return model


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "an attention that is merged": lambda: attention(WIDE),
    "an attention that becomes one node": lambda: biased_attention(WIDE),
    "an attention with torch's guard": guarded_attention,
    "an attention with positions": rotated_attention,
    "transposed weights": lambda: written("t = Transpose <perm = [1, 0]> (a) y = MatMul (x, t)", a=wide(0)),
    "a weight that two transpose": lambda: written(
        "s = Transpose <perm = [1, 0]> (a) t = Transpose <perm = [1, 0]> (a) u = MatMul (x, s) y = MatMul (u, t)",
        a=wide(0),
    ),
    "weights that are equal": lambda: written(
        "u = MatMul (x, a) v = MatMul (x, b) w = Relu (u) z = Neg (v) y = Add (w, z)", a=wide(0), b=wide(0)
    ),
    "weights that are nearly equal": lambda: written(
        "u = MatMul (x, a) v = MatMul (x, b) w = Relu (u) z = Neg (v) y = Add (w, z)", a=wide(0), b=nearly(wide(0))
    ),
    "a large sum of zeros goes": lambda: model_of(
        f"g (float[{WIDE}, {WIDE}] x) => (float[{WIDE}, {WIDE}] y) {{ s = Add (x, a) y = Relu (s) }}",
        a=np.zeros((WIDE, WIDE), np.float32),
    ),
    "a large sum stays": lambda: model_of(
        f"g (float[{WIDE}, {WIDE}] x) => (float[{WIDE}, {WIDE}] y) {{ s = Add (x, a) y = Relu (s) }}", a=wide(0)
    ),
    "a large factor stays": lambda: model_of(
        f"g (float[{WIDE}, {WIDE}] x) => (float[{WIDE}, {WIDE}] y) {{ s = Mul (x, a) y = Relu (s) }}", a=wide(0)
    ),
    "a table": lambda: model_of(
        f"g (int64[4] x) => (float[4, {WIDE}] y) {{ g = Gather <axis = 0> (a, x) y = Relu (g) }}", a=wide(0)
    ),
    "a table of many axes": lambda: model_of(
        f"g (int64[4, 2] x) => (float[4, {WIDE}] y) {{ g = GatherND (a, x) y = Relu (g) }}",
        a=wide(0).reshape(8, WIDE // 8, WIDE),
    ),
    "a table, element by element": lambda: model_of(
        f"g (int64[4, {WIDE}] x) => (float[4, {WIDE}] y) {{ g = GatherElements <axis = 0> (a, x) y = Relu (g) }}",
        a=wide(0),
    ),
    "arithmetic of weights": lambda: written(
        "s = Mul (a, b) t = Sqrt (s) y = MatMul (x, t)", a=abs(wide(0)), b=abs(wide(1))
    ),
    "a convolution and its normalization": lambda: model_of(
        "g (float[1, 64, 6, 6] x) => (float[1, 128, 4, 4] y) "
        "{ c = Conv <kernel_shape = [3, 3]> (x, w) y = BatchNormalization (c, s, b, m, v) }",
        w=matrix(128, 576, 0).reshape(128, 64, 3, 3),
        **{name: abs(matrix(1, 128, seed)).ravel() + np.float32(0.5) for seed, name in enumerate("sbmv")},
    ),
}


def whole(model: DetachedModel, context: PassContext, **options) -> DetachedModel:
    return through_files(model, context, simplify, options)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_comes_out(name: str, context: PassContext) -> None:
    model = detached(MODELS[name]())
    assert value_digests(OnnxSim().apply(model, context).model).whole == value_digests(whole(model, context)).whole


@pytest.mark.parametrize("make", [attention, biased_attention])
def test_the_same_model_comes_out_with_pins(make: Callable[[int], onnx.ModelProto], context: PassContext) -> None:
    model = detached(make(WIDE))
    pinned = pin(model, [site.tight for each in STRUCTURES["qkv"].find(model).instances for site in each.pins])
    assert value_digests(OnnxSim().apply(pinned, context).model).whole == value_digests(whole(pinned, context)).whole


def test_what_is_left_out_is_left_out(context: PassContext) -> None:
    model = detached(MODELS["transposed weights"]())
    kept = OnnxSim().without(["constant_folding"]).apply(model, context).model
    assert [node.op_type for node in kept.proto.graph.node] == ["Transpose", "MatMul"]
    equal = detached(MODELS["weights that are equal"]())
    without = ("eliminate_duplicate_initializer", "eliminate_common_subexpression")
    assert len(OnnxSim().without(without).apply(equal, context).model.proto.graph.initializer) == 2


class Slow(Worker):
    """Every call runs past its limit."""

    calls = 0

    def call(self, function: Callable[..., Any], /, *, within_s: float | None = None, **arguments: Any) -> Any:
        self.calls += 1
        raise StepTimedOut("ran past its limit")


class FailsWithoutWeights(Worker):
    """Makes every call but those of onnxsim without the weights."""

    def call(self, function: Callable[..., Any], /, *, within_s: float | None = None, **arguments: Any) -> Any:
        if function is simplify_references:
            raise StepFailed("there is no data")
        return super().call(function, within_s=within_s, **arguments)


def test_a_run_with_all_weights_says_why(tmp_path: Path) -> None:
    with FailsWithoutWeights() as worker:
        result = OnnxSim().apply(detached(attention()), PassContext(worker, tmp_path))
    assert result.changed
    assert result.why == "with all weights in its memory, since it failed without them: there is no data"


def test_what_takes_too_long_is_not_tried_again_with_the_weights(tmp_path: Path) -> None:
    worker = Slow()
    with pytest.raises(StepTimedOut):
        OnnxSim().apply(detached(attention()), PassContext(worker, tmp_path))
    assert worker.calls == 1


def test_weights_that_are_only_multiplied_stay_behind() -> None:
    """In an attention with pins onnxsim sees no matrix at all."""
    sent = copy_with_references(detached(attention(WIDE)), frozenset())
    large = [tensor for tensor in sent.graph.initializer if len(tensor.dims) == 2]
    assert len(large) == 4
    assert {tensor.data_location for tensor in large} == {TensorProto.EXTERNAL}
    assert sent.ByteSize() < 5000


def test_weights_are_sent_where_an_attention_can_become_one_node() -> None:
    weights = {"wq", "wk", "wv"}
    plain = (lambda: biased_attention(WIDE), weights)
    for make, sent in (plain, (guarded_attention, set[str]()), (rotated_attention, set[str]())):
        assert names_to_send(make().graph, attention=True, skips_concat=False) & weights == sent


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("a table")])
def test_a_table_that_is_only_looked_up_stays_behind(name: str) -> None:
    assert not names_to_send(detached(MODELS[name]()).proto.graph, attention=True, skips_concat=False) & {"a"}


def test_a_folder_relative_to_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `onnxline run`, whose files lie in `runs/`: onnxsim is called several times, and then through files."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    model = detached(attention(WIDE))
    with open_context(folder=Path("runs")) as context:
        here = context.worker.call(os.getcwd)
        steps = (OnnxSim(), OnnxSim(), OnnxSim({"check_n": 1}))
        nodes = {len(step.apply(model, context).model.proto.graph.node) for step in steps}
        assert len(nodes) == 1
        assert context.worker.call(os.getcwd) == here
