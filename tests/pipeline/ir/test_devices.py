"""A graph moves to another device by one pass."""

from __future__ import annotations

import torch

from pipeline.ir import to_text
from pipeline.ir.devices import devices_of, to_device
from pipeline.lowering import lower, with_kernels
from pipeline.planning import from_json, make_plan, to_json
from pipeline.planning.files import PlanFile, decode_plans, encode_plans
from tests.support.torch_programs import Calls, graph_of

X = torch.ones(3, 4)


def test_values_bodies_and_what_names_a_device_move() -> None:
    graph = graph_of(
        Calls(
            [lambda x: torch.cond(x.sum() > 0, lambda x: x.to("cpu", torch.float64), lambda x: x.double() - 1, (x,))]
        ),
        [X],
    )
    moved = to_device(graph, "cuda:0")
    assert devices_of(moved) == devices_of(*[body for op in moved.ops for body in op.bodies][:1]) == ("cuda:0",)
    assert "cpu" not in to_text(moved).replace('"cuda:0"', "")
    assert to_text(to_device(moved, "cpu")) == to_text(graph)
    assert to_device(moved, "cuda:0") is moved


def test_plan_files_name_the_device() -> None:
    graph = with_kernels(to_device(graph_of(Calls([lambda x: x.tanh() + x]), [X]), "cuda:1"))
    plan = make_plan(graph, lower(graph), 256)
    assert {slot.spec.device for slot in plan.slots} == {"cuda:1"}
    assert from_json(to_json(plan)) == plan
    assert decode_plans(encode_plans(PlanFile({"main": plan}, {}))).entries["main"] == plan
