"""`module:…`: a torch module begins and ends where it did, and no fusion reaches across."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import passes
from passes import PolicyError, Status
from passes.context import PassContext
from passes.graph.traversal import live_nodes
from passes.optimize import draw_feeds, optimize
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.run.runner import run_passes
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel, attach, detach
from passes.weights.sharing import detached_copy
from tests.support.structure_models import drawn, found, lost, names

TEXT = """
g (float[2, 4, 8] x) => (float[2, 4, 8] y) <float[8, 8] w, float[8] b, float[8, 8] v, float[8] s> {
    r = Relu (x)
    f = MatMul (r, w)
    h = Add (f, b)
    h2 = Identity (h)
    a = Add (h2, r)
    n = LayerNormalization (a, s)
    y = MatMul (n, v)
}"""
MODULES = {
    "r": "",
    "f": "layer.dense",
    "h": "layer.dense",
    "h2": "layer.drop",
    "a": "layer",
    "n": "layer.norm",
    "y": "head",
}


def with_modules(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        path = MODULES.get(node.output[0], "")
        parts = path.split(".") if path else []
        scopes = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), "call"]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
    return model


def boundaries(entry: str) -> dict[str, tuple[list[str], list[str]]]:
    instances = found(entry, with_modules(drawn(TEXT)))
    return {
        one.name: ([each.value for each in one.boundary.inputs], [each.value for each in one.boundary.outputs])
        for one in instances
        if one.boundary is not None
    }


def test_each_module_begins_and_ends_at_values_but_for_layout() -> None:
    assert boundaries("module:*") == {
        "layer": (["r"], ["n"]),
        "layer.dense": (["r"], ["h"]),
        "layer.norm": (["a"], ["n"]),
        "head": (["n"], ["y"]),
    }  # layer.drop is an Identity


def test_a_glob_chooses_by_path() -> None:
    assert list(boundaries("module:layer.*")) == ["layer.dense", "layer.norm"]
    assert list(boundaries("module:l*r")) == ["layer"]


def test_values_at_the_boundary_are_held() -> None:
    instances = {one.name: one for one in found("module:layer*", with_modules(drawn(TEXT)))}
    assert [site.tight.name for site in instances["layer.dense"].pins] == ["r", "h"]
    assert [site.after_reshape.name for site in instances["layer.dense"].pins] == ["r", "h2"]


SKIP = "n, m1, m2, a = com.microsoft.SkipLayerNormalization (h, r, s)"


@pytest.mark.parametrize(
    ("old", "new", "gone"),
    [
        ("f = MatMul (r, w)\n    h = Add (f, b)", "f = Add (r, b)\n    h = MatMul (f, w)", []),  # inside
        ("h2 = Identity (h)\n    a = Add (h2, r)", "a = Add (h, r)", []),
        ("a = Add (h2, r)\n    n = LayerNormalization (a, s)", SKIP, ["layer.norm"]),
        ("h2 = Identity (h)\n    a = Add (h2, r)", "h2 = Neg (h)\n    a = Sum (f, b, r)", ["layer.dense"]),
        (
            "r = Relu (x)\n    f = MatMul (r, w)",
            "r = Relu (x)\n    f = com.microsoft.FusedMatMul (x, w)",
            ["layer", "layer.dense"],
        ),
    ],
    ids=["inside", "layout", "the sum into the norm", "the sums into one", "the input bypassed"],
)
def test_what_reaches_across_is_seen(old: str, new: str, gone: list[str]) -> None:
    instances = found("module:layer*", with_modules(drawn(TEXT)))
    assert old in TEXT
    assert sorted(lost("module:layer*", instances, drawn(TEXT.replace(old, new)))) == gone


def test_the_values_at_a_boundary_may_be_gone_as_long_as_they_are_read() -> None:
    """As when a sum becomes a Gemm with Reshape around it, and that Reshape joins the next one."""
    text = TEXT.replace(
        "h2 = Identity (h)", "shape = Constant <value_ints = [2, 4, 8]> ()\n    h2 = Reshape (h, shape)"
    )
    instances = found("module:layer.dense", with_modules(drawn(text)))
    gemm = text.replace(
        "f = MatMul (r, w)\n    h = Add (f, b)",
        "rows = Constant <value_ints = [8, 8]> ()\n    r2 = Reshape (r, rows)\n    h3 = Gemm (r2, w, b)",
    ).replace("Reshape (h, shape)", "Reshape (h3, shape)")
    assert len(instances) == 1
    assert lost("module:layer.dense", instances, drawn(gemm)) == {}


def test_a_fusion_across_the_boundary_does_not_happen(context: PassContext) -> None:
    """Gemm would take in the matrix of one module and the bias of another."""
    text = """
    g (float[4, 8] x) => (float[4, 8] y) <float[8, 8] w, float[8] b> {
        r = Relu (x)
        f = MatMul (r, w)
        y = Add (f, b)
    }"""
    model = with_modules(drawn(text))
    fused = passes.optimize(model, recipe=["fuse_matmul_add_bias_into_gemm"], context=context)
    kept = passes.optimize(
        model, recipe=["fuse_matmul_add_bias_into_gemm"], keep=["module:layer.dense"], context=context
    )
    assert [node.op_type for node in live_nodes(fused.model.proto.graph)] == ["Gemm", "Relu"]
    assert [node.op_type for node in live_nodes(kept.model.proto.graph)] == ["Add", "MatMul", "Relu"]
    assert [(one.name, one.kept) for one in kept.structures] == [("layer.dense", True)]
    assert [one.status for one in kept.rows] == [Status.RAN], "pinned, and not reverted"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("module:layer.dens", r"which has the modules layer, head; did you mean 'layer.dense'\?"),
        ("module:layer.drop", "which has such a module, but it computes nothing from data"),
    ],
)
def test_a_choice_of_nothing_says_what_is_there(entry: str, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=f"keep: {entry} matches nothing in this model, {words}"):
        passes.optimize(with_modules(drawn(TEXT)), recipe=["nop"], keep=[entry], context=context)


def test_a_model_without_module_paths_says_so(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"no torch module paths \(torch's exporter writes them with dynamo=True"):
        passes.optimize(drawn(TEXT), recipe=["nop"], keep=["module:*"], context=context)


# LoRA: an adapter of low rank next to the matrix that it adapts.

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
    "in another type, as PEFT has it": """
        base = MatMul (x, w) x11 = Cast <to = 11> (x) a11 = Cast <to = 11> (a) b11 = Cast <to = 11> (b)
        h = MatMul (x11, a11) d = MatMul (h, b11) d1 = Cast <to = 1> (d) y = Add (base, d1)
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
