"""The door: what is refused, in which words; and what is odd and still taken."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper

from benchmarks.fuzz.seeds import seed_models, write_data_file
from passes import ModelError, optimize, why
from passes.audit.cases import load_file
from passes.guard.calls.base import PassThrough, open_model
from passes.load import check_bytes, load_model, memory_budget, seconds_to_run
from passes.proof.draw_choice import choose_draws
from passes.proof.draws import Draw, DrawnInput, DrawPlan, draw_array
from passes.weights.detached import detach, read_model
from passes.weights.files import files_of_model
from pipeline.errors import SourceError
from pipeline.importers import from_onnx
from tests.support.onnx_models import model_of

BAD = "BADUTF8"


def parse(body: str, ends: str = "(float[2] x) => (float[2] y)", header: str = "") -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21] {header}> g {ends} {{ {body} }}')


def change_model(change: Callable[[ModelProto], object], name: str = "mlp") -> ModelProto:
    model = seed_models()[name]
    change(model)
    return ModelProto.FromString(model.SerializeToString().replace(BAD.encode(), b"\xff" * len(BAD)))


def with_function(change: Callable[[onnx.FunctionProto], object]) -> ModelProto:
    return change_model(lambda model: change(model.functions[1]), "function")


def nest(levels: int) -> ModelProto:
    model = parse("y = Relu(x)", "(float[2] x, bool c) => (float[2] y)")
    for level in range(levels):
        inner = onnx.GraphProto()
        inner.CopyFrom(model.graph)
        del inner.input[:]
        inner.output[0].name = inner.node[0].output[0] = f"y{level}"
        node = onnx.NodeProto(op_type="If", input=["c"], output=["y"])
        for branch in ("then_branch", "else_branch"):
            node.attribute.add(name=branch, type=AttributeProto.GRAPH).g.CopyFrom(inner if branch[0] == "t" else LEAF)
        del model.graph.node[:]
        model.graph.node.append(node)
    return model


def left_out() -> ModelProto:
    model = parse("y = Add (x, x)")
    model.graph.node[0].input[0] = ""
    return model


LEAF = onnx.parser.parse_graph("g () => (float[2] leaf) { leaf = Relu (x) }")


def text_of(field: str) -> Callable[[ModelProto], object]:
    """A bad text in a field of the first node, or of the place that `field` begins with."""
    places = {
        "graph": lambda model: model.graph,
        "input": lambda model: model.graph.input[0],
        "tensor": lambda model: model.graph.initializer[0],
        "model": lambda model: model,
        "node": lambda model: model.graph.node[0],
    }
    place, name = field.split(".")
    return lambda model: setattr(places[place](model), name, BAD)


def clear(container) -> None:
    del container[:]


def first(model: ModelProto) -> TensorProto:
    return model.graph.initializer[0]


REFUSED = {
    "no UTF-8: op type": (lambda: change_model(text_of("node.op_type")), "which is no UTF-8 text"),
    "no UTF-8: node": (lambda: change_model(text_of("node.name")), "which is no UTF-8 text"),
    "no UTF-8: description": (lambda: change_model(text_of("node.doc_string")), "which is no UTF-8 text"),
    "no UTF-8: graph": (lambda: change_model(text_of("graph.name")), "the name of the graph is b'"),
    "no UTF-8: input": (lambda: change_model(text_of("input.name")), "the name of an input is b'"),
    "no UTF-8: tensor": (lambda: change_model(text_of("tensor.name")), "the name of a tensor is b'"),
    "no UTF-8: producer": (lambda: change_model(text_of("model.producer_name")), "the model's producer's name is b'"),
    "no UTF-8: metadata": (
        lambda: change_model(lambda model: setattr(model.graph.node[0].metadata_props[0], "value", BAD), "attention"),
        "the metadata of node 'node_q' (MatMul) is b'",
    ),
    "negative dim": (lambda: change_model(lambda m: first(m).dims.__setitem__(0, -3)), "expected no negative dims"),
    "overflowing dims": (
        lambda: change_model(lambda m: first(m).dims.__setitem__(slice(None), [2**32, 2**32])),
        "which no machine can hold",
    ),
    "nothing of much": (
        lambda: change_model(lambda m: first(m).dims.__setitem__(slice(None), [0, 2**62, 2**62])),
        "which no machine can hold",
    ),
    "many dims": (lambda: change_model(lambda m: first(m).dims.extend([1] * 70)), "has 72 dims; expected 64 at most"),
    "unknown dtype": (lambda: change_model(lambda m: setattr(first(m), "data_type", 99)), "dtype 99"),
    "short data": (
        lambda: change_model(lambda m: setattr(first(m), "raw_data", first(m).raw_data[:-4])),
        "tensor 'w1' holds 2044 bytes, but as float[32, 16] it takes 2048",
    ),
    "two data fields": (lambda: change_model(lambda m: first(m).float_data.append(1)), "in float_data and raw_data"),
    "segment": (
        lambda: change_model(lambda m: setattr(first(m).segment, "end", 4)),
        "is one segment of a larger tensor",
    ),
    "initializer twice": (
        lambda: change_model(lambda m: m.graph.initializer.append(first(m))),
        "two initializers 'w1'",
    ),
    "input twice": (lambda: change_model(lambda m: m.graph.input.append(m.graph.input[0])), "two inputs 'x'"),
    "input without a type": (
        lambda: change_model(lambda m: m.graph.input[0].ClearField("type")),
        "input 'x' has no type",
    ),
    "unknown value": (lambda: parse("y = Relu(z)"), "'z' is read by node 'y' (Relu), and nothing makes it"),
    "unknown output": (lambda: parse("z = Relu(x)"), "'y' is an output of the graph, and nothing makes it"),
    "made twice": (lambda: parse("y = Relu(x) y = Abs(x)"), "node 'y' (Abs) makes 'y', but node 'y' (Relu) makes it"),
    "circle": (lambda: parse("a = Add(x, b) b = Neg(a) y = Relu(a)"), "3 nodes lie on or after a cycle"),
    "own circle": (lambda: parse("y = Add(x, y)"), "reads what is computed from its own output"),
    "attribute type": (
        lambda: parse("y = Softmax <axis = 1.5> (x)"),
        "node 'y' (Softmax) has an attribute 'axis' of type FLOAT; Softmax takes INT",
    ),
    "unknown attribute": (lambda: parse("y = Relu <axis = 1> (x)"), "an attribute 'axis', and Relu knows none"),
    "missing attribute": (lambda: parse("y = Cast (x)"), "node 'y' (Cast) has no attribute 'to'"),
    "missing input": (lambda: parse("y = Add (x)"), "node 'y' (Add) has 1 inputs; Add takes 2"),
    "left out input": (left_out, "leaves out its input 0"),
    "no opset": (lambda: change_model(lambda m: clear(m.opset_import)), "the model imports no opset of it"),
    "future opset": (
        lambda: change_model(lambda m: setattr(m.opset_import[0], "version", 99)),
        "imports version 99 of ai.onnx",
    ),
    "two opsets": (lambda: change_model(lambda m: m.opset_import.add(domain="", version=13)), "the versions 21 and 13"),
    "future IR": (lambda: change_model(lambda m: setattr(m, "ir_version", 99)), "IR version 99"),
    "depth": (lambda: nest(31), "lies inside of 30 other graphs"),
    "recursion": (
        lambda: with_function(lambda f: f.node.add(op_type="twice", domain="own", input=["a"], output=["z"])),
        "the function own::twice calls itself (own::twice → own::twice)",
    ),
    "call with too many inputs": (
        lambda: change_model(lambda m: m.graph.node[1].input.append("x"), "function"),
        "has 2 inputs; twice takes 0 to 1",
    ),
    "branches": (
        lambda: change_model(lambda m: clear(m.graph.node[0].attribute[0].g.output), "if"),
        "has 0 outputs; expected 1",
    ),
    "sparse": (
        lambda: change_model(lambda m: m.graph.sparse_initializer[0].dims.__setitem__(0, 1), "sparse"),
        "has an index outside of its shape [1, 4]",
    ),
    "terabytes of zeros": (
        lambda: change_model(lambda m: m.graph.sparse_initializer[0].dims.__setitem__(0, 2**42), "sparse"),
        "this machine can give",
    ),
    "other folder": (
        lambda: change_model(lambda m: setattr(first(m).external_data[0], "value", "../seed.data"), "external"),
        "outside of the model's folder",
    ),
    "no file": (
        lambda: change_model(lambda m: setattr(first(m).external_data[0], "value", "a\0b"), "external"),
        "which names no file",
    ),
    "offset past the end": (
        lambda: change_model(lambda m: setattr(first(m).external_data[1], "value", "4000"), "external"),
        "seed.data ends before initializer 'w' does",
    ),
    "negative dims of a tensor in a file": (
        lambda: change_model(lambda m: first(m).dims.__setitem__(slice(None), [-4, -4]), "external"),
        "expected no negative dims",
    ),
    "offset in words": (
        lambda: change_model(lambda m: setattr(first(m).external_data[1], "value", "0x10"), "external"),
        "expected an integer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_at_every_door(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    path = tmp_path / "m.onnx"
    path.write_bytes(make().SerializeToString())
    write_data_file(tmp_path)
    for door in (
        load_model,
        read_model,
        lambda path: why(path, "*"),
        lambda path: optimize(path, [], proof="structure"),
    ):
        with pytest.raises(ModelError) as caught:
            door(path)
        assert words in str(caught.value)
        assert str(caught.value).startswith(str(path))
    with pytest.raises(SourceError) as refused:
        from_onnx(path)
    assert words in str(refused.value)


ODD = {
    "unsorted": lambda: parse("y = Relu(a) a = Neg(x)"),
    "onnxruntime's in ONNX's domain": lambda: parse("y = SimplifiedLayerNormalization <epsilon = 0.1> (x, x)"),
    "a zero that is not written": lambda: change_model(lambda m: m.graph.node[0].attribute[0].ClearField("i")),
    "the same name in both branches": lambda: parse(
        "y = If (c) <then_branch = a () => (float[2] t) { s = Neg(x) t = Abs(s) },"
        " else_branch = b () => (float[2] e) { s = Abs(x) e = Neg(s) }>",
        "(float[2] x, bool c) => (float[2] y)",
    ),
    "depth": lambda: nest(20),
    "an output without a type": lambda: change_model(lambda m: m.graph.output[0].ClearField("type")),
    "strings that are no UTF-8": lambda: seed_models()["string_initializer"],
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_and_taken(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(ODD[case]().SerializeToString())
    assert load_model(path).graph.output
    assert load_model(path.read_bytes()).graph.output


def test_dims_of_minus_one_are_open() -> None:
    model = parse("y = Relu(x)", "(float[N, 3] x) => (float[N, 3] y)")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    dim = load_model(model.SerializeToString()).graph.input[0].type.tensor_type.shape.dim[0]
    assert not dim.HasField("dim_value")


def test_weights_may_be_left_out_where_nobody_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(seed_models()["external"], path)
    with pytest.raises(ModelError, match="is missing"):
        load_model(path)
    assert load_model(path, may_be_empty=True)


def test_functions_that_grow_are_measured_before_they_are_inlined() -> None:
    model = parse("y = own.f39 (x)")
    model.opset_import.add(domain="own", version=1)
    for level in range(40):
        function = model.functions.add(name=f"f{level}", domain="own", input=["a"], output=["c"])
        function.opset_import.add(domain="", version=21)
        function.opset_import.add(domain="own", version=1)
        for source, target in (("a", "b"), ("b", "c")):
            callee = {"op_type": f"f{level - 1}", "domain": "own"} if level else {"op_type": "Relu"}
            function.node.add(input=[source], output=[target], **callee)
    with pytest.raises(ModelError, match="nodes once they are inlined"):
        load_model(model)


def test_sizes_that_no_machine_has_are_not_drawn() -> None:
    with pytest.raises(ModelError, match=r"input 'x' has the shape \[1099511627776, 4\]"):
        draw_array("0:x", [2**40, 4], "float32", -1, 1)
    with pytest.raises(ModelError, match="this machine can give"):
        check_bytes("a value", [2**40], 4)
    check_bytes("nothing", [0, 2**40], 4)
    assert seconds_to_run(0) < 60 < seconds_to_run(2**20)


def test_the_budget_is_that_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    machine = memory_budget()
    resource.setrlimit(resource.RLIMIT_AS, (2**40, hard))
    try:
        assert memory_budget() == min(machine, 2**40 * 9 // 10)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


NUMBERS = "zero = Constant <value_int = 0> () one = Constant <value_int = 1> () nine = Constant <value_int = 9> ()"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("n = Constant <value_int = 4611686018427387904> () y = Range (zero, n, one)", "is its limit wrong"),
        ("s = SplitToSequence (x) y = SequenceAt (s, nine)", "place 9 of a sequence of 2"),
        ("s = SplitToSequence (x, zero) y = SequenceAt (s, one)", "pieces of 0"),
    ],
)
def test_what_the_importer_would_make_is_bounded(body: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        from_onnx(parse(f"{NUMBERS} {body}", "(float[2] x) => (y)"))


def test_small_constants_that_broadcast_to_a_huge_one_are_not_folded() -> None:
    shapes = {"a": [2000, 1, 1], "b": [1, 2000, 1], "c": [1, 1, 2000]}
    model = parse("d = Add (a, b) y = Add (d, c)", "() => (y)")
    for name, shape in shapes.items():
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, shape, range(2000)))
    graph = from_onnx(model)  # 64 GB, if it were folded
    assert [op.kind for op in graph.ops] == ["aten.add.Tensor", "aten.add.Tensor"]


def external_constant() -> onnx.ModelProto:
    model = parse("k = Constant <value = float[2] {1.0, 2.0}> () y = Add (x, k)", "(float[2] x) => (float[2] y)")
    tensor = model.graph.node[0].attribute[0].t
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="k.data")
    return model


def test_the_importer_reads_external_data_inside_of_nodes_from_the_folder(tmp_path: Path) -> None:
    model = external_constant()
    (tmp_path / "k.data").write_bytes(np.array([3, 4], np.float32).tobytes())
    graph = from_onnx(model, base_dir=tmp_path)
    (stored,) = graph.payloads.values()
    np.testing.assert_array_equal(stored.numpy(), [3, 4])
    assert model.graph.node[0].attribute[0].t.data_location == TensorProto.EXTERNAL
    (tmp_path / "k.data").unlink()
    with pytest.raises(SourceError, match=r"k\.data"):
        from_onnx(model, base_dir=tmp_path)


def test_external_data_inside_of_functions_comes_along(tmp_path: Path) -> None:
    model = external_constant()
    body = helper.make_function("own", "F", ["x"], ["y"], model.graph.node, model.opset_import)
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("own", 1))
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("F", ["x"], ["y"], domain="own"))
    (tmp_path / "k.data").write_bytes(np.array([3, 4], np.float32).tobytes())
    onnx.save(model, tmp_path / "m.onnx")
    tensor = read_model(tmp_path / "m.onnx").proto.functions[0].node[0].attribute[0].t
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), [3, 4])
    assert files_of_model(tmp_path / "m.onnx") == [tmp_path / "m.onnx", tmp_path / "k.data"]
    with pytest.raises(ModelError, match="folder is not known"):
        detach(model)


def test_a_guarded_call_asks_the_door() -> None:
    model = parse("a = Relu (b) b = Relu (a) y = Add (a, x)", "(float[2] x) => (float[2] y)")
    with pytest.raises(PassThrough, match="cycle"):
        open_model(model, lambda: model)


def test_an_audit_asks_the_door(tmp_path: Path) -> None:
    model = parse("a = Relu (b) b = Relu (a) y = Add (a, x)", "(float[2] x) => (float[2] y)")
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="cycle"):
        load_file("models", tmp_path, "m")


def test_inputs_together_have_a_budget() -> None:
    inputs = tuple(DrawnInput(name, (10**8,), "float32", -1, 1, name) for name in "ab")
    with pytest.raises(ModelError, match="200,000,000 elements together"):
        DrawPlan(inputs, ({},)).feeds(Draw(0, {}))


def test_a_huge_input_is_drawn_once_and_quickly() -> None:
    size, skipped = 7 * 10**7, []
    plan = DrawPlan((DrawnInput("x", (size,), "float16", -1, 1, "x"),), ({},))
    (draw,) = choose_draws(plan, lambda feeds: {"y": feeds["x"][:1]}, ["y"], skipped)
    assert draw.feeds["x"].shape == (size,)
    assert not np.array_equal(draw.feeds["x"][:1000], draw.feeds["x"][2**24 : 2**24 + 1000])
    assert skipped == [
        "not drawn: floats of ten times their range "
        "(the inputs of the draws before it have 70,000,000 elements, which is enough)"
    ]


@pytest.mark.parametrize("count", [1, 3, 2**62])
def test_a_split_makes_as_many_outputs_as_it_says(count: int) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[6] x) => (float[3] y, float[3] z) '
        f"{{ y, z = Split <axis = 0, num_outputs = {count}> (x) }}"
    )
    with pytest.raises(ModelError, match=f"has num_outputs {count} and 2 outputs; expected as many"):
        load_model(model)


def test_an_attribute_without_a_type_has_that_of_its_value() -> None:
    """IR versions before 4 wrote no types."""
    model = model_of("g (float[2, 3] x) => (float[2, 3] y) { y = Softmax <axis = 1> (x) }")
    attribute = model.graph.node[0].attribute[0]
    attribute.ClearField("type")
    load_model(model)
    attribute.ClearField("i")
    attribute.f = 1.0
    with pytest.raises(ModelError, match=r"'axis' .*Softmax"):
        load_model(model)


def test_external_data_with_another_name_is_refused_as_by_onnx(tmp_path: Path) -> None:
    """The other name may be that of a file outside of the folder."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4 * 64 * 64))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.data").hardlink_to(secret)
    path = tmp_path / "model" / "m.onnx"
    weight = onnx.TensorProto(name="w", dims=[64, 64], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.data")
    model = model_of("g (float[1, 64] x) => (float[1, 64] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(weight)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"'w.data', a file with 2 names \(hard links\)"):
        load_model(path)
    with pytest.raises(Exception, match="hard links"):
        onnx.load(path)
    secret.unlink()
    assert load_model(path).graph.initializer[0].name == "w"
