"""plan.json: what is written is read back as the same plan, and nothing else is read."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.lowering import lower
from pipeline.ops import GraphBuilder
from pipeline.planning import from_json, make_plan, to_json
from tests.support.planning_graphs import graphs

STRANGE = (None, True, -1, 0, 2**80, 1.5, "", "aten.add.Tensor", [], [0], {}, {"a": 1})


def write(graph: Graph) -> Any:
    return json.loads(json.dumps(to_json(make_plan(graph, lower(graph))), allow_nan=False))


@given(graphs())
def test_round_trip(graph: Graph) -> None:
    plan = make_plan(graph, lower(graph))
    data = write(graph)
    assert from_json(data) == plan
    assert to_json(from_json(data)) == data


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree: what holds it, and its key there."""
    for key in range(len(data)) if isinstance(data, list) else [*data]:
        yield data, key
        if isinstance(data[key], list | dict):
            yield from places(data[key])


@given(graphs(most_ops=6), st.randoms(use_true_random=False))
def test_what_is_read_is_what_is_written(graph: Graph, draw: random.Random) -> None:
    """A tree with one place changed is refused in one sentence, or is another plan, written out just so."""
    data = write(graph)
    changed = copy.deepcopy(data)
    holder, key = draw.choice([*places(changed)])
    match draw.choice(["replace", "drop", "add"]):
        case "drop":
            del holder[key]
        case "add" if isinstance(holder, dict):
            holder["new"] = draw.choice(STRANGE)
        case _:
            holder[key] = draw.choice(STRANGE)
    try:
        plan = from_json(changed)
    except SourceError as error:
        assert str(error).startswith("plan JSON: ")
        return
    assert json.dumps(to_json(plan)) == json.dumps(changed)


@pytest.mark.parametrize("data", [None, 3, [], {}, {"format_version": True}, {"format_version": 1}, "plan"])
def test_other_versions_are_refused(data: Any) -> None:
    with pytest.raises(SourceError, match=r"plan JSON: found format_version .*, expected 3; make the plan again"):
        from_json(data)


def with_call(**change: Any) -> Any:
    """The plan of `y = Neg(x)` with something else in its call."""
    builder = GraphBuilder("small")
    x = builder.input("x", TensorSpec((2,), "float32"))
    data = write(builder.build(builder.emit("aten.neg.default", [x], [("y", TensorSpec((2,), "float32"))])))
    data["calls"][0] |= change
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "aten.sub.Tensor"}, "calls.0.kind is 'aten.sub.Tensor'; expected 'Neg'"),
        ({"kind_id": 99}, "call 0: no kernel has the kind_id 99"),
        ({"attr_schema": "neg/2:"}, "Neg has the attr schema 'neg/2:'; expected 'neg/1:order=i[]'"),
        ({"attr_blob": "00"}, "attr blob of 1 bytes does not fit 'neg/1:order=i[]'"),
        ({"in_vids": [7]}, "vid 7 has no slot"),
        ({"in_vids": [0.0]}, "calls[0].in_vids[0]: found 0.0, expected an integer"),
        ({"stream": 3}, "calls.0 has other keys than a plan: stream"),
        ({"attrs": {"alpha": 1.0}}, "calls.0.attrs has other keys than a plan: alpha"),
    ],
)
def test_strangers_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError) as caught:
        from_json(with_call(**change))
    assert message in str(caught.value)


def test_deep_nesting_is_refused() -> None:
    small = with_call()
    data = small
    for _ in range(5000):
        data = small | {"calls": [{**small["calls"][0], "bodies": [data]}]}
    with pytest.raises(SourceError, match="nested too deep"):
        from_json(data)
