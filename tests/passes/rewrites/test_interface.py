"""Steps that change inputs and outputs: what is left, what stands for what, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

import passes
from passes.context import PassContext
from passes.encodings.encoding import Encoding, Precision
from passes.errors import ModelError, PolicyError, StepFailed
from passes.optimize import plan_draws
from passes.policy.policy import Policy
from passes.proof.prover import StructureProver
from passes.proof.relation import ModelInputs, measure_relation, same_inside
from passes.rewrites.interface import Extract
from passes.run.restart import restart
from passes.run.result import PassRun, Status
from passes.step import PassResult, Relation
from passes.tools import change_batch, change_outputs, extract, fix_shapes, rename, to_fp16
from passes.tools.doors import run_step
from passes.weights.detached import DetachedModel, attach, open_model
from passes.weights.sharing import portable
from tests.support.onnx_models import attention, biased_attention, matrix, model_of

CHAIN = """
g (float[N, 8] x, float[N, 8] other) => (float[N, 8] y) <float[8, 8] w> {
    a = MatMul (x, w)
    b = Relu (a)
    c = Add (b, other)
    y = Sigmoid (c)
}
"""


def chain() -> onnx.ModelProto:
    model = model_of(CHAIN, w=matrix(8, 8, 1))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    return model


def picture(run: PassRun) -> tuple[list[str], list[str], list[str]]:
    graph = run.model.proto.graph
    return [i.name for i in graph.input], [node.op_type for node in graph.node], [o.name for o in graph.output]


def results(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([], ["b"], (["x"], ["MatMul", "Relu"], ["b"])),
        (["b"], [], (["other", "b"], ["Add", "Sigmoid"], ["y"])),
        (["a"], ["c"], (["other", "a"], ["Relu", "Add"], ["c"])),
        (["node_b"], ["node_c"], (["other", "a"], ["Relu", "Add"], ["c"])),
        ([], ["a", "y"], (["x", "other"], ["MatMul", "Relu", "Add", "Sigmoid"], ["a", "y"])),
    ],
)
def test_a_part(inputs: list[str], outputs: list[str], expected: object, context: PassContext) -> None:
    run = extract(chain(), inputs, outputs, context=context)
    assert picture(run) == expected
    assert all(errors.max_abs == 0 for errors in run.rows[-1].errors.values())


def test_a_part_that_begins_at_one_of_two_values_of_a_node(context: PassContext) -> None:
    """The node is still needed for the other value, and makes the one that is fed under another name."""
    model = model_of(
        "g (float[N, 8] x) => (float[N, 8] y) { d, m = Dropout (x)  f = Cast <to = 1> (m)  y = Mul (d, f) }"
    )
    run = extract(model, ["d"], context=context)
    assert picture(run) == (["x", "d"], ["Dropout", "Cast", "Mul"], ["y"])
    assert list(run.model.proto.graph.node[0].output) == ["d_2", "m"]


def test_a_part_of_the_part_has_nothing_to_do(context: PassContext) -> None:
    part = extract(chain(), [], ["b"], context=context)
    assert not extract(part.model, [], ["b"], context=context).rows[-1].changed


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        ("extract", {"outputs": ["nope"]}, "no value or node 'nope'"),
        ("extract", {"inputs": ["c"], "outputs": ["b"]}, "is not computed from 'c'"),
        ("extract", {}, "found no names"),
        ("outputs", {"drop": ["y"]}, "drops every output"),
        ("outputs", {"drop": ["b"]}, "has no output 'b'"),
        ("rename", {"values": {"z": "q"}}, "has no value 'z'"),
        ("rename", {"values": {"a": "b"}}, "name of two values"),
        ("rename", {"values": {"a": "q", "b": "q"}}, "name of two values"),
        ("fix-shapes", {"shapes": {"x": [0, 8]}}, "sizes of 1 or more"),
        ("fix-shapes", {"shapes": {"x": [2, 9]}}, "the model declares"),
        ("change-batch", {"size": 0}, "expected a number of 1 or more"),
        ("merge", {"map": {"y": "x"}}, "found no model"),
        ("split", {}, "split is a command and no step"),
    ],
)
def test_what_is_refused(step: str, options: dict[str, object], words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=words):
        run_step(chain(), step, options, {"context": context})


def test_text_in_place_of_a_list_is_not_its_letters() -> None:
    with pytest.raises(PolicyError, match="outputs is 'ab'; expected a list"):
        extract(chain(), outputs="ab")
    with pytest.raises(PolicyError, match="keep is 'Relu'; expected a list"):
        to_fp16(chain(), keep="Relu")
    for shapes in ({"x": "28"}, {"x": 2}, None):
        with pytest.raises(PolicyError, match="expected sizes of 1 or more for each input"):
            fix_shapes(chain(), shapes)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="expected a mapping of names"):
        rename(chain(), {3: "x"})  # type: ignore[dict-item]


@pytest.mark.parametrize("has_default", [False, True])
def test_a_part_may_begin_at_a_weight(has_default: bool, context: PassContext) -> None:
    model = chain()
    if has_default:
        model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [8, 8]))
    run = extract(model, ["w"], ["b"], context=context)
    assert (picture(run)[0], list(run.model.index.initializers)) == (["x", "w"], [])
    assert picture(extract(model, ["node_b"], ["b"], context=context))[0] == ["a"]


def test_a_model_without_outputs_needs_an_end(context: PassContext) -> None:
    model = chain()
    del model.graph.output[:]
    with pytest.raises(PolicyError, match="the model has no output; name a value with which the part ends"):
        extract(model, ["a"], context=context, proof="structure")


def test_inputs_that_are_not_drawn_are_named_with_what_a_user_can_do(context: PassContext) -> None:
    model = model_of("g (seq(float[N, 8]) x) => (float[M, 8] y) { y = ConcatFromSequence <axis = 0> (x) }")
    with pytest.raises(ModelError, match=r"drawn for tensors only; .*--proof structure"):
        rename(model, {"y": "z"}, context=context)
    assert rename(model, {"y": "z"}, context=context, proof="structure").rows[-1].changed


def test_names_can_change_places(context: PassContext) -> None:
    run = rename(chain(), {"x": "other", "other": "x", "w": "weight"}, context=context)
    x, other = (np.float32(np.arange(16).reshape(2, 8) * factor) for factor in (0.1, -0.2))
    np.testing.assert_array_equal(
        results(run.to_proto(), x=other, other=x)["y"], results(chain(), x=x, other=other)["y"]
    )
    assert "weight" in run.model.index.initializers


def test_a_name_inside_of_a_body_is_followed(context: PassContext) -> None:
    text = """
        g (float[4] x, bool p) => (float[4] y) {
        a = Relu (x)
        y = If (p)
          <then_branch = t () => (float[4] u) { u = Neg (a) },
          else_branch = e () => (float[4] v) { v = Abs (a) }>
    }
    """
    run = rename(model_of(text), {"a": "inner"}, context=context)
    bodies = [attribute.g for attribute in run.model.proto.graph.node[1].attribute]
    assert [body.node[0].input[0] for body in bodies] == ["inner", "inner"]


def test_an_inner_value_as_output_and_the_steps_after_it(context: PassContext) -> None:
    """What follows is compared with the new outputs, and names in `skip` and `keep` hold for all stages."""
    recipe = ["onnxsim", {"outputs": {"add": ["scores"]}}, "onnxsim"]
    run = passes.optimize(biased_attention(), recipe, ["onnxsim/fuse_qkv"], ["qkv"], context=context)
    assert [row.status for row in run.rows] == [Status.RAN] * 3
    assert {*run.rows[-1].errors} <= {"y", "scores"}
    assert picture(run)[2] == ["y", "scores"]


def test_shapes_are_fixed_after_a_step_whose_draws_had_others(context: PassContext) -> None:
    recipe = [{"rename": {"values": {"x": "in"}}}, {"fix-shapes": {"shapes": {"in": [3, 8], "other": [3, 8]}}}]
    run = passes.optimize(chain(), recipe, context=context)
    assert [row.status for row in run.rows] == [Status.RAN] * 2
    assert [value.shape for value in run.example.values()] == [(3, 8)] * 2
    feeds = {name: np.zeros((2, 8), np.float32) for name in ("x", "other")}
    asked = passes.optimize(chain(), recipe, feeds=[feeds], context=context)
    assert asked.rows[1].status is Status.FAILED, "nothing is drawn in place of the caller's inputs"


def test_structures_of_what_such_a_step_leaves_are_looked_for(context: PassContext) -> None:
    run = passes.optimize(attention(), ["to-fp16", {"rename": {"values": {"x": "in"}}}], context=context)
    assert [(verdict.kind, verdict.kept) for verdict in run.structures] == [("qkv", True)]


def test_dropping_an_output_drops_what_only_it_needs(context: PassContext) -> None:
    both = change_outputs(chain(), ["b"], context=context)
    assert picture(change_outputs(both.model, [], ["y"], context=context)) == (["x"], ["MatMul", "Relu"], ["b"])


def test_an_input_of_no_declared_rank_is_fixed(context: PassContext) -> None:
    model = chain()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    run = fix_shapes(model, {"x": [3, 8], "other": [3, 8]}, context=context)
    shapes = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in run.model.proto.graph.input]
    assert shapes == [[3, 8]] * 2
    assert run.rows[-1].errors["y"].max_abs == 0


def test_a_fixed_dim_is_fixed_wherever_its_name_stands(context: PassContext) -> None:
    graph = fix_shapes(chain(), {"x": [3, 8]}, context=context).model.proto.graph
    shapes = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in (*graph.input, *graph.output)]
    assert shapes == [[3, 8]] * 3
    assert {tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim) for info in graph.value_info} == {(3, 8)}


@pytest.mark.parametrize("size", ["rows", 1, 3, 4])
def test_another_batch(size: int | str, context: PassContext) -> None:
    """Attention with Reshape nodes that name the batch 2 takes any other; each row is computed as before."""
    run = change_batch(biased_attention(), size, context=context)
    rows = size if isinstance(size, int) else 5
    x = np.random.default_rng(0).standard_normal((rows + rows % 2, 8, 32)).astype(np.float32)
    expected = np.concatenate([results(biased_attention(), x=x[at : at + 2])["y"] for at in range(0, len(x), 2)])
    np.testing.assert_allclose(results(run.to_proto(), x=x[:rows])["y"], expected[:rows], rtol=1e-5, atol=1e-5)


def test_a_reshape_of_one_row_takes_more(context: PassContext) -> None:
    text = "g (float[1, 2, 4] x) => (float[1, 8] y) { y = Reshape (x, flat) }"
    run = change_batch(model_of(text, flat=np.array([1, 8])), 3, context=context)
    x = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    np.testing.assert_array_equal(results(run.to_proto(), x=x)["y"], x.reshape(3, 8))


def test_a_scalar_input_has_no_rows_and_stays(context: PassContext) -> None:
    text = """g (float[2, 4] x, float scale, int64[2] more) => (float[2, 4] y, float s) {
        y = Mul (x, scale) s = Abs (scale) }"""
    run = change_batch(model_of(text), 3, context=context)
    shapes = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in run.to_proto().graph.input]
    assert shapes == [[3, 4], [], [3]]
    assert [dim.dim_value for dim in run.to_proto().graph.output[0].type.tensor_type.shape.dim] == [3, 4]


def test_a_dim_of_minus_1_is_open_in_a_model_in_memory_too(context: PassContext) -> None:
    """As Paddle's exporter writes it; the model in memory stays as it is."""
    model = model_of("g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert (
        change_batch(model, 3, context=context).to_proto().graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3
    )
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == -1


def test_a_model_whose_rows_depend_on_each_other_keeps_its_batch(context: PassContext) -> None:
    text = """
        g (float[2, 4] x) => (float[2, 4] y) { m = ReduceMean <keepdims = 1> (x)
      y = Sub (x, m) }
    """
    with pytest.raises(StepFailed, match="change-batch reverted: differs: y"):
        change_batch(model_of(text), 4, context=context)


def test_a_wrong_relation_is_seen(context: PassContext) -> None:
    model = portable(open_model(chain()), context.spill)
    x = np.float32(np.random.default_rng(1).standard_normal((2, 8)))
    relation = Relation({"x": "x", "other": "other"}, {"y": "c"})
    arguments = (model, model, relation.inputs, relation.outputs, None, [{"x": x, "other": x}], {})
    assert "y" in measure_relation(*arguments).why


def test_encodings_and_provenance_come_along(context: PassContext) -> None:
    model = chain()
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'fc', 'linear']")
    known = {"b": Encoding(Precision(8, signed=False, symmetric=False), np.array(0.1, np.float32), np.array(0))}
    run = rename(model, {"b": "relu_out"}, encodings=known, context=context)
    props = {entry.key: entry.value for entry in run.model.proto.graph.node[0].metadata_props}
    assert props["pkg.torch.onnx.name_scopes"] == "['', 'fc', 'linear']"
    assert run.encodings is not None
    assert [*run.encodings.encodings] == ["relu_out"]


def test_a_step_that_makes_a_reference_is_asked_for_once(context: PassContext) -> None:
    with pytest.raises(PolicyError, match="asked for once"):
        passes.optimize(chain(), [{"rename": {"values": {"a": "q"}, "repeat": "until-stable"}}], context=context)


def test_a_run_that_compares_with_its_source_refuses_it_before_it_begins(context: PassContext) -> None:
    prover = StructureProver()
    with pytest.raises(PolicyError, match="onnxline optimize MODEL"):
        passes.optimize(chain(), ["onnxsim", {"rename": {"values": {"a": "q"}}}], prover=prover, context=context)


def test_weights_stay_what_they_are(context: PassContext) -> None:
    run = extract(to_fp16(chain(), context=context).model, [], ["b"], context=context)
    stored = {tensor.name: tensor.data_type for tensor in attach(run.model).graph.initializer}
    assert stored == {"w_float16": onnx.TensorProto.FLOAT16}


NOISY = """
g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) {
    noise = RandomNormalLike (x)
    y = Add (x, noise)
    z = Add (y, noise)
}
"""


def test_random_values_are_compared_as_well(context: PassContext) -> None:
    run = rename(model_of(NOISY), {"y": "sum"}, context=context)
    assert run.rows[-1].errors["sum"].max_abs == 0.0
    assert run.coverage.draws


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("y = Sqrt (m)", "output 'y' of the reference holds NaN"),
        ("y = Reshape (m, s)", "the model does not run as it is: onnxruntime stopped"),
    ],
)
@pytest.mark.parametrize("step", [{"rename": {"values": {"a": "b"}}}, "to-fp16"])
def test_a_model_that_cannot_be_compared_with(nodes: str, why: str, step: object, context: PassContext) -> None:
    text = f"""
        g (float[2, 4] x) => (float[a, b] y) <int64[2] s = {{3, 3}}> {{ a = Sigmoid (x)
          m = Neg (a)
          {nodes} }}
    """
    with pytest.raises(ModelError, match=re.escape(why)):
        passes.optimize(model_of(text), [step], context=context)


class Tampering(Extract):
    """Changes a weight of the part."""

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        made = super().apply(model, context)
        proto = onnx.ModelProto()
        proto.CopyFrom(attach(made.model))
        proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(matrix(8, 8, 5), "w"))
        return replace(made, model=open_model(proto))


class Forgetting(Extract):
    """Drops the metadata of the nodes."""

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        made = super().apply(model, context)
        for node in made.model.proto.graph.node:
            node.ClearField("metadata_props")
        return made


def test_metadata_that_the_step_drops_comes_back(context: PassContext) -> None:
    model = chain()
    model.graph.node[0].metadata_props.add(key="tool", value="mine")
    opened = open_model(model)
    inputs = ModelInputs(opened, context, plan=plan_draws(opened))
    result = restart(Forgetting(outputs=["b"]), opened, inputs, Policy(), context, is_last=True)
    assert [(entry.key, entry.value) for entry in result.model.proto.graph.node[0].metadata_props] == [("tool", "mine")]


@pytest.mark.parametrize(("step", "status"), [(Extract, Status.RAN), (Tampering, Status.REVERTED)])
def test_a_part_with_another_weight_is_seen(step: type[Extract], status: Status, context: PassContext) -> None:
    model = open_model(chain())
    inputs = ModelInputs(model, context, plan=plan_draws(model))
    found = restart(step(outputs=["b"]), model, inputs, Policy(), context, is_last=True)
    assert found.row.status is status, found.row.reason
    assert found.feeds or status is Status.REVERTED


@pytest.mark.parametrize("step", [{"extract": {"outputs": ["b"]}}, {"outputs": {"add": ["b"], "drop": ["y"]}}])
def test_steps_after_a_part_was_cut_out_are_compared_on_all_draws(step: dict, context: PassContext) -> None:
    """A part only has to run, and what is done to it afterwards may be wrong for some sizes alone."""
    plain, alone, before = (
        len(passes.optimize(chain(), recipe, context=context).coverage.draws)
        for recipe in (["fold_constants"], [step], [step, "fold_constants"])
    )
    assert alone < before == plain


def by_tensor(**scales: float) -> dict[str, Encoding]:
    form = Precision(8, signed=True, symmetric=True)
    return {name: Encoding(form, np.array(scale, np.float32), np.array(0)) for name, scale in scales.items()}


@pytest.mark.parametrize(
    ("step", "options", "weight"),
    [("to-fp16", {}, "w_float16"), ("change-batch", {"size": 6}, "w")],
)
def test_encodings_stay_at_values_that_the_proof_compares(
    step: str, options: dict[str, object], weight: str, context: PassContext
) -> None:
    """A Reshape that finds the batch, or another type, leaves no value inside computed as it was."""
    text = """
    g (float[2, 8] x) => (float[2, 8] y) <float[8, 8] w> {
      split = Reshape (x, sizes)
      a = Relu (split)
      flat = Reshape (a, back)
      y = MatMul (flat, w)
    }"""
    model = model_of(text, w=matrix(8, 8, 1), sizes=np.array([2, 2, 4]), back=np.array([2, 8]))
    run = passes.optimize(model, [{step: options}], encodings=by_tensor(a=0.1, w=0.2, y=0.3), context=context)
    assert run.encodings is not None
    assert {"a", "y", weight} <= {*run.encodings.encodings}
    assert run.encodings.encodings[weight].scale == np.float32(0.2)
    assert run.encodings.lost == ()


def test_encodings_after_the_value_at_which_a_part_begins_stay(context: PassContext) -> None:
    found = passes.optimize(
        chain(), [{"extract": {"inputs": ["a"], "outputs": ["y"]}}], encodings=by_tensor(a=0.1, b=0.2, y=0.3),
        context=context,
    ).encodings  # fmt: skip
    assert found is not None
    assert ({*found.encodings}, found.lost) == ({"a", "b", "y"}, ())


def test_encodings_that_an_earlier_stage_lost_are_said(context: PassContext) -> None:
    given = by_tensor(b=0.1, y=0.2)
    steps = [{"extract": {"outputs": ["b"]}}, {"rename": {"values": {"b": "z"}}}]
    found = passes.optimize(chain(), steps, encodings=given, context=context).encodings
    assert found is not None
    assert (dict(found.sources), [entry.tensor for entry in found.lost]) == ({"z": ("b",)}, ["y"])


def test_values_that_differ_inside_are_not_the_same(context: PassContext) -> None:
    before = open_model(model_of("g (float[2] x) => (float[2] y) { a = Relu (x) b = Sin (x) y = Abs (x) }"))
    after = open_model(model_of("g (float[2] x) => (float[2] y) { a = Neg (x) b = Sin (x) y = Abs (x) }"))
    relation = Relation.between_namesakes(["x"], ["y"])
    inputs = ModelInputs(before, context, [{"x": np.array([1, 2], np.float32)}])
    assert same_inside(before, after, relation, ["a", "b", "x", "no"], inputs, context) == {"b"}
