"""What the table says of onnxoptimizer's and onnxsim's passes, each seen on a model."""

from __future__ import annotations

import onnx
import pytest

from passes.catalog import CatalogEntry, catalog
from passes.catalog.listing import example_of, isolate_pass, read_example
from passes.context import PassContext
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.external.onnxsim import OnnxSim
from passes.policy.policy import DESTROYS
from passes.recipe.recipe import LIBRARIES, OWN_STEPS
from passes.structures import structure_of
from tests.support.onnx_models import attention, detached, model_of
from tests.support.structure_models import drawn, found


@pytest.fixture(scope="module")
def rows(context: PassContext) -> tuple[CatalogEntry, ...]:
    return catalog(context)


def tied() -> onnx.ModelProto:
    """Q and K have one matrix."""
    model = attention()
    for node in model.graph.node:
        node.input[:] = ["wq" if name == "wk" else name for name in node.input]
    return model


RMS_NORM = """
g (float[2, 4, 8] x) => (float[2, 4, 8] y)
<float[8] w, float[8] u, float two = {2.0}, float eps = {0.000001}, int64[1] last = {-1}> {
    q = Pow (x, two)
    v = ReduceMean (q, last)
    e = Add (v, eps)
    s = Sqrt (e)
    n = Div (x, s)
    m = Mul (n, w)
    y = Mul (m, u)
}"""

ROPE = """
g (float[1, 2, 4, 8] x, float[1, 1, 4, 8] cos, float[1, 1, 4, 8] sin) => (float[1, 2, 4, 8] y) {
    left, right = Split <axis = -1, num_outputs = 2> (x)
    minus = Neg (right)
    turned = Concat <axis = -1> (minus, left)
    straight = Mul (x, cos)
    across = Mul (turned, sin)
    y = Add (straight, across)
}"""

EINSUM = """
g (float[2, 8, 4] q, float[2, 4, 8] k, float[2, 8, 4] v) => (float[2, 8, 4] y) {
    s = Einsum <equation = "bqd,bdk->bqk"> (q, k)
    p = Softmax <axis = -1> (s)
    y = Einsum <equation = "bqk,bkd->bqd"> (p, v)
}"""

CHUNKS = """
g (int64[2, 6] ids) => (float[2, 6, 4] y) <float[7, 4] table> {
    a, b = Split <axis = 1, num_outputs = 2> (ids)
    c = Gather (table, a)
    d = Gather (table, b)
    y = Concat <axis = 1> (c, d)
}"""

RESIDUAL = "g (float[4, 8] x) => (float[4, 8] y) <float[8, 8] w> { f = MatMul (x, w) y = Add (f, x) }"

MODELS = {
    "eliminate_common_subexpression": tied(),
    "fuse_consecutive_mul": drawn(RMS_NORM),
    "fuse_matmul_add_bias_into_gemm": drawn(RESIDUAL),
    "fuse_qkv": attention(),
    "fuse_split_gather_concat": drawn(CHUNKS),
    "neg_to_mul": drawn(ROPE),
    "pow2_to_mul": drawn(RMS_NORM),
    "replace_einsum_with_matmul": drawn(EINSUM),
}
"""Where the picture of a pass in the gallery shows something else."""

FIRST = {"pow2_to_mul": "rmsnorm", "fuse_gqa": "attention"}
"""The kind that is seen, of a pass that destroys several."""

SEEN = [
    name
    for name in DESTROYS
    if name in MODELS or (example_of(name) is not None and name.startswith(("fuse_", "eliminate_")))
]


def test_every_entry_of_the_two_libraries_is_seen() -> None:
    assert set(SEEN) >= {*OnnxOptimizerPass.destroys, *OnnxSim.destroys}


def test_every_step_comes_from_a_known_distribution() -> None:
    assert {make().source for make in OWN_STEPS.values()} | {"onnxoptimizer"} == {*LIBRARIES, "onnxline"}


def test_libraries_agree_on_what_a_pass_of_one_name_destroys() -> None:
    types = (*OWN_STEPS.values(), OnnxOptimizerPass)
    entries = [entry for step_type in types for entry in step_type.destroys.items()]
    assert {name for name, _ in entries} == {*DESTROYS}
    assert [(name, kinds) for name, kinds in entries if kinds != DESTROYS[name]] == []


@pytest.mark.parametrize("name", SEEN)
def test_a_pass_destroys_what_the_table_says(name: str, rows: tuple[CatalogEntry, ...], context: PassContext) -> None:
    file = example_of(name)
    model = MODELS[name] if name in MODELS else read_example(file).model if file is not None else model_of("")
    kind = FIRST.get(name, DESTROYS[name][0])
    instances = found(kind, model)
    assert instances
    ran = [isolate_pass(row, rows).apply(detached(model), context).model for row in rows if row.bare == name]
    structure = structure_of(kind)
    assert structure is not None
    assert any(structure.find_lost(instances, after) for after in ran)
