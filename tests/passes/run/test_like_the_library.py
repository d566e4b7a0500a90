"""With nothing to keep, the runner leaves what the library leaves when its passes are called one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
import onnxoptimizer
import pytest

import passes
from passes.catalog.listing import example_of, read_example
from passes.context import PassContext
from passes.run.result import Status
from tests.support.onnx_models import attention, biased_attention, model_of

NAMES = [name for name in onnxoptimizer.get_fuse_and_elimination_passes() if name != "fuse_qkv"]
"""`fuse_qkv` aborts on an input that three products read."""

TWICE = """
g (float[N, 8] x) => (float[N, 8] y) {
    a = Neg (x)
    b = Neg (x)
    c = Add (a, w)
    d = Add (b, w)
    e = Mul (c, d)
    y = Identity (e)
}
"""


def models() -> Iterator[tuple[str, onnx.ModelProto]]:
    yield "attention", attention()
    yield "attention with biases", biased_attention()
    yield "everything twice", model_of(TWICE, w=np.arange(8, dtype=np.float32))
    for name in NAMES:
        picture = example_of(name)
        if picture:
            yield name, read_example(picture).model


@pytest.mark.parametrize("model", [pytest.param(model, id=name) for name, model in models()])
def test_the_runner_leaves_what_the_library_leaves(model: onnx.ModelProto, context: PassContext) -> None:
    expected = model
    for pass_name in NAMES:
        expected = onnxoptimizer.optimize(expected, [pass_name])
    run = passes.optimize(model, recipe=NAMES, watch=False, context=context)
    assert [row.reason for row in run.rows if row.status is not Status.RAN] == []
    ops = Counter(node.op_type for node in run.model.proto.graph.node)
    assert ops == Counter(node.op_type for node in expected.graph.node)


def test_of_equal_operators_one_is_left(context: PassContext) -> None:
    run = passes.optimize(model_of(TWICE, w=np.arange(8, dtype=np.float32)), recipe=NAMES, context=context)
    rows = {row.name: row for row in run.rows if row.changed}
    assert "eliminate_common_subexpression" in rows
    assert rows["eliminate_deadend"].diff == {"Neg": -1, "Add": -1}
