"""What `split-qkv` calls the parts of a matrix and the nodes that read them, and which metadata they get."""

from __future__ import annotations

from passes.rewrites.split_merged import split_qkv
from tests.passes.rewrites.merged_models import split_and_compare
from tests.support.onnx_models import detached
from tests.support.onnx_text import ATTENTION, THREE_SLICES, arrays_of, merged_model, picture


def test_layers_that_share_a_matrix_share_its_parts() -> None:
    layer = """
        m{n} = MatMul ({x}, w.weight)
        q{n}, k{n}, v{n} = Split <axis = -1, num_outputs = 3> (m{n})
        t{n} = Transpose <perm = [0, 2, 1]> (k{n})
        s{n} = MatMul (q{n}, t{n})
        p{n} = Softmax <axis = -1> (s{n})
        {y} = MatMul (p{n}, v{n})"""
    body = layer.format(n=1, x="x", y="h") + layer.format(n=2, x="h", y="y")
    text = f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] w.weight> {{{body} }}"
    result = split_and_compare(merged_model(text), split_qkv)
    stored = [name for name in arrays_of(result.model) if "weight" in name]
    assert stored == ["w.q.weight", "w.k.weight", "w.v.weight"]


def test_metadata_and_names_of_nodes_go_to_the_parts() -> None:
    model = merged_model(f"{THREE_SLICES}\n{ATTENTION}}}")
    product = model.graph.node[0]
    product.name = "node_linear"
    product.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer.0.attn', 'linear']")
    made = {node.output[0]: node for node in split_qkv(detached(model)).model.proto.graph.node}
    for role in "qkv":
        node = made[f"product.{role}"]
        assert node.name == f"node_linear.{role}"
        assert list(node.metadata_props) == list(product.metadata_props)


def test_a_weight_that_the_exporter_counted_is_called_by_its_module() -> None:
    model = merged_model(f"{THREE_SLICES}\n{ATTENTION}}}".replace("qkv.weight", "val_27"))
    scopes = "['', 'layer.0.attn', 'linear']"
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    stored = arrays_of(split_qkv(detached(model)).model)
    assert "layer.0.attn.q.weight" in stored


def test_a_name_that_is_taken_gets_a_number() -> None:
    text = """g (float[2, 1, 8, 32] x, float[2, 1, 5, 32] z) => (float[2, 1, 8, 32] y)
    <float[32, 32] q.weight, float[32, 64] kv.weight> {
        q = MatMul (x, q.weight)
        kv = MatMul (z, kv.weight)
        k, v = Split <axis = -1> (kv, #[32, 32])"""
    model = merged_model(f"{text}\n{ATTENTION}}}".replace("q.weight", "kv.k.weight"))
    result = split_and_compare(model, split_qkv)
    assert "k = MatMul (z, kv.k.weight_2)" in picture(result.model)
