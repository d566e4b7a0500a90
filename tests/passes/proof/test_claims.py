"""Small changes are proven by small runs: which values have to be equal, and what it takes to see that."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import passes
from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import value_digests
from passes.proof.claims import Claims, ProvenModel, make_claims, part_of
from passes.proof.numeric import NumericProver
from passes.proof.prover import Measurement
from passes.proof.runs import Criteria, RunRequest, run_model
from passes.recipe.recipe import RecipeItem
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save
from passes.weights.sharing import portable
from tests.support.onnx_models import attention, detached, matrix, model_of

BEFORE = """
g (float[2, 8] x) => (float[2, 8] y) {
    h = MatMul (x, w)
    shape = Shape (x)
    one = Constant <value = int64[1] {1}> ()
    zero = Constant <value = int64[1] {0}> ()
    rows = Slice (shape, zero, one)
    columns = Constant <value = int64[1] {8}> ()
    size = Concat <axis = 0> (rows, columns)
    flat = Reshape (h, size)
    y = Relu (flat)
}
"""


def model(text: str = BEFORE, **old_to_new: str) -> DetachedModel:
    """BEFORE with lines replaced: the key is a value's name, the text its new right side."""
    for name, right in old_to_new.items():
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{name} ="))
        text = text.replace(line, f"{name} = {right}")
    return detached(model_of(text, w=matrix(8, 8, 0)))


def claims_of(before: DetachedModel, after: DetachedModel) -> tuple[ProvenModel, Claims | None]:
    proven = ProvenModel(before, value_digests(before), Measurement({}, {}))
    return proven, make_claims(proven, AnalyzedModel(after), {})


def test_a_value_that_is_computed_anew_is_claimed_to_be_itself() -> None:
    before, claims = claims_of(model(), model(rows="Gather <axis = 0> (shape, zero)"))
    assert claims is not None and list(claims.names) == ["rows"]
    part = part_of(before, claims, frozenset({before.digests.values["shape"], before.digests.values["rows"]}))
    assert part is not None
    assert [node.op_type for node in part.model.proto.graph.node] == ["Constant", "Gather"]
    assert [info.name for info in part.model.proto.graph.input] == ["shape"]


def test_another_signature_cannot_be_claimed_away() -> None:
    after = model()
    after.proto.graph.output[0].name = "flat"
    assert claims_of(model(), after)[1] is None


@pytest.mark.parametrize(("layer", "others"), [("MatMul (h{}, w)", 20), ("Neg (h{})", 5)], ids=["heavy", "most nodes"])
def test_a_part_that_would_be_much_of_the_model_is_not_cut_out(layer: str, others: int) -> None:
    layers = "".join(f"h{i} = {layer.format(i - 1)} " for i in range(1, 9))
    layers += "o0 = Neg (h0) " + "".join(f"o{i} = Neg (o{i - 1}) " for i in range(1, others))
    text = f"g (float[2, 8] h0) => (float[2, 8] y, float[2, 8] o{others - 1}) {{ {layers} y = Relu (h8) }}"
    before = detached(model_of(text, w=matrix(8, 8, 0)))
    after = detached(model_of(text.replace("Relu (h8)", "Clip (h8, z)"), w=matrix(8, 8, 0), z=np.float32(0)))
    proven, claims = claims_of(before, after)
    assert claims is not None and list(claims.names) == ["y"]
    assert part_of(proven, claims, frozenset()) is None
    held = part_of(proven, claims, frozenset({proven.digests.values["h8"], proven.digests.values["y"]}))
    assert held is not None and len(held.model.proto.graph.node) == 1


class Counting(NumericProver):
    """A prover that tells how often it ran a whole model."""

    runs = 0

    def run(self, model: AnalyzedModel, *, hold: bool = True) -> Measurement:
        self.runs += 1
        return super().run(model, hold=hold)


@pytest.fixture
def prover(context: PassContext) -> Counting:
    prover = Counting.of_itself([{"x": matrix(2, 8, seed)} for seed in (3, 4)], context)
    prover.watch(AnalyzedModel(model()), [])
    assert isinstance(prover, Counting)
    return prover


@pytest.mark.parametrize(
    ("change", "right"),
    [("rows", "Gather <axis = 0> (shape, zero)"), ("shape", "Constant <value = int64[2] {2, 8}> ()")],
)
def test_a_sound_change_of_shapes_is_proven_without_running_the_model(
    prover: Counting, change: str, right: str
) -> None:
    after = model(**{change: right})
    assert prover.measure(AnalyzedModel(after)).why == ""
    assert prover.runs == 0
    assert prover.run(AnalyzedModel(after)).max_abs == 0.0, "and the whole model agrees"


def test_a_wrong_change_is_not_proven_and_the_nodes_after_held_values_show_it(prover: Counting) -> None:
    wrong = AnalyzedModel(model(y="Neg (flat)"))
    measurement = prover.measure(wrong)
    assert measurement.why.startswith("y: max abs error")
    assert prover.runs == 0
    assert prover.run(wrong) == measurement, "and the whole model shows the same errors"


def test_what_is_held_of_one_opset_says_nothing_of_another(prover: Counting) -> None:
    """A Softmax of opset 12 has the digest of one of opset 13."""
    after = model(y="Neg (flat)")
    after.proto.opset_import[0].version += 1
    assert prover.measure(AnalyzedModel(after)).why.startswith("y: max abs error")
    assert prover.runs == 1


OPSETS = """
g (float[2, 2, 8] x) => (float[2, 2, 2] y, float[2, 2, 2] z) {
    a = Relu (x)
    b = Exp (a)
    c = Neg (b)
    d = Add (c, a)
    e = Abs (d)
    p = Sqrt (e)
    q = Neg (p)
    f = Sigmoid (q)
    h = MatMul (f, v)
    y = Softmax <axis = 2> (h)
    z = Tanh (h)
}
"""


def test_what_was_equal_in_another_opset_is_measured_again(context: PassContext) -> None:
    """Without `axis`, a Softmax of opset 13 is over the last axis, and one of opset 12 over all but the first."""
    prover = Counting.of_itself([{"x": matrix(4, 8, 0).reshape(2, 2, 8)}], context)
    weights = {"v": matrix(8, 2, 1), "nearly": np.float32(1.0000001)}
    first = model_of(OPSETS, 20, **weights)
    first.opset_import[0].version = 12
    later = OPSETS.replace(" <axis = 2>", "")
    newer = model_of(later, 20, **weights)
    older = model_of(later.replace("z = Tanh (h)", "t = Tanh (h) z = Mul (t, nearly)"), 20, **weights)
    newer.opset_import[0].version, older.opset_import[0].version = 13, 12
    prover.watch(AnalyzedModel(detached(first)), [])
    assert prover.measure(AnalyzedModel(detached(newer))).why == ""
    assert prover.measure(AnalyzedModel(detached(older))).why.startswith("y: max abs error")


def test_what_was_proven_in_another_opset_is_no_equality(context: PassContext) -> None:
    prover = Counting.of_itself([{"x": matrix(4, 8, 0).reshape(2, 2, 8)}], context)
    alone = OPSETS.replace(" <axis = 2>", "")
    in_rows = alone.replace("y =", "rows = Flatten (h) soft = Softmax <axis = 1> (rows) size = Shape (h) y =")
    in_rows = in_rows.replace("Softmax (h)", "Reshape (soft, size)")
    models = [model_of(text, 20, v=matrix(8, 2, 1)) for text in (alone, in_rows, in_rows, alone)]
    for proto, opset in zip(models, (12, 12, 13, 13), strict=True):
        proto.opset_import[0].version = opset
    first, *sound, wrong = [AnalyzedModel(detached(proto)) for proto in models]
    prover.watch(first, [])
    assert [prover.measure(candidate).why for candidate in sound] == ["", ""]
    assert prover.measure(wrong).why.startswith("y: max abs error")


POOLED = """
g (float[batch, 3, 16] x) => (float[batch, 4] y, float[batch, 4] z) {
    c = Conv (x, w)
    m = GlobalMaxPool (c)
    p = Squeeze (m, last)
    h = MatMul (p, v)
    z = Neg (h)
    y = Tanh (h)
}
"""


def test_a_change_after_the_pooling_is_measured_there_on_each_draw(context: PassContext) -> None:
    """The pooled value is small at any number of rows, so it is held; what comes before it is not run again."""
    weights = {"w": matrix(8, 12, 0).reshape(8, 3, 4), "v": matrix(8, 4, 1), "last": np.array([-1], np.int64)}
    prover = Counting.of_itself([{"x": matrix(rows, 48, rows).reshape(rows, 3, 16)} for rows in (1, 8)], context)
    prover.watch(AnalyzedModel(detached(model_of(POOLED, **weights))), [])
    texts = {
        "y = Tanh (h)": "t = Tanh (h) y = Mul (t, nearly)",
        "z = Neg (h)": "n = Shape <start = 0, end = 1> (x) f = Cast <to = 1> (n) i = Clip (f, one, seven) "
        "q = Div (i, f) r = Neg (h) z = Mul (r, q)",
    }
    nearly = {"nearly": np.float32(1.0000001), "one": np.float32(1), "seven": np.float32(7)}
    sound, wrong = (
        AnalyzedModel(detached(model_of(POOLED.replace(old, new), **weights, **nearly))) for old, new in texts.items()
    )
    found = [prover.measure(candidate) for candidate in (sound, wrong)]
    assert found[0].why == "" and found[0].max_abs > 0
    assert found[1].why.startswith("z: max abs error"), "at 8 rows alone"
    assert prover.runs == 0
    assert [prover.run(candidate) for candidate in (sound, wrong)] == found


def test_an_output_of_another_type_is_refused_as_in_the_whole_model(context: PassContext) -> None:
    weights = {"w": matrix(8, 12, 0).reshape(8, 3, 4), "v": matrix(8, 4, 1), "last": np.array([-1], np.int64)}
    prover = Counting.of_itself([{"x": matrix(2, 48, 0).reshape(2, 3, 16)}], context)
    prover.watch(AnalyzedModel(detached(model_of(POOLED, **weights))), [])
    wrong = detached(model_of(POOLED, **weights))
    wrong.proto.graph.node[-1].output[0] = "t"
    wrong.proto.graph.node.append(helper.make_node("Cast", ["t"], ["y"], to=TensorProto.DOUBLE))
    with pytest.raises(StepFailed, match="onnxruntime refuses the model"):
        prover.measure(AnalyzedModel(wrong))


def test_a_claim_may_not_rest_on_a_value_that_only_has_the_name(prover: Counting) -> None:
    """`h` is another value under its old name: equal by name, not by number."""
    wrong = detached(model_of(BEFORE.replace("MatMul (x, w)", "MatMul (x, v)"), v=matrix(8, 8, 1)))
    assert prover.measure(AnalyzedModel(wrong)).why.startswith("y: max abs error")


def test_what_was_learned_holds_for_the_models_after_it(prover: Counting) -> None:
    first = model(rows="Gather <axis = 0> (shape, zero)")
    second = model(rows="Gather <axis = 0> (shape, zero)", shape="Constant <value = int64[2] {2, 8}> ()")
    assert [prover.measure(AnalyzedModel(candidate)).why for candidate in (first, second)] == ["", ""]
    assert prover.runs == 0
    wrong = model(rows="Gather <axis = 0> (shape, zero)", y="Abs (flat)")
    assert prover.measure(AnalyzedModel(wrong)).why != ""


def test_values_are_held_by_what_they_mean_and_not_by_name(prover: Counting) -> None:
    """The changed model calls the number of columns `rows`: what a part reads is the value that is meant."""
    text = """
    g (float[2, 8] x) => (float[2, 8] y) {
        h = MatMul (x, w)
        shape = Shape (x)
        rows = Constant <value = int64[1] {8}> ()
        zero = Constant <value = int64[1] {0}> ()
        columns = Gather <axis = 0> (shape, zero)
        size = Concat <axis = 0> (columns, rows)
        flat = Reshape (h, size)
        y = Relu (flat)
    }
    """
    assert prover.measure(AnalyzedModel(detached(model_of(text, w=matrix(8, 8, 0))))).why == ""


def test_the_same_bits_and_not_nearly_the_same(prover: Counting) -> None:
    """A change in the last bit is no claim that holds: its error is measured, and is within tolerance."""
    text = BEFORE.replace("y = Relu (flat)", "r = Relu (flat) y = Mul (r, nearly)")
    nearly = detached(model_of(text, w=matrix(8, 8, 0), nearly=np.float32(1.0000001)))
    measurement = prover.measure(AnalyzedModel(nearly))
    assert measurement.why == ""
    assert 0 < measurement.max_abs < 1e-5


@pytest.mark.parametrize(("equal_in", "ran"), [((), 1), ((0,), 2), ((0, 1), 3)])
def test_one_draw_on_which_a_pair_differs_is_the_last_that_is_run(
    context: PassContext, tmp_path: Path, equal_in: tuple[int, ...], ran: int
) -> None:
    text = "g (float[2, 8] x, float[2, 8] was) => (float[2, 8] y) { y = Relu (x) }"
    draws = [{"x": matrix(2, 8, seed), "was": matrix(2, 8, seed)} for seed in range(3)]
    for place in equal_in:
        draws[place]["was"] = np.maximum(draws[place]["x"], 0)
    sent = portable(detached(model_of(text)), context.spill)
    fed = [(draw, {}) for draw in draws]
    answer = run_model(RunRequest(sent, fed, Criteria(), str(tmp_path / "kept"), same=[("y", "was")]))
    assert [draw.is_same for draw in answer.draws] == [True] * len(equal_in) + [False] and len(answer.draws) == ran


def test_another_random_number_has_the_errors_that_the_whole_model_shows(context: PassContext) -> None:
    text = "g (float[4] x) => (float[4] y) { r = RandomUniform <shape = [4]> () z = Mul (r, zero) y = Add (x, z) }"
    zero = np.float32(0)
    prover = Counting.of_itself([{"x": matrix(1, 4, 0).ravel()}], context)
    prover.watch(AnalyzedModel(detached(model_of(text, zero=zero))), [])
    after = AnalyzedModel(detached(model_of(text.replace("shape = [4]", "high = 2.0, shape = [4]"), zero=zero)))
    measurement = prover.measure(after)
    assert measurement.why == ""
    assert prover.run(after) == measurement


# Proof by structure: for models that nobody can run. What is kept stays, and nothing of the weights is read.

RECIPE = ["onnxscript", "default", "onnxsim"]


@pytest.fixture
def referring(tmp_path: Path) -> Path:
    """An attention block whose weights lie in a file beside it."""
    onnx.save(attention(64, 4), tmp_path / "m.onnx", save_as_external_data=True, location="shard", size_threshold=1024)
    return tmp_path / "m.onnx"


def test_what_is_kept_stays_and_weights_stay_where_they_are(referring: Path, context: PassContext) -> None:
    shard = (referring.parent / "shard").read_bytes()
    x = np.random.default_rng(0).standard_normal((2, 8, 64)).astype(np.float32)
    before = onnxruntime.InferenceSession(referring).run(None, {"x": x})[0]

    run = passes.optimize(referring, RECIPE, keep=["qkv"], proof="structure", context=context)
    save(run.model, referring, referring=True)

    assert [verdict.kept for verdict in run.structures] == [True]
    assert not any(row.errors for row in run.rows)
    assert run.rows[-1].reason == "without fuse_attention"
    after = onnxruntime.InferenceSession(referring).run(None, {"x": x})[0]
    np.testing.assert_allclose(np.asarray(after), np.asarray(before), atol=1e-5)
    assert (referring.parent / "shard").read_bytes() == shard
    assert {path.name for path in referring.parent.iterdir()} == {"m.onnx", "shard"}


CONFUSE = """
def confuse(model):
    for node in model.graph.node:
        node.input[:] = ["wv" if name == "wk" else name for name in node.input]
    return model

confuse.reads = "structure"
"""


def test_a_step_that_breaks_what_is_kept_is_reverted(referring: Path, context: PassContext) -> None:
    (referring.parent / "own.py").write_text(CONFUSE)
    run = passes.optimize(
        referring, [f"{referring.parent}/own.py:confuse"], keep=["qkv"], proof="structure", context=context
    )
    assert [row.status for row in run.rows] == ["reverted"]
    assert "no separate product with the matrix of K (wk)" in run.rows[0].reason


@pytest.mark.parametrize("step", ["onnxslim", {"onnxsim": {"check_n": 1}}])
def test_a_step_that_needs_the_weights_fails_and_says_so(
    referring: Path, step: RecipeItem, context: PassContext
) -> None:
    run = passes.optimize(referring, [step], proof="structure", context=context)
    assert run.rows[-1].status == "failed"
    assert "it takes the whole model with its weights, and 4 of them are to stay unread" in run.rows[-1].reason


def test_a_folded_transpose_is_written_beside_and_its_projection_is_still_kept(
    tmp_path: Path, context: PassContext
) -> None:
    model = attention(64, 4)
    for node in list(model.graph.node):
        if node.op_type == "MatMul" and node.input[1] == "wq":
            node.input[1] = "turned"
    model.graph.node.insert(0, onnx.helper.make_node("Transpose", ["wq"], ["turned"], perm=[1, 0]))
    path = tmp_path / "m.onnx"
    wq = next(onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == "wq")
    onnx.save(model, path, save_as_external_data=True, location="shard", size_threshold=1024)

    run = passes.optimize(path, ["fold_constants"], keep=["qkv"], proof="structure", context=context)
    save(run.model, path, referring=True)

    assert run.rows[0].changed and run.rows[0].status == "ran"
    assert [verdict.kept for verdict in run.structures] == [True]
    [data] = tmp_path.glob("m.onnx.*.data")
    assert data.read_bytes() == np.ascontiguousarray(wq.T).tobytes()


def test_nothing_is_read_of_a_model_of_terabytes(tmp_path: Path, context: PassContext) -> None:
    """Its weights are holes in a file: to hash them would take hours."""
    side = 2**18
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[1, {side}] x) => (float[1, {side}] y) {{
            h = MatMul (x, a)
            t = Transpose <perm = [1, 0]> (b)
            i = Identity (h)
            y = MatMul (i, t)
        }}"""
    )
    for place, name in enumerate("ab"):
        tensor = model.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=[side, side])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="hole")
        tensor.external_data.add(key="offset", value=str(place * 4 * side * side))
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(2 * 4 * side * side + mmap.PAGESIZE)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())

    run = passes.optimize(path, RECIPE, proof="structure", context=context)

    assert [node.op_type for node in run.model.proto.graph.node] == ["MatMul", "Transpose", "MatMul"]
    assert read_model(path, unread=True).nbytes() > 2**39
