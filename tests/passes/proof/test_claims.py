"""Small changes are proven by small runs: which values have to be equal, and what it takes to see that."""

from __future__ import annotations

import numpy as np
import pytest

from passes.context import PassContext
from passes.model.canonical import CanonicalGraph, meanings_of, read
from passes.proof.claims import BaseModelRun, Claims, Refinement, claims_by_name, inferred_shapes, refine_claims
from passes.proof.numeric import NumericProver
from passes.proof.part import Mover, part_of
from passes.proof.types import Measurement
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import detached, matrix, model_of

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


def claims_of(after: DetachedModel) -> tuple[BaseModelRun, Claims | None, Claims | None]:
    before = model()
    base = BaseModelRun(before, meanings_of(before))
    by_name = claims_by_name(base, after, read(after), {})
    return base, by_name, refine_claims(base, by_name, {}) if by_name else None


def names(claims: Claims | None) -> list[tuple[str, str]]:
    return [(claim.new, claim.old) for claim in claims.claims] if claims else []


def test_a_value_that_is_computed_anew_is_claimed_to_be_itself() -> None:
    base, by_name, refined = claims_of(model(rows="Gather <axis = 0> (shape, zero)"))
    assert names(by_name) == [("rows", "rows")]
    assert refined is None, "Gather is another operation: there is nothing to push back"
    assert by_name is not None
    part = part_of(base, by_name, frozenset({base.meanings.values["shape"], base.meanings.values["rows"]}))
    assert part is not None
    assert [node.op_type for node in part.model.proto.graph.node] == ["Constant", "Gather"]
    assert list(part.given) == ["shape"]


def test_a_claim_is_pushed_back_to_the_smallest_value_that_differs() -> None:
    text = BEFORE.replace("rows = Slice (shape, zero, one)", "first = Gather <axis = 0> (shape, zero)")
    text = text.replace("size = Concat <axis = 0> (rows, columns)", "both = Concat <axis = 0> (first, columns)")
    _, by_name, refined = claims_of(model(text.replace("(h, size)", "(h, both)")))
    assert names(by_name) == [("flat", "flat")], "the only name that was kept behind the change"
    assert names(refined) == [("first", "rows")], "Reshape and Concat are the same on both sides"


def stream(layers: int, source: str = "Relu (x)", called: str = "h") -> DetachedModel:
    """A residual stream: twice as many paths with each layer."""
    lines = [f"{called}0 = {source}"]
    lines += [
        f"b{called}{i} = Tanh ({called}{i}) {called}{i + 1} = Add ({called}{i}, b{called}{i})" for i in range(layers)
    ]
    body = " ".join((*lines, f"y = Neg ({called}{layers})"))
    return detached(model_of(f"g (float[2, 8] x) => (float[2, 8] y) {{ {body} }}"))


def test_a_claim_is_pushed_back_through_each_value_of_a_residual_stream_once() -> None:
    before, after = stream(100), stream(100, "Max (x, zero) zero = Sub (x, x)", called="renamed")
    base = BaseModelRun(before, meanings_of(before))
    by_name = claims_by_name(base, after, read(after), {})
    assert by_name is not None and names(by_name) == [("y", "y")], "the only name that was kept"
    refinement = Refinement(base, by_name)
    assert refinement.smallest_pairs() == {"renamed0": "h0"}
    assert refinement.visits <= len(after.proto.graph.node)
    assert names(refine_claims(base, by_name, {})) == [("renamed0", "h0")]


def concats(layers: int, called: str, turned: str = "") -> DetachedModel:
    """What is moved: each value goes into the next one twice."""
    lines = [f"{called}0 = {turned or 'Identity (h1)'}"]
    lines += [f"{called}{i + 1} = Concat <axis = 0> ({called}{i}, {called}{i})" for i in range(layers)]
    lines += [f"s = Slice ({called}{layers}, zero, one, axis)", "y = Exp (s)"]
    body = " ".join(("h1 = MatMul (x, w)", *lines))
    constants = {"zero": np.array([0]), "one": np.array([2]), "axis": np.array([0])}
    text = f"g (float[2, 8] x) => (float[2, 8] y) {{ {body} }}"
    return detached(model_of(text, w=matrix(8, 8, 0), **constants))


def test_what_is_moved_is_followed_through_each_node_once() -> None:
    """By every path they would be a million nodes on either side."""
    before, after = concats(20, "a"), concats(20, "b", "Squeeze (u) u = Unsqueeze (h1, axis)")
    base = BaseModelRun(before, meanings_of(before))
    by_name = claims_by_name(base, after, read(after), {})
    assert by_name is not None and names(by_name) == [("s", "s")]
    mover = Mover(base, by_name, frozenset())
    mover.takes(by_name.claims[0])
    assert 20 < mover.visits <= 4 * len(after.proto.graph.node)


def test_another_signature_cannot_be_claimed_away() -> None:
    after = model()
    after.proto.graph.output[0].name = "flat"
    assert claims_by_name(BaseModelRun(model(), meanings_of(model())), after, read(after), {}) is None


def test_a_part_that_would_be_much_of_the_model_is_not_cut_out() -> None:
    layers = "".join(f"h{i} = MatMul (h{i - 1}, w) " for i in range(1, 9))
    text = f"g (float[2, 8] h0) => (float[2, 8] y) {{ {layers} y = Relu (h8) }}"
    before = detached(model_of(text, w=matrix(8, 8, 0)))
    after = detached(model_of(text.replace("Relu (h8)", "Clip (h8, z)"), w=matrix(8, 8, 0), z=np.float32(0)))
    base = BaseModelRun(before, meanings_of(before))
    claims = claims_by_name(base, after, read(after), {})
    assert claims is not None and names(claims) == [("y", "y")]
    assert part_of(base, claims, frozenset()) is None
    held = part_of(base, claims, frozenset({base.meanings.values["h8"], base.meanings.values["y"]}))
    assert held is not None and len(held.model.proto.graph.node) == 1


class Counting(NumericProver):
    """A prover that tells how often it ran a whole model."""

    runs = 0

    def run(self, model: DetachedModel, reading: CanonicalGraph | None = None) -> Measurement:
        self.runs += 1
        return super().run(model, reading)


@pytest.fixture
def prover(context: PassContext) -> Counting:
    prover = Counting.of_itself([{"x": matrix(2, 8, seed)} for seed in (3, 4)], context)
    prover.watch(model(), [])
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
    assert prover.measure(after).why == ""
    assert prover.runs == 0
    assert prover.run(after).max_abs == 0.0, "and the whole model agrees"


def test_a_wrong_change_is_not_proven_and_the_whole_model_shows_it(prover: Counting) -> None:
    wrong = model(y="Neg (flat)")
    assert prover.measure(wrong).why.startswith("y: max abs error")
    assert prover.runs == 1


def test_a_claim_may_not_rest_on_a_value_that_only_has_the_name(prover: Counting) -> None:
    """`h` is another value under its old name: equal by name, not by number."""
    wrong = detached(model_of(BEFORE.replace("MatMul (x, w)", "MatMul (x, v)"), v=matrix(8, 8, 1)))
    assert prover.measure(wrong).why.startswith("y: max abs error")


def test_what_was_learned_holds_for_the_models_after_it(prover: Counting) -> None:
    first = model(rows="Gather <axis = 0> (shape, zero)")
    second = model(rows="Gather <axis = 0> (shape, zero)", shape="Constant <value = int64[2] {2, 8}> ()")
    assert [prover.measure(candidate).why for candidate in (first, second)] == ["", ""]
    assert prover.runs == 0
    wrong = model(rows="Gather <axis = 0> (shape, zero)", y="Abs (flat)")
    assert prover.measure(wrong).why != ""


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
    assert prover.measure(detached(model_of(text, w=matrix(8, 8, 0)))).why == ""


def test_the_same_bits_and_not_nearly_the_same(prover: Counting) -> None:
    """A change in the last bit is no claim that holds: the whole model is run, and is within tolerance."""
    text = BEFORE.replace("y = Relu (flat)", "r = Relu (flat) y = Mul (r, nearly)")
    nearly = detached(model_of(text, w=matrix(8, 8, 0), nearly=np.float32(1.0000001)))
    measurement = prover.measure(nearly)
    assert prover.runs == 1
    assert measurement.why == ""
    assert 0 < measurement.max_abs < 1e-5


def test_another_random_number_is_never_proven_in_pieces(context: PassContext) -> None:
    text = "g (float[4] x) => (float[4] y) { r = RandomUniform <shape = [4]> () z = Mul (r, zero) y = Add (x, z) }"
    zero = np.float32(0)
    prover = Counting.of_itself([{"x": matrix(1, 4, 0).ravel()}], context)
    prover.watch(detached(model_of(text, zero=zero)), [])
    after = detached(model_of(text.replace("shape = [4]", "high = 2.0, shape = [4]"), zero=zero))
    assert prover.measure(after).why == ""
    assert prover.runs == 1


LAYERS = "".join(f"h{index} = MatMul (h{index - 1}, w) " for index in range(1, 7))

MOVED = f"""
g (float[6, 8] h0) => (float[4, 12] y) {{
    {LAYERS}
    first = Constant <value = int64[2] {{3, 16}}> ()
    one = Reshape (h6, first)
    second = Constant <value = int64[2] {{4, 12}}> ()
    two = Reshape (one, second)
    y = Exp (two)
}}
"""
"""Too much in front of `one` to be run again."""


def moving_model(two: str = "two = Reshape (one, second)") -> DetachedModel:
    return detached(model_of(MOVED.replace("two = Reshape (one, second)", two), w=matrix(8, 8, 0)))


@pytest.fixture
def mover(context: PassContext, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """A prover that holds no activations, as of a large model."""
    monkeypatch.setattr("passes.proof.claims.SMALL_ELEMENTS", 1)
    prover = Counting.of_itself([{"h0": np.zeros((6, 8), np.float32)}], context)
    prover.watch(moving_model(), [])
    assert isinstance(prover, Counting)
    return prover


@pytest.mark.parametrize(
    ("two", "runs"),
    [
        ("two = Reshape (h6, second)", 0),
        ("turned = Transpose (one) back = Transpose (turned) two = Reshape (back, second)", 0),
        ("turned = Transpose (one) two = Reshape (turned, second)", 1),
        ("bare = Abs (one) two = Reshape (bare, second)", 1),
    ],
    ids=["straight", "there and back", "elsewhere", "looked at"],
)
def test_what_is_only_moved_is_proven_on_distinct_numbers(mover: Counting, two: str, runs: int) -> None:
    """All values are zero, so the whole model sees no fault; that it has to be run says that the small proof does."""
    assert mover.measure(moving_model(two)).why == ""
    assert mover.runs == runs


def test_shapes_are_known_by_inference_from_the_inputs_alone() -> None:
    """An output that is read inside of the model is declared with a wrong shape."""
    text = """
    g (float[2, 3] x, int64[2] size) => (float[2, 3] y, float[2, 3] z) { y = Reshape (x, size) z = Neg (y) }
    """
    assert set(inferred_shapes(detached(model_of(text)))) == {"x", "size"}
