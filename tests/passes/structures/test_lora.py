"""LoRA: an adapter of low rank next to the matrix that it adapts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from passes.context import PassContext
from passes.optimize import draw_feeds, optimize
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.run.result import Status
from passes.run.runner import run_passes
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel, attach, detach
from passes.weights.sharing import detached_copy
from tests.support.structure_models import drawn, found, lost, names

HEAD = """g (float[2, 4, 32] x) => (float[2, 4, 24] y)
    <float[32, 24] w, float[24] bias, float[32, 4] a, float[4, 24] b, float[4, 32] at, float[24, 4] bt,
     float[32, 16] wide, float[16, 24] high>"""

FORMS = {
    "as PEFT has it": """
        base = MatMul (x, w) h = MatMul (x, a) d = MatMul (h, b)
        two = Constant <value_float = 2.0> () s = Mul (d, two) y = Add (base, s)
    """,
    "scaled between, with a bias": """
        base0 = MatMul (x, w) base = Add (base0, bias) h0 = MatMul (x, a)
        two = Constant <value_float = 2.0> () h = Mul (h0, two) d = MatMul (h, b) y = Add (d, base)
    """,
    "torch's layout": """
        ta = Transpose <perm = [1, 0]> (at) tb = Transpose <perm = [1, 0]> (bt)
        base = MatMul (x, w) h = MatMul (x, ta) d = MatMul (h, tb) y = Add (base, d)
    """,
}

OTHERS = {
    "two layers": "base = MatMul (x, w) h0 = MatMul (x, a) h = Relu (h0) d = MatMul (h, b) y = Add (base, d)",
    "a bottleneck with nothing next to it": "h = MatMul (x, a) y = MatMul (h, b)",
    "full rank": "base = MatMul (x, w) h = MatMul (x, wide) d = MatMul (h, high) y = Add (base, d)",
    "of another value": "r = Relu (x) base = MatMul (r, w) h = MatMul (x, a) d = MatMul (h, b) y = Add (base, d)",
}


@pytest.mark.parametrize("form", FORMS)
def test_finds_each_form_once(form: str) -> None:
    instances = found("lora", drawn(f"{HEAD} {{ {FORMS[form]} }}"))
    assert names(instances) == ["d"]
    assert {weight.name for weight in instances[0].weights} == ({"at", "bt"} if "layout" in form else {"a", "b"})


@pytest.mark.parametrize("form", OTHERS)
def test_finds_nothing_else(form: str) -> None:
    assert found("lora", drawn(f"{HEAD} {{ {OTHERS[form]} }}")) == ()


@dataclass(frozen=True, slots=True)
class MergeAdapter(Step):
    """Put 2·A·B into W, as PEFT's `merge_and_unload` does: the same outputs by one product."""

    name: str = field(default="merge-adapter", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(detach(merge(attach(model))))


def merge(model: onnx.ModelProto) -> onnx.ModelProto:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    whole = (stored["w"] + 2 * stored["a"] @ stored["b"]).astype(np.float32)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.append(onnx.helper.make_node("MatMul", ["x", "w"], ["y"]))
    model.graph.initializer.append(numpy_helper.from_array(whole, "w"))
    return model


def test_an_adapter_that_a_step_merges_stays_where_it_is_kept(context: PassContext) -> None:
    model = drawn(f"{HEAD} {{ {FORMS['as PEFT has it']} }}")
    source = detached_copy(model, context.spill)
    prover = NumericProver.of_itself([draw_feeds(source, 0)], context)
    free, kept = (run_passes(source, [MergeAdapter()], Policy((), keep), prover, context) for keep in ((), ("lora",)))
    assert [node.op_type for node in free.model.proto.graph.node] == ["MatMul"]
    assert list(lost("lora", found("lora", model), free.to_proto())) == ["lora"]
    assert [row.status for row in kept.rows] == [Status.REVERTED]
    assert [verdict.kept for verdict in kept.structures] == [True]
    assert {"a", "b"} <= {tensor.name for tensor in kept.model.proto.graph.initializer}


def test_adapters_become_inputs_whose_defaults_they_stay(context: PassContext) -> None:
    source = drawn(f"{HEAD} {{ {FORMS['as PEFT has it']} }}")
    run = optimize(source, ["lora-inputs"], context=context)
    (row,) = run.rows
    assert row.status == Status.RAN
    assert row.reason == "2 inputs of 1 adapter, with their values as defaults: a float[32, 4], b float[4, 24]"
    assert all(errors.ok for errors in row.errors.values())
    model = attach(run.model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in source.graph.initializer}
    x = np.random.default_rng(0).normal(size=(2, 4, 32)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    base, delta = x @ stored["w"], 2 * (x @ stored["a"]) @ stored["b"]
    for feeds, factor in (({}, 1), ({"b": -3 * stored["b"]}, -3)):
        results: Any = session.run(None, {"x": x, **feeds})
        np.testing.assert_allclose(
            results[0], base + factor * delta, rtol=1e-4, atol=1e-5
        )  # sums of 32 products of float32
    again = optimize(model, ["lora-inputs"], context=context)
    assert (again.rows[0].changed, again.rows[0].reason) == (False, "the adapters are inputs already")
    none = optimize(drawn(f"{HEAD} {{ {OTHERS['full rank']} }}"), ["lora-inputs"], context=context)
    assert none.rows[0].reason == "no product with matrices of low rank is added to another"
