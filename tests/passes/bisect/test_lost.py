"""Who loses a structure: the pass, its turn, the nodes, and a small model that loses it in a plain call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxoptimizer
import onnxsim
import pytest
from onnx import helper, numpy_helper

from passes.bisect import Bisection, Loss, bisect
from passes.context import PassContext
from passes.errors import PolicyError
from passes.recipe.recipe import RecipeItem, steps_of
from passes.structures import structure_of
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save
from tests.support.onnx_models import (
    attention,
    attention_on_the_input,
    biased_attention,
    detached,
    matrix,
    merged_attention,
    model_of,
    op_types,
    vector,
)
from tests.support.pass_runs import models_left_by

WIDTH = 32


def find(
    model: DetachedModel, recipe: list[RecipeItem], context: PassContext, *, lost: str = "qkv", **more: Any
) -> Bisection:
    return bisect(model, steps_of(recipe), Loss.of(lost, model), context, **more)


def test_a_search_leaves_no_model_to_the_collector(context: PassContext) -> None:
    """Failures of steps, which it keeps, have no frames any more."""
    model = detached(attention())
    assert models_left_by(lambda: find(model, ["default"], context)) == 0


def loses_qkv(before: onnx.ModelProto, after: onnx.ModelProto) -> bool:
    """Whether Q, K and V are found in one model, and lost in the other."""
    structure = structure_of("qkv")
    assert structure is not None
    instances = structure.find(detached(before)).instances
    return bool(instances) and bool(structure.find_lost(instances, detached(after)))


def test_the_pass_of_the_default_set_that_merges_q_k_and_v(context: PassContext, tmp_path: Path) -> None:
    model = detached(attention())
    finding = find(model, ["default"], context)
    culprit, smallest = finding.culprit, finding.smallest
    assert culprit is not None and smallest is not None
    assert (culprit.name, culprit.source, culprit.turn) == ("fuse_qkv", "onnxoptimizer", 1)
    assert culprit.place == onnxoptimizer.get_fuse_and_elimination_passes().index("fuse_qkv") + 1
    assert finding.steps == len(onnxoptimizer.get_fuse_and_elimination_passes())
    assert culprit.why == "qkv attention 0: no separate product with the matrix of Q (wq), K (wk), V (wv)"
    assert finding.runs <= 45
    assert [node.op for node in smallest.removed] == ["MatMul"] * 3
    assert sorted(node.op for node in smallest.added) == ["Concat", "MatMul", "Split"]

    save(smallest.model, tmp_path / "small.onnx")
    small = onnx.load(tmp_path / "small.onnx")
    onnx.checker.check_model(small, full_check=True)
    assert op_types(small).count("MatMul") == 5 and "Softmax" not in op_types(small), (
        "attention without a softmax is one too"
    )
    assert len(small.graph.node) <= 12
    assert loses_qkv(small, onnxoptimizer.optimize(small, ["fuse_qkv"]))


def test_the_smallest_model_is_bisected_to_the_same_pass(context: PassContext, tmp_path: Path) -> None:
    first = find(detached(attention()), ["fuse_qkv"], context)
    assert first.smallest is not None and first.culprit is not None
    save(first.smallest.model, tmp_path / "small.onnx")
    again = find(read_model(tmp_path / "small.onnx"), ["default"], context)
    assert again.culprit is not None and again.smallest is not None
    assert again.culprit.name == first.culprit.name
    assert again.smallest.nodes == first.smallest.nodes, "nothing more can be taken out of it"


def test_the_pass_inside_of_onnxsim(context: PassContext, tmp_path: Path) -> None:
    """fuse_qkv merges the three products; left out, fuse_attention takes the whole block."""
    model = detached(biased_attention())
    finding = find(model, ["onnxsim"], context)
    assert finding.culprit is not None and finding.smallest is not None
    assert finding.culprit.name == "onnxsim/fuse_qkv"
    assert finding.culprit.others == ("fuse_attention",)
    assert finding.runs <= 45
    assert [node.op for node in finding.smallest.added] == ["MatMul", "Split"]

    save(finding.smallest.model, tmp_path / "small.onnx")
    small = onnx.load(tmp_path / "small.onnx")
    assert loses_qkv(small, onnxsim.simplify(small)[0])


def test_a_model_that_onnxsim_refuses_as_it_is_runs_as_in_a_run(context: PassContext) -> None:
    """An output without a shape, and initializers that are inputs, as IR version 3 asks."""
    model = biased_attention()
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    old = biased_attention()
    old.ir_version = 3
    for held in old.graph.initializer:
        old.graph.input.append(helper.make_tensor_value_info(held.name, held.data_type, held.dims))
    for source in (model, old):
        finding = find(detached(source), ["onnxsim"], context, budget_s=0)
        assert finding.failed == ()
        assert finding.culprit is not None and finding.culprit.name == "onnxsim/fuse_qkv"


def test_constants_are_stored_before_a_model_is_made_smaller(context: PassContext) -> None:
    """The matrices come in halves, as torch's come transposed. To remove one of their nodes alone breaks the model."""
    model = biased_attention()
    for name in ("wq", "wk", "wv"):
        (whole,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
        for half, rows in zip("ab", np.split(numpy_helper.to_array(whole), 2), strict=True):
            model.graph.initializer.append(numpy_helper.from_array(rows, name + half))
        model.graph.initializer.remove(whole)
        model.graph.node.insert(0, helper.make_node("Concat", [f"{name}a", f"{name}b"], [name], axis=0))
    finding = find(detached(model), ["onnxsim"], context)
    assert finding.smallest is not None
    assert "Concat" not in op_types(finding.smallest.model.proto)


def test_what_is_skipped_shows_who_is_next(context: PassContext) -> None:
    model = detached(biased_attention())
    second = find(model, ["onnxsim"], context, skip=["onnxsim/fuse_qkv"], budget_s=0)
    assert second.culprit is not None
    assert (second.culprit.name, second.culprit.others, second.smallest) == ("onnxsim/fuse_attention", (), None)
    none = find(model, ["onnxsim"], context, skip=["fuse_attention", "fuse_qkv"])
    assert none.culprit is None
    assert none.nothing == "nothing lost: the one qkv stands"
    with pytest.raises(PolicyError, match="did you mean 'fuse_attention'"):
        find(model, ["onnxsim"], context, skip=["fuse_attentoin"])


HIDDEN_BEHIND_AN_IDENTITY = """
g (float[8, 4] x) => (float[4, 6] y) {
    h = Relu (x)
    turned = Transpose <perm = [1, 0]> (h)
    same = Identity (turned)
    z = Gemm (same, w, b)
    y = Neg (z)
}
"""


def test_the_turn_of_a_repeat(context: PassContext) -> None:
    """Only when the Identity is gone can the Gemm read the matrix transposed: in the second turn."""
    model = detached(model_of(HIDDEN_BEHIND_AN_IDENTITY, w=matrix(8, 6, 0), b=vector(6, 1)))
    steps = ["fuse_transpose_into_gemm", "eliminate_identity"]
    recipe: list[RecipeItem] = [{"sequence": {"steps": steps, "repeat": "until-stable"}}]
    finding = find(model, recipe, context, lost="op:Transpose")
    assert finding.culprit is not None and finding.smallest is not None
    assert (finding.culprit.name, finding.culprit.place, finding.culprit.turn) == ("fuse_transpose_into_gemm", 1, 2)
    assert finding.culprit.repeats
    assert op_types(finding.smallest.model.proto) == ["Transpose", "Gemm"]

    once = find(model, [{"sequence": {"steps": steps}}], context, lost="op:Transpose")
    assert once.culprit is None


def test_halves_go_on_from_what_the_passes_before_have_made(context: PassContext) -> None:
    """Alone, and without the pass before it, the guilty one does nothing."""
    model = detached(model_of(HIDDEN_BEHIND_AN_IDENTITY, w=matrix(8, 6, 0), b=vector(6, 1)))
    recipe: list[RecipeItem] = ["eliminate_identity", "fuse_transpose_into_gemm", "nop", "nop"]
    finding = find(model, recipe, context, lost="op:Transpose", budget_s=0)
    assert finding.culprit is not None
    assert (finding.culprit.name, finding.culprit.place) == ("fuse_transpose_into_gemm", 2)
    assert finding.runs == 2


def test_a_pass_that_fails_is_left_out_and_named(context: PassContext) -> None:
    """fuse_qkv stops with an assertion where Q, K and V read a graph input; onnxsim loses them all the same."""
    model = detached(attention_on_the_input())
    finding = find(model, ["default", "onnxsim"], context, budget_s=0)
    assert finding.culprit is not None
    assert finding.culprit.name == "onnxsim/fuse_attention"
    assert [words.partition(":")[0] for words in finding.failed] == ["fuse_qkv"]


def test_a_structure_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(PolicyError, match="--lost: qkv matches nothing in this model, which has 1 attention block"):
        Loss.of("qkv", detached(merged_attention()))
    with pytest.raises(PolicyError, match="--lost: no structure named 'qvk'; did you mean 'qkv'"):
        Loss.of("qvk", detached(merged_attention()))


def test_a_pass_of_the_users_costs_its_own_step(context: PassContext, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(
        "import os\n"
        "def forks(model):\n    os.fork()\n    os.chdir('/')\n    return model\n"
        "def ends(model):\n    os._exit(0)\n"
    )
    recipe = [f"{tmp_path}/hostile.py:forks", f"{tmp_path}/hostile.py:ends", "fuse_qkv"]
    finding = bisect(biased_attention(), recipe, None, context, lost="qkv", budget_s=0)
    assert finding.culprit is not None and finding.culprit.name == "fuse_qkv"
    assert finding.failed == ("ends: the pass ended its process (exit code 0)",)
