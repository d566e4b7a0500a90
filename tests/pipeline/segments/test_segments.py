"""Models with shapes or branches that depend on the data, against onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from passes.proof.numbers import NO_ERROR, compare
from pipeline.segments import SegmentedModel
from pipeline.segments.host_ops import corners_of
from pipeline.verify.backends import BACKENDS, OnnxFile

HEAD = '<ir_version: 10, opset_import: ["": 21]> '

BRANCH = """g (float[n] x, bool c) => (float[m] y) {
  a = Neg(x)
  y = If (c) <
    then_branch = t () => (float[n] u) { u = Relu(a) },
    else_branch = e () => (float[k] v) { two = Constant <value_ints = [2]> () v = Tile(a, two) }
  >
}"""

LOOP = """g (int64 n, float[2] x) => (float[2] last, float[k, 2] all) {
  go = Constant <value = bool {1}> ()
  last, all = Loop (n, go, x) <
    body = b (int64 i, bool c, float[2] s) => (bool c2, float[2] t, float[2] row) {
      c2 = Identity(c) h = CastLike(i, s) t = Add(s, h) row = Mul(t, x)
    }
  >
}"""

SCAN = """g (float[3] x) => (float last, float[3] all) {
  zero = Constant <value = float {0.0}> ()
  last, all = Scan (zero, x) <
    num_scan_inputs = 1, body = b (float s, float e) => (float t, float u) { t = Add(s, e) u = Identity(t) }
  >
}"""

NONZERO = """g (float[n, 3] x) => (float[k] y) {
  places = NonZero(x) rows = Transpose(places) picked = GatherND(x, rows) y = Exp(picked)
}"""

SIZES = """g (float[2, 6] x, int64[k] s) => (float[m] y) { r = Reshape(x, s) t = Transpose(r) y = Relu(t) }"""

SEQUENCE = """g (float[2] a, float[2] b) => (float[2] y) {
  s = SequenceConstruct(a, b) one = Constant <value_int = -1> () p = SequenceAt(s, one) y = Neg(p)
}"""


DETECTOR = """g (float[1, 2, 8, 8] picture, float[1, n, 4] boxes, float[1, 1, n] scores)
  => (int64[k, 3] chosen, float[k, 2, 2, 2] parts) {
  most = Constant <value_ints = [5]> () overlap = Constant <value_floats = [0.5]> ()
  least = Constant <value_floats = [0.1]> () first = Constant <value_ints = [0]> ()
  last = Constant <value_ints = [2]> ()
  chosen = NonMaxSuppression (boxes, scores, most, overlap, least)
  place = Gather <axis = 1> (chosen, last) one = Constant <value_ints = [1]> ()
  rows = Squeeze (place, one) flat = Squeeze (boxes, first)
  picked = Gather (flat, rows) whose = Sub (rows, rows)
  parts = RoiAlign <output_height = 2, output_width = 2, sampling_ratio = 2> (picture, picked, whose)
}"""
"""As many regions as the scores say, and what is in each."""


def test_boxes_by_two_corners_or_by_their_centre() -> None:
    boxes = np.array([[3.0, 1.0, 0.0, 2.0]])
    np.testing.assert_array_equal(corners_of(boxes, centred=False), [[0, 1, 3, 2]])
    np.testing.assert_array_equal(corners_of(boxes, centred=True), [[0, 3, 2, 3]])


BACKWARDS = """g (float[n, t, 2] x, int64[n] sizes, float[2, 3] w, float[3, 3] r) => (float[n, t2, 3] y) {
  steps = Transpose <perm = [1, 0, 2]> (x)
  turned = ReverseSequence <time_axis = 0, batch_axis = 1> (steps, sizes)
  shape = Shape(turned) zero = Constant <value = int64 {0}> () one = Constant <value = int64 {1}> ()
  time = Gather(shape, zero) batch = Gather(shape, one)
  axis = Constant <value_ints = [0]> () width = Constant <value_ints = [3]> ()
  rows = Unsqueeze(batch, axis) size = Concat <axis = 0> (rows, width)
  start = ConstantOfShape(size)
  more = Less(zero, time)
  at, state, all = Loop ("", more, zero, start) <
    body = b (int64 i, bool c, int64 at0, float[p, 3] h) => (bool c2, int64 at2, float[p, 3] h2, float[p, 3] out) {
      at2 = Add(at0, one)
      step = Gather(turned, at0) a = MatMul(step, w) e = MatMul(h, r) u = Add(a, e) h2 = Tanh(u) out = Identity(h2)
      c_at = Cast <to = 1> (at2) c_time = Cast <to = 1> (time) c2 = Less(c_at, c_time)
    }
  >
  back = ReverseSequence <time_axis = 0, batch_axis = 1> (all, sizes)
  y = Transpose <perm = [1, 0, 2]> (back)
}"""
"""The backward half of a recurrent layer as tf2onnx writes it: no count of rounds, a body that reads from outside."""


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def boxes(count: int) -> np.ndarray:
    """Squares of 3 on a line, half a pixel apart: two neighbours share more than half of what they cover."""
    begins = np.arange(count, dtype=np.float32) / 2
    return np.stack([begins, begins, begins + 3, begins + 3], -1)[None]


def scores(count: int) -> np.ndarray:
    """The first box is below the least score."""
    return np.linspace(0.05, 0.9, count, dtype=np.float32).reshape(1, 1, count)


@pytest.mark.parametrize(
    ("text", "feeds"),
    [
        (BRANCH, [{"x": f32(3), "c": np.array(c)} for c in (True, False, True)]),
        (LOOP, [{"n": np.array(n), "x": f32(2)} for n in (3, 5)]),
        (SCAN, [{"x": f32(3)}]),
        (NONZERO, [{"x": np.maximum(f32(n, 3), 0)} for n in (2, 4, 2)]),
        (SIZES, [{"x": f32(2, 6), "s": np.array(s)} for s in ([3, 4], [12], [4, 3])]),
        (SEQUENCE, [{"a": f32(2), "b": f32(2) + 1}]),
        (DETECTOR, [{"picture": f32(1, 2, 8, 8), "boxes": boxes(n), "scores": scores(n)} for n in (6, 3, 6)]),
        (
            BACKWARDS,
            [
                {"x": f32(n, t, 2), "sizes": np.array(sizes), "w": f32(2, 3), "r": f32(3, 3)}
                for n, t, sizes in ((2, 4, [4, 2]), (1, 3, [3]), (3, 4, [1, 4, 2]))
            ],
        ),
    ],
    ids=["If", "Loop", "Scan", "NonZero", "Reshape", "sequence", "a detector", "a tf2onnx layer"],
)
def test_like_onnxruntime(text: str, feeds: list[dict[str, Any]]) -> None:
    segmented, session = SegmentedModel(model(text)), onnxruntime.InferenceSession(model(text).SerializeToString())
    for feed in feeds:
        found, wanted = segmented.run(feed), session.run(None, feed)
        for name, array in zip(segmented.outputs, wanted, strict=True):
            np.testing.assert_allclose(found[name], np.asarray(array), rtol=1e-6, atol=1e-6)
    assert segmented.count().fallbacks == ()


def test_a_loop_without_an_iteration_has_no_rows() -> None:
    found = SegmentedModel(model(LOOP)).run({"n": np.array(0), "x": f32(2)})
    assert found["all"].shape == (0, 2)
    np.testing.assert_array_equal(found["last"], f32(2))


def test_equal_feeds_make_nothing_new() -> None:
    """Each branch is planned once, whatever comes between."""
    segmented = SegmentedModel(model(BRANCH))
    counts = []
    for taken in (True, False, True, False):
        segmented.run({"x": f32(3), "c": np.array(taken)})
        counts.append(segmented.count().calls)
    assert counts[1] == counts[2] == counts[3]


def test_steps_are_forgotten_after_some() -> None:
    segmented = SegmentedModel(model(SIZES))
    for rows in (1, 2, 3, 4, 6, 12) * 4:
        segmented.run({"x": f32(2, 6), "s": np.array([rows, 12 // rows])})
    calls = segmented.count().calls
    for rows in range(1, 40):
        segmented.run({"x": f32(2, 6), "s": np.array([*[1] * rows, 12])})
    assert segmented.count().calls <= 16 * calls


def test_a_sequence_that_is_an_output_is_the_stack_of_its_items_on_every_backend(tmp_path: Path) -> None:
    text = "g (float[4, 3] x) => (seq(float) s) { r = Neg(x) s = SplitToSequence <axis = 0> (r) }"
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "model.onnx")
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name in ("onnxruntime", "plan"):
        found = BACKENDS[name](OnnxFile(tmp_path / "model.onnx")).run({"x": x})["s"]
        assert compare(-x.reshape(4, 1, 3), found) == replace(NO_ERROR, judged_as="float32")
