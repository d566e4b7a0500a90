"""The nodes of an instance, for drawings."""

from __future__ import annotations

import pytest

from passes.structures.subgraph import subgraph_of
from passes.structures.view import GraphView
from tests.support.onnx_models import attention, detached
from tests.support.structure_models import drawn, found

NORM = """g (float[2, 4, 8] x) => (float[2, 4, 8] y) <int64[1] last = {-1}, float two = {2}, float eps = {1e-5}> {
    a = Relu (x) mean = ReduceMean (a, last) centred = Sub (a, mean) squares = Pow (centred, two)
    variance = ReduceMean (squares, last) more = Add (variance, eps) deviation = Sqrt (more)
    normal = Div (centred, deviation) y = Relu (normal)
}"""
INSTANCES = {
    "attention": (attention(), "scores scaled weights mixed"),
    "qkv": (attention(), "q k v qh kh vh qt kt vt scores scaled weights mixed merged flat"),
    "layernorm": (drawn(NORM), "mean centred squares variance more deviation normal"),
}


@pytest.mark.parametrize("kind", INSTANCES)
def test_the_nodes_of_an_instance(kind: str) -> None:
    model, names = INSTANCES[kind]
    (instance,) = found(kind, model)
    nodes = subgraph_of(instance, GraphView(detached(model)))
    assert " ".join(node.output[0] for node in nodes) == names
