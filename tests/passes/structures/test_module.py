"""`module:…`: a torch module begins and ends where it did, and no fusion reaches across."""

from __future__ import annotations

import onnx
import pytest

import passes
from passes import PolicyError, Status
from passes.context import PassContext
from passes.graph.traversal import live_nodes
from tests.support.structure_models import drawn, found, lost

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
