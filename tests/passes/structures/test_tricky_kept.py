"""Q, K and V in unusual spellings through optimizers: a verdict says what the numbers of the final model say."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from passes.context import PassContext
from passes.graph.traversal import bodies_of, sort_nodes
from passes.run.result import PassRun
from passes.structures import STRUCTURES
from passes.weights.detached import attach
from tests.passes.structures.tricky_attention import TRICKY
from tests.passes.structures.tricky_places import NESTED
from tests.support.onnx_models import detached
from tests.support.structure_models import run

QKV = STRUCTURES["qkv"]
PRODUCTS = ("Gemm", "Conv", "Einsum")
JOINED_AT = {"MatMul": (-1, -1), "FusedMatMul": (-1, -1), "MatMulInteger": (-1, -1), "Conv": (0, 1)}
"""Op → the axis at which its matrices are laid beside each other, and that at which its values then are."""


def merge_products(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """What a merging pass makes: one product with the matrices side by side, and a Split of what comes of it."""
    merged = onnx.ModelProto.FromString(model.SerializeToString())
    merge_product_nodes(merged.graph.node, names)
    sort_nodes(merged.graph)
    return merged


def merge_product_nodes(nodes: MutableSequence[onnx.NodeProto], names: Sequence[str]) -> None:
    """The same, in place, of the nodes of a graph or of a function."""
    before = list(nodes)
    gone = {name: node for node in before for name in names if name in node.output}
    first = onnx.NodeProto.FromString(gone[names[0]].SerializeToString())
    beside, apart = JOINED_AT[first.op_type]
    turned = any(attribute.name == "transB" and attribute.i for attribute in first.attribute)
    matrices = [gone[name].input[1] for name in names]
    first.input[1], first.output[0] = "joined", "both"
    new = [
        helper.make_node("Concat", matrices, ["joined"], axis=0 if turned else beside),
        first,
        helper.make_node("Split", ["both"], list(names), axis=apart, num_outputs=len(names)),
    ]
    rest = [node for node in before if not gone.keys() & set(node.output)]
    values = {name for node in before for name in node.output}
    at = next((at for at, node in enumerate(rest) if gone.keys() & set(node.input)), len(rest))
    at = max(
        [at, *(place + 1 for place, node in enumerate(rest) if values & set(node.output) & {*matrices, first.input[0]})]
    )
    del nodes[:]
    nodes.extend([*rest[:at], *new, *rest[at:]])


def product_node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.output)


MERGEABLE = [
    name
    for name, build in TRICKY.items()
    if (products_of := build().products) and product_node(build().model, products_of[0]).op_type in JOINED_AT
]


@pytest.mark.parametrize("name", MERGEABLE)
def test_no_merge_passes_for_the_three(name: str) -> None:
    tricky = TRICKY[name]()
    assert tricky.products is not None
    instances = QKV.find(detached(tricky.model)).instances
    for merged in (tricky.products, tricky.products[:2], tricky.products[1:]):
        (why,) = QKV.find_lost(instances, detached(merge_products(tricky.model, merged))).values()
        assert why.startswith("no separate product with the matrix of")


@pytest.mark.parametrize("name", NESTED)
def test_no_merge_passes_inside_of_a_body(name: str) -> None:
    tricky = NESTED[name]()
    instances = QKV.find(detached(tricky.model)).instances
    merged = onnx.ModelProto.FromString(tricky.model.SerializeToString())
    if tricky.products is None:
        inner = [function.node for function in merged.functions] + [body.node for body in bodies_in(merged.graph)]
        (nodes,) = [nodes_of_body for nodes_of_body in inner if any("q0" in node.output for node in nodes_of_body)]
    else:
        nodes = merged.graph.node
    merge_product_nodes(nodes, ("q0", "k0"))
    assert list(QKV.find_lost(instances, detached(merged))) == ["attention 0"]


def bodies_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield body
                yield from bodies_in(body)


@pytest.mark.parametrize("name", NESTED)
def test_what_is_inside_is_kept(name: str, context: PassContext) -> None:
    """There is nothing to pin in a body: the checker stands guard alone."""
    kept = run(NESTED[name]().model, context, ["default", "onnxsim"], keep=["qkv"])
    assert [verdict.kept for verdict in kept.structures] == [True]


def made_by_products(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """What each product of the graph itself makes of one draw of the inputs."""
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    names = [node.output[0] for node in whole.graph.node if "MatMul" in node.op_type or node.op_type in PRODUCTS]
    own = {info.name for info in whole.graph.output}
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in own)
    draws, feeds = np.random.default_rng(0), {}
    for info in whole.graph.input:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        feeds[info.name] = np.asarray(draws.standard_normal(shape)).astype(dtype)
    outputs = ReferenceEvaluator(whole).run(names, feeds)
    return {name: np.asarray(value) for name, value in zip(names, outputs, strict=True)}


def stands(source: onnx.ModelProto, names: Sequence[str], result: PassRun) -> bool:
    """The truth: whether a product of its own still makes each of the values, by its numbers, in whatever order."""
    before = made_by_products(source)
    after = [np.sort(value, axis=None) for value in made_by_products(attach(result.model)).values()]
    matches = set()
    for name in names:
        wanted = np.sort(before[name], axis=None)
        matches |= {
            at for at, value in enumerate(after) if value.size == wanted.size and np.allclose(value, wanted, 1e-4, 1e-5)
        }
    return len(matches) == len(names)


@pytest.mark.parametrize("name", [name for name, build in TRICKY.items() if build().products])
def test_a_verdict_says_what_the_numbers_say(name: str, context: PassContext) -> None:
    tricky = TRICKY[name]()
    assert tricky.products is not None
    kept = run(tricky.model, context, ["onnxsim"], keep=["qkv"])
    assert [verdict.kept for verdict in kept.structures] == [True]
    assert stands(tricky.model, tricky.products, kept)
    freely = run(tricky.model, context, ["onnxsim"])
    assert [verdict.kept for verdict in freely.structures] == [stands(tricky.model, tricky.products, freely)]
