"""The import as a whole: names, aliases, stored values, sizes, and what is said when a model cannot be imported."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.errors import InternalError, SourceError, Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.importers.from_onnx.model import FAMILIES, importers, join
from pipeline.importers.from_onnx.specs import OWN_SHAPES
from pipeline.ir import Graph, KernelSpec, check, to_text
from tests.pipeline.importers.from_onnx.import_text import graph_from, model, ops

MLP = """
mlp (float[2, 3] x) => (float[2, 4] y)
<float[3, 4] w = {0,1,2,3,4,5,6,7,8,9,10,11}, float[4] b = {0,1,2,3}> {
    h = MatMul(x, w)
    z = Add(h, b)
    y = Relu(z)
}
"""


def test_a_model_becomes_a_graph() -> None:
    assert to_text(graph_from(MLP, trainable=["w"])) == (
        'graph "mlp" (%0 "x": float32[2, 3]) {\n'
        '  param %1 "w": float32[3, 4]\n'
        '  const %3 "b": float32[4]\n'
        "\n"
        '  %2 "h": float32[2, 4] = aten.matmul.default(%0, %1) {self: $0, other: $1} of "MatMul"\n'
        '  %4 "z": float32[2, 4] = aten.add.Tensor(%2, %3) {self: $0, other: $1} of "Add"\n'
        '  %5 "y": float32[2, 4] = aten.relu.default(%4) {self: $0} of "Relu"\n'
        "\n"
        "  return %5\n"
        "}\n"
    )


def test_the_callers_emitters_make_the_kernels() -> None:
    kernel = KernelSpec(7, "relu", b"")
    graph = graph_from(MLP, emitter_of={"aten.relu.default": lambda attrs, inputs, outputs: kernel}.get)
    assert [op.kernel for op in graph.ops] == [None, None, kernel]


def test_a_graph_is_checked_before_it_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Graph] = []
    module = importlib.import_module("pipeline.importers.from_onnx.model")
    monkeypatch.setattr(module, "check", lambda graph, **_: checked.append(graph))
    assert [graph_from(MLP)] == checked


# ── names and aliases ────────────────────────────────────────────────────────────────────────────────────────────────

ALIASES = {
    "inside": ("a = Identity(x) y = Relu(a)", '%1 "y": float32[2] = aten.relu.default(%0)'),
    "of a result": ("a = Relu(x) y = Identity(a)", '%1 "y": float32[2] = aten.relu.default(%0)'),
    "of an input": ("y = Identity(x)", '%1 "y": float32[2] = aten.clone.default(%0)'),
    "of a const": (
        "c = Constant <value_floats = [1.0, 2.0]> () y = Identity(c)",
        'const %1 "c": float32[2]\n%2 "y": float32[2] = aten.clone.default(%1)',
    ),
}


@pytest.mark.parametrize("case", ALIASES)
def test_identity_is_another_name(case: str) -> None:
    body, expected = ALIASES[case]
    assert ops(f"g (float[2] x) => (float[2] y) {{ {body} }}") == expected


def test_two_names_of_one_result_both_leave() -> None:
    graph = graph_from("g (float[2] x) => (float[2] a, float[2] b) { t = Relu(x) a = Identity(t) b = Identity(t) }")
    assert [graph.values[vid].name for vid in graph.outputs] == ["a", "b"]
    assert [op.kind for op in graph.ops] == ["aten.relu.default", "aten.clone.default"]


def test_a_chain_gets_names_that_nobody_has() -> None:
    text = 'g (float[2] x, float[2] "y.add") => (float[2] y) { y = Sum(x, "y.add", x) }'
    proto = model(text.replace('"y.add"', "other"))
    proto.graph.input[1].name = proto.graph.node[0].input[1] = "y.add"
    graph = from_onnx(proto)
    check(graph)
    assert [value.name for value in graph.values] == ["x", "y.add", "y.add.0", "y"]


def test_origin_is_the_torch_module() -> None:
    proto = model(MLP)
    proto.graph.node[0].name = "node_linear"
    proto.graph.node[0].metadata_props.add(
        key="pkg.torch.onnx.name_scopes", value="['', 'layers.0', 'layers.0.fc', 'linear']"
    )
    proto.graph.node[1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="not a list")
    assert [(op.name, op.origin) for op in from_onnx(proto).ops] == [("node_linear", "layers.0.fc"), ("", ""), ("", "")]


def test_local_functions_are_inlined() -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        g (float[2] x) => (float[2] y) { y = own.twice(x) }
        <domain: "own", opset_import: ["" : 20]>
        twice (a) => (b) { b = Add(a, a) }
    """)
    assert [op.kind for op in from_onnx(proto).ops] == ["aten.add.Tensor"]


def test_a_function_of_onnx_after_an_unknown_operator_is_refused() -> None:
    """Its inliner has to know types, and nobody says what that operator makes: the model imports no such domain."""
    text = """
    <ir_version: 9, opset_import: ["": 20]>
    g (float[3, 5] x, int64[3] t) => (float z) { h = other.Op (x) z = NegativeLogLikelihoodLoss (h, t) }
    """
    with pytest.raises(Unsupported, match="other::Op"):
        from_onnx(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    "broken",
    [
        "size = Constant <value_int = 3> () z = ConstantOfShape (size)",
        "far = Constant <value_float = inf> () one = Constant <value_float = 1.0> () z = Range (one, far, one)",
    ],
)
def test_what_cannot_be_folded_is_the_models_mistake(broken: str) -> None:
    text = f'<ir_version: 9, opset_import: ["": 20]> g (float[3] x) => (float[3] y) {{ {broken} y = Expand (x, z) }}'
    with pytest.raises(UsageError):
        from_onnx(onnx.parser.parse_model(text))


def test_an_initializer_listed_as_input_is_stored() -> None:
    proto = model(MLP)
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 4]))
    graph = from_onnx(proto)
    assert [graph.values[vid].name for vid in graph.inputs] == ["x"]


# ── stored values ────────────────────────────────────────────────────────────────────────────────────────────────────


def linear(weight: TensorProto) -> onnx.ModelProto:
    """y = x · w, where w is float32[4, 5]: more elements than may be folded, so the import does not read it."""
    proto = model("g (float[2, 4] x) => (float[2, 5] y) { y = MatMul(x, w) }")
    proto.graph.initializer.append(weight)
    return proto


WEIGHT = np.arange(20, dtype=np.float32).reshape(4, 5)


def weight_of(graph: Graph) -> np.ndarray:
    return graph.payloads[graph.value("w").vid].numpy()


def owner(array: np.ndarray) -> object:
    """What holds the memory of a view."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base


def test_raw_data_is_viewed_not_copied() -> None:
    proto = linear(numpy_helper.from_array(WEIGHT, "w"))
    graph = from_onnx(proto)
    proto.graph.initializer[0].raw_data = (WEIGHT + 1).tobytes()  # seen by the graph: nothing was read yet
    first, second = weight_of(graph), weight_of(graph)
    assert np.array_equal(first, WEIGHT + 1)
    assert np.shares_memory(first, second)
    assert isinstance(owner(first), bytes)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN])
def test_small_dtypes_keep_their_names(dtype: int) -> None:
    proto = model("g (float[2] x) => (y) <float[2] w = {1, 2}> { y = Identity(w) }")
    proto.graph.initializer[0].CopyFrom(helper.make_tensor("w", dtype, [2], [1.0, 2.0]))
    proto.graph.output[0].type.tensor_type.elem_type = dtype
    graph = from_onnx(proto)
    check(graph)
    assert weight_of(graph).astype(np.float32).tolist() == [1.0, 2.0]


def save_linear(folder: Path, location: str = "w.bin", padding: int = 16) -> Path:
    """linear() on disk, with w in a data file of its own after some padding."""
    (folder / "w.bin").write_bytes(bytes(padding) + WEIGHT.tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 5], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": str(padding), "length": str(WEIGHT.nbytes)}.items():
        weight.external_data.add(key=key, value=value)
    onnx.save(linear(weight), folder / "m.onnx")
    return folder / "m.onnx"


def test_external_data_is_mapped(tmp_path: Path) -> None:
    graph = from_onnx(save_linear(tmp_path))
    check(graph)
    assert np.array_equal(weight_of(graph), WEIGHT)
    with (tmp_path / "w.bin").open("r+b") as file:
        file.seek(16)
        file.write((WEIGHT * 2).tobytes())
    assert np.array_equal(weight_of(graph), WEIGHT * 2), "the array is the file, so it changes with it"


def test_a_proto_with_external_data_needs_its_folder(tmp_path: Path) -> None:
    proto = onnx.load(save_linear(tmp_path), load_external_data=False)
    assert np.array_equal(weight_of(from_onnx(proto, base_dir=tmp_path)), WEIGHT)
    with pytest.raises(SourceError, match="pass base_dir="):
        from_onnx(proto)


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", "out/w.bin", ""])
def test_external_data_stays_in_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    (folder / "out").symlink_to(tmp_path)
    with pytest.raises(SourceError, match=r"outside of the model's folder|names no file"):
        from_onnx(save_linear(folder, location))


def test_a_data_file_cut_short_is_named(tmp_path: Path) -> None:
    path = save_linear(tmp_path)
    (tmp_path / "w.bin").write_bytes(bytes(20))
    with pytest.raises(SourceError, match=r"w\.bin ends before initializer 'w' does \(20 bytes, needs 96\)"):
        from_onnx(path)


def test_a_weight_free_model_has_specs_and_no_payload(tmp_path: Path) -> None:
    path = save_linear(tmp_path)
    (tmp_path / "w.bin").unlink()
    bare = linear(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 5]))
    for graph in (from_onnx(path), from_onnx(bare)):
        check(graph)
        assert graph.value("w").spec.shape == (4, 5)
        assert not graph.payloads


def test_trainable_takes_names_and_globs() -> None:
    roles = {value.name: value.role for value in graph_from(MLP, trainable=["[wb]"]).values}
    assert (roles["w"], roles["b"]) == ("param", "param")
    with pytest.raises(UsageError, match=r"no initializer that 'weight\.\*' names or matches"):
        graph_from(MLP, trainable=["w", "weight.*"])


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────

DYNAMIC = """
g (float[batch, seq, 4] x) => (float[batch, n] y) {
    s = Shape <end = 1> (x)
    m = Constant <value_ints = [-1]> ()
    t = Concat <axis = 0> (s, m)
    y = Reshape(x, t)
}
"""


def test_dims_are_bound() -> None:
    assert (
        ops(DYNAMIC, dims={"batch": 2, "seq": 5})
        == '%1 "y": float32[2, 20] = aten.reshape.default(%0) {shape: [2, 20]}'
    )


def test_open_sizes_are_listed_with_what_to_pass() -> None:
    with pytest.raises(UsageError) as caught:
        graph_from(DYNAMIC, dims={"batch": 2})
    assert str(caught.value) == (
        "4 values have no static shape ('x': float32[2, 'seq', 4], 's': nothing known, 't': nothing known, "
        "'y': float32[2, 'n']), expected sizes for all; pass dims={'seq': …}"
    )


def test_dims_that_no_input_has_are_refused() -> None:
    with pytest.raises(
        UsageError, match="dims: found 'bach', expected names of dimensions of the inputs: 'batch', 'seq'"
    ):
        graph_from(DYNAMIC, dims={"bach": 2})
    with pytest.raises(UsageError, match="found 'seq': -1"):
        graph_from(DYNAMIC, dims={"batch": 2, "seq": -1})


def test_shapes_fix_inputs_whatever_their_dims_are_called() -> None:
    """silero-vad has dims without a name, PaddleOCR calls all of them "?", and writes -1 for a number."""
    text = "g (float[?, -1] x, float[?, m] y) => (float[?, m] z) { z = Add(x, y) }"
    assert ops(text, shapes={"x": (2, 3), "y": (2, 3)}) == '%2 "z": float32[2, 3] = aten.add.Tensor(%0, %1)'


def test_a_shape_fixes_the_dims_that_it_names() -> None:
    text = "g (float[n, 4] x, float[n] y) => (float[n] z) { z = Neg(y) }"
    assert ops(text, shapes={"x": (2, 4)}) == '%2 "z": float32[2] = aten.neg.default(%1)'


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="shapes: found 'y', expected names of inputs: 'x'"):
        graph_from(DYNAMIC, shapes={"y": (2, 3, 4)})
    for shape in [(2, 3, 5), (2, 3)]:
        with pytest.raises(UsageError, match=r"does not fit the model's \['batch', 'seq', 4\]"):
            graph_from(DYNAMIC, shapes={"x": shape})


# ── models that cannot be imported ───────────────────────────────────────────────────────────────────────────────────


def test_all_unsupported_ops_are_listed_at_once() -> None:
    body = "a = acme.Det(x) b = acme.Det(x) c = com.microsoft.WordConv(x) d = acme.Det(x) e = acme.Det(x) y = Add(a, c)"
    proto = model(f"g (float[2, 2] x) => (y) {{ {body} }}")
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'head', 'det']")
    with pytest.raises(Unsupported) as caught:
        from_onnx(proto)
    assert "has 2 op types that onnxline cannot import" in str(caught.value)
    assert "- acme::Det: 4 × at 'a' in head, 'b', 'd', …" in str(caught.value)
    assert "- com.microsoft::WordConv: 1 × at 'c'" in str(caught.value)


INVALID = {
    "a circle": ("y = Relu(a) a = Relu(y)", "(Relu) reads what is computed from its own output"),
    "made twice": ("y = Relu(x) y = Relu(x)", "(Relu) makes 'y', but node 'y' (Relu) makes it already"),
    "shapes": (
        "w = Constant <value_floats = [1.0, 1.0]> () y = MatMul(x, w)",
        "(MatMul) cannot read ('x': float32[3], 'w': float32[2])",
    ),
    "folded": (
        "s = Shape(x) w = Constant <value_ints = [1, 1]> () i = Gather(w, s) y = CastLike(x, i)",
        "(Gather) cannot be computed: index 3 is out of bounds",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_model_is_named(case: str) -> None:
    body, expected = INVALID[case]
    with pytest.raises(SourceError) as caught:
        from_onnx(model(f"g (float[3] x) => (float[3] y) {{ {body} }}"))
    assert expected in str(caught.value)


def test_nodes_may_come_in_any_order_and_name_the_domain_of_onnx() -> None:
    """Neither the model in memory nor its meaning changes."""
    sorted_model = model("g (float[3] x) => (float[3] y) { a = Relu(x) b = Softmax(a) y = Add(a, b) }")
    mixed = copy.deepcopy(sorted_model)
    nodes = [copy.deepcopy(node) for node in reversed(mixed.graph.node)]
    nodes[0].domain = nodes[1].domain = "ai.onnx"
    del mixed.graph.node[:]
    mixed.graph.node.extend(nodes)
    before = mixed.SerializeToString()
    assert to_text(from_onnx(mixed)) == to_text(from_onnx(sorted_model))
    assert mixed.SerializeToString() == before


def test_an_input_with_a_dim_without_a_name_asks_for_its_shape() -> None:
    proto = model("g (float[3, 4] x) => (y) { y = Relu(x) }")
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    with pytest.raises(UsageError, match=r"no static shape .*; pass shapes=\{'x': \[…\]\}"):
        from_onnx(proto)
    assert from_onnx(proto, shapes={"x": [3, 4]}).inputs


def test_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no ONNX file at .*none\.onnx"):
        from_onnx(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff\xff")
    with pytest.raises(SourceError, match=r"bad\.onnx is not a readable ONNX file \(3 bytes"):
        from_onnx(tmp_path / "bad.onnx")


def test_odd_types_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="value 'x' has the ONNX element type STRING"):
        graph_from("g (string[2] x) => (string[2] y) { y = Identity(x) }")
    with pytest.raises(SourceError, match="holds no graph"):
        from_onnx(onnx.ModelProto())
    with pytest.raises(SourceError, match="its graph has neither nodes nor outputs"):
        from_onnx(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])))


# ── the tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_families_are_joined_and_duplicates_refused() -> None:
    assert len(importers()) == sum(len(table) for table in FAMILIES.values())
    with pytest.raises(InternalError, match="op type Relu is in the tables of elementwise and mine"):
        join({**FAMILIES, "mine": {"Relu": FAMILIES["elementwise"]["Relu"]}})


def test_every_op_type_of_a_table_exists_in_onnx() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    # onnxruntime adds the last to ONNX's own domain
    foreign = {*(kind for kind in importers() if "::" in kind), "SimplifiedLayerNormalization"}
    assert set(importers()) - foreign <= known
    assert foreign <= set(OWN_SHAPES)
