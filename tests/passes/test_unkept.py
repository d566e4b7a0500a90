"""What becomes of a structure that nobody keeps, tried on the structure alone."""

from __future__ import annotations

import pytest

from passes.policy.policy import Policy
from passes.provenance import Descendants
from passes.recipe.recipe import steps_of
from passes.run.apply_policy import with_skips
from passes.step import Workbench, flat
from passes.structures import structure_of
from passes.structures.subgraph import between, extent_of
from passes.structures.view import GraphView
from passes.unkept import part_of, without_keep
from tests.passes.models import attention, detached, model_of


def unkept(bench: Workbench, kind: str, recipe: list[str], skip: tuple[str, ...] = ()):
    """The author, and what stands for the structure then."""
    view = GraphView(detached(attention()))
    structure = structure_of(kind)
    assert structure is not None
    (instance,) = structure.find(view.model).instances
    steps = [with_skips(step, Policy(skip), bench) for step in flat(steps_of(recipe))]
    found = without_keep(instance, view, steps, bench)
    if found is None:
        return None
    after = GraphView(found.model)
    return found.broken_by, [
        node.op_type for node in between(Descendants(after.nodes).of(extent_of(instance, view)), after)
    ]


@pytest.mark.parametrize(
    "recipe, skip, author, first",
    [
        (["fuse_qkv"], (), "fuse_qkv", ["MatMul", "Split"]),
        (["onnxsim"], (), "onnxsim/fuse_qkv", ["MatMul", "Split"]),
        (["onnxsim"], ("fuse_qkv",), "onnxsim/fuse_attention", ["Attention"]),
    ],
)
def test_who_merges_q_k_and_v(
    recipe: list[str], skip: tuple[str, ...], author: str, first: list[str], bench: Workbench
) -> None:
    found = unkept(bench, "qkv", recipe, skip)
    assert found is not None
    assert (found[0], found[1][: len(first)]) == (author, first)


def test_where_nothing_destroys_it(bench: Workbench) -> None:
    assert unkept(bench, "qkv", ["eliminate_identity"]) is None


def test_the_part_is_no_more_than_the_structure() -> None:
    """What a size is asked of is not computed again."""
    model = model_of(
        """g (float[2, 8] x, float[4, 4] z) => (float[4, 4] y) {
            far = Relu (z)
            size = Shape (far)
            y = Reshape (x, size)
        }"""
    )
    view = GraphView(detached(model))
    (instance,) = structure_of("op:Reshape").find(view.model).instances  # type: ignore[union-attr]
    part = part_of(instance, view)
    assert part is not None
    assert [node.op_type for node in part.proto.graph.node] == ["Neg", "Neg", "Shape", "Reshape"]
