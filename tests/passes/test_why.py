"""`passes.why`: the origin of a node, from the model alone."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import passes
from passes import ModelError, Origin, PolicyError
from passes.provenance import carry
from tests.support.onnx_models import detached, matrix, model_of, vector

TEXT = """
g (bool[1] c, float[2, 8] x) => (float[2, 8] y) {
    [gate] a = Relu (x)
    [product] p = MatMul (a, w)
    [sum] s = Add (p, b)
    [if] y = If (c) <
        then_branch = t () => (float[2, 8] r) { [up] r = Exp (s) },
        else_branch = e () => (float[2, 8] r) { [down] r = Neg (s) }
    >
}
"""
STACK = """File "/home/me/net.py", line 12, in forward
    return self.block(x)
  File "/home/me/block.py", line 7, in forward
    return self.linear(x) + 1
  File "/opt/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
  File "<eval_with_key>.4", line 3, in forward
    linear = torch.ops.aten.linear"""


def torch_model() -> onnx.ModelProto:
    model = model_of(TEXT, w=matrix(8, 8, 0), b=vector(8, 1))
    linear = (["", "block", "block.linear", "linear"], ["net.Net", "net.Block", "torch.nn.Linear", "aten.linear"])
    known = {
        "gate": (["_empty_nn_module_stack_from_metadata_hook", "sym_size"], ["_empty_nn_module_stack", "size"]),
        "product": linear,
        "sum": linear,
        "if": (["", "cond"], ["net.Net", "cond"]),
    }
    for node in model.graph.node:
        scopes, classes = known[node.name]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
        node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(classes))
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=STACK if "linear" in scopes else "")
    return model


def fused_model() -> onnx.ModelProto:
    after = model_of(TEXT, w=matrix(8, 8, 0), b=vector(8, 1))
    gemm = onnx.helper.make_node("Gemm", ["a", "w", "b"], ["s"])
    del after.graph.node[1:3]
    after.graph.node.insert(1, gemm)
    return carry(detached(torch_model()), detached(after), "fuse_linear").proto


def test_a_node_of_the_export() -> None:
    assert passes.why(torch_model(), "product") == (
        Origin(
            op="MatMul",
            name="product",
            inputs=("a", "w"),
            outputs=("p",),
            within=(),
            module="block.linear",
            classes=("net.Net", "net.Block", "torch.nn.Linear"),
            code="/home/me/block.py:7 in forward: return self.linear(x) + 1",
            made_by="",
            replaced=(),
            replaced_count=0,
            changed_by=(),
        ),
    )


def test_a_node_that_a_pass_made() -> None:
    (origin,) = passes.why(fused_model(), "s")
    assert (origin.op, origin.made_by) == ("Gemm", "fuse_linear")
    assert (origin.replaced, origin.replaced_count) == (("product", "sum"), 2)
    assert origin.module == "block.linear"
    assert origin.code == "/home/me/block.py:7 in forward: return self.linear(x) + 1"


def test_what_torch_computed_outside_of_any_module_is_the_models_own() -> None:
    (origin,) = passes.why(torch_model(), "gate")
    assert (origin.module, origin.classes, origin.code) == ("", ("net.Net",), "")


def test_without_torch_metadata_the_module_is_not_known() -> None:
    (origin,) = passes.why(model_of(TEXT, w=matrix(8, 8, 0), b=vector(8, 1)), "product")
    assert (origin.module, origin.classes, origin.made_by) == (None, (), "")


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("product", ["product"]),
        ("p", ["product"]),
        ("p*", ["product"]),
        ("[ps]*", ["product", "sum"]),
        ("r", ["up", "down"]),
        ("ga*", ["gate"]),
        ("*", ["gate", "product", "sum", "if", "up", "down"]),
        ("module:block", ["product", "sum"]),
        ("module:*linear", ["product", "sum"]),
        ("op:Neg", ["down"]),
        ("op:*a*", ["product"]),
    ],
)
def test_a_name_a_value_or_a_glob(asked: str, names: list[str]) -> None:
    assert [origin.name for origin in passes.why(torch_model(), asked)] == names


def test_a_module_whose_path_has_brackets_is_meant_by_it() -> None:
    model = torch_model()
    for entry in (entry for node in model.graph.node for entry in node.metadata_props):
        entry.value = entry.value.replace("block.linear", "layers[0]")
    assert [origin.name for origin in passes.why(model, "module:layers[0]")] == ["product", "sum"]


def test_inner_nodes_say_what_they_lie_inside_of() -> None:
    assert [origin.within for origin in passes.why(torch_model(), "r")] == [("if",), ("if",)]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("gaet", r"no node, value or initializer named 'gaet'; did you mean 'gate'\?"),
        ("zzz", "no node, value or initializer named 'zzz' among 5 nodes"),
        ("linear", r"no node, value or initializer named 'linear'; did you mean 'module:block.linear'\?"),
        ("op:MatNul", r"no MatNul in this model"),
        ("module:block.linaer", r"no node of a module 'block.linaer'; did you mean 'block.linear'"),
        ("x", "'x' is an input of the model and no node makes it; ask for a node that reads it: gate"),
        ("w", "'w' is an initializer and no node makes it; `why_weights` says where it comes from"),
        ("product", "'product' is gone: fuse_linear made s in its place"),
    ],
)
def test_a_name_that_means_no_node_says_what_it_is_instead(asked: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        passes.why(fused_model(), asked)


def test_a_weight_of_the_source_and_names_that_mean_none() -> None:
    (weight,) = passes.why_weights(fused_model(), "w")
    assert (weight.type, weight.sources, weight.form, weight.made_by) == ("float[8,8]", ("w",), "", "")
    assert weight.readers == ("Gemm s",)
    assert [weight.name for weight in passes.why_weights(fused_model(), "?")] == ["w", "b"]
    assert passes.why_weights(fused_model(), "product") == ()
    with pytest.raises(PolicyError, match="the model holds no torch metadata"):
        passes.why(model_of(TEXT, w=matrix(8, 8, 0), b=vector(8, 1)), "module:block")


def test_a_folder_a_file_and_weights_that_are_not_there(tmp_path: Path) -> None:
    """The external data is missing, and nobody asks for it."""
    onnx.save(fused_model(), tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert passes.why(tmp_path, "s") == passes.why(str(tmp_path / "model.onnx"), "s") == passes.why(fused_model(), "s")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no ONNX file at"):
        passes.why(tmp_path, "s")
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="not a readable ONNX file"):
        passes.why(tmp_path, "s")
