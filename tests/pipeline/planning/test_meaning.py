"""A plan that computes something else than its graph is refused: every tampering with what the graph fixes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InternalError, SourceError
from pipeline.ir.graph import Graph, KernelSpec, Role, TensorSpec
from pipeline.ir.json import digest_graph
from pipeline.lowering import KernelCall, lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order
from pipeline.ops import GraphBuilder, Kind, pack
from pipeline.planning import ExecutionPlan, check_against, check_plan, make_plan
from pipeline.planning.check import differences, violations
from pipeline.runtime.program import BoundProgram
from tests.support.planning_graphs import graphs
from tests.support.torch_programs import graph_of


class Decoder(torch.nn.Module):
    """States, an operator with many arguments, a branch, a value in another memory order."""

    cache: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(6, 4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, torch.cond(x.sum() > 0, lambda x: x.relu() + 1, lambda x: x - 1, (x,)))
        self.count.add_(1)
        return torch.nn.functional.pad(self.layer(self.cache).t(), (1, 0), value=0.5).sum(0, keepdim=True) * 2


@pytest.fixture(scope="module")
def decoder() -> Graph:
    return with_kernels(in_traced_order(graph_of(Decoder(), [torch.ones(1, 4), torch.tensor([0])])))


def plan_graph(graph: Graph) -> ExecutionPlan:
    plan = make_plan(graph, lower(graph))
    assert violations(plan) == differences(graph, plan) == []
    return plan


Mutate = Callable[[ExecutionPlan, random.Random], ExecutionPlan]


def of_call(change: Callable[[ExecutionPlan, KernelCall, random.Random], Mapping[str, Any]]) -> Mutate:
    def mutate(plan: ExecutionPlan, draw: random.Random) -> ExecutionPlan:
        at = draw.randrange(len(plan.calls))
        call = replace(plan.calls[at], **change(plan, plan.calls[at], draw))
        return replace(plan, calls=(*plan.calls[:at], call, *plan.calls[at + 1 :]))

    return mutate


def of_slot(change: Callable[[ExecutionPlan, Any, random.Random], Mapping[str, Any]]) -> Mutate:
    def mutate(plan: ExecutionPlan, draw: random.Random) -> ExecutionPlan:
        at = draw.randrange(len(plan.slots))
        slot = replace(plan.slots[at], **change(plan, plan.slots[at], draw))
        return replace(plan, slots=(*plan.slots[:at], slot, *plan.slots[at + 1 :]))

    return mutate


def of_body(mutate: Mutate) -> Mutate:
    def inside(plan: ExecutionPlan, draw: random.Random) -> ExecutionPlan:
        if not plan.bodies:
            return plan
        at, bodies = draw.choice([*plan.bodies.items()])
        number = draw.randrange(len(bodies))
        body = mutate(bodies[number], draw)
        return replace(plan, bodies={**plan.bodies, at: (*bodies[:number], body, *bodies[number + 1 :])})

    return inside


def other_vids(plan: ExecutionPlan, vids: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    changed = list(vids)
    match draw.choice(["replace", "swap", "drop", "repeat"]):
        case "swap":
            draw.shuffle(changed)
        case "drop" if changed:
            changed.pop(draw.randrange(len(changed)))
        case "repeat" if changed:
            changed.append(draw.choice(changed))
        case _ if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(-1, len(plan.slots) + 1)
    return tuple(changed)


def other_blob(_: ExecutionPlan, call: KernelCall, draw: random.Random) -> Mapping[str, Any]:
    blob = bytearray(call.attr_blob)
    if not blob or draw.random() < 0.2:
        return {"attr_blob": bytes(blob) + b"\0"}
    if draw.random() < 0.2:
        return {"attr_blob": bytes(blob[:-1])}
    blob[draw.randrange(len(blob))] ^= 1 << draw.randrange(8)
    return {"attr_blob": bytes(blob)}


def other_schema(_: ExecutionPlan, call: KernelCall, draw: random.Random) -> Mapping[str, Any]:
    name, fields = call.attr_schema.split("/", 1)
    swapped = {"axis=i": "axis=f", "alpha=f": "alpha=i", "self,": "other,"}
    for old, new in swapped.items():
        fields = fields.replace(old, new)
    return {"attr_schema": draw.choice([f"other/99:{fields[2:]}", f"{name}/9{fields[1:]}", f"{name}/{fields}"])}


def other_spec(_: ExecutionPlan, slot: Any, draw: random.Random) -> Mapping[str, Any]:
    spec = slot.spec
    match draw.choice(["shape", "dtype", "device"]):
        case "shape":
            return {"spec": replace(spec, shape=draw.choice([spec.shape[::-1], (*spec.shape, 1), spec.shape[1:]]))}
        case "dtype":
            return {"spec": replace(spec, dtype=draw.choice(["int32", "float32", "bool", "float64"]))}
    return {"spec": replace(spec, device="meta")}


def other_updates(plan: ExecutionPlan, draw: random.Random) -> ExecutionPlan:
    changed = {**plan.updates}
    match draw.choice(["drop", "add", "other", "swap"]):
        case "drop" if changed:
            changed.pop(draw.choice([*changed]))
        case "other" if changed:
            changed[draw.choice([*changed])] = draw.randrange(len(plan.slots))
        case "swap" if changed:
            changed = dict(zip(changed, [*changed.values()][::-1], strict=True))
        case _:
            changed[draw.randrange(len(plan.slots))] = draw.randrange(len(plan.slots))
    return replace(plan, updates=changed)


MUTATIONS: dict[str, Mutate] = {
    "kind": of_call(lambda _p, _c, draw: {"kind_id": draw.choice([*map(int, Kind), 99])}),
    "blob": of_call(other_blob),
    "schema": of_call(other_schema),
    "operands": of_call(lambda plan, call, draw: {"in_vids": other_vids(plan, call.in_vids, draw)}),
    "results": of_call(lambda plan, call, draw: {"out_vids": other_vids(plan, call.out_vids, draw)}),
    "constraints": of_call(
        lambda _p, _c, draw: {"constraints": draw.choice([{}, {"view": 0}, {"inplace": (7,)}, {"inplace": 0, "q": 1}])}
    ),
    "names": of_slot(lambda plan, _, draw: {"name": draw.choice([*[slot.name for slot in plan.slots], "new"])}),
    "specs": of_slot(other_spec),
    "roles": of_slot(lambda _p, _s, draw: {"role": draw.choice([*Role])}),
    "strides": of_slot(lambda _p, slot, draw: {"strides": draw.choice([None, (1,) * slot.spec.rank, (2, 1)])}),
    "vids": of_slot(lambda plan, _, draw: {"vid": draw.randrange(-1, len(plan.slots) + 1)}),
    "updates": other_updates,
    "inputs": lambda plan, draw: replace(plan, inputs=other_vids(plan, plan.inputs, draw)),
    "outputs": lambda plan, draw: replace(plan, outputs=other_vids(plan, plan.outputs, draw)),
    "order": lambda plan, draw: replace(plan, order=other_vids(plan, plan.order, draw)),
    "feed": lambda plan, draw: replace(
        plan, feed_signature=draw.choice([plan.feed_signature[1:], plan.feed_signature * 2])
    ),
    "digest": lambda plan, draw: replace(plan, graph_digest=draw.choice(["", "0" * 64])),
    "name": lambda plan, draw: replace(plan, graph_name=draw.choice(["", "other"])),
}
TAMPERINGS = {**MUTATIONS, **{f"{name} of a body": of_body(mutate) for name, mutate in MUTATIONS.items()}}


def is_refused(graph: Graph, plan: ExecutionPlan) -> bool:
    """Neither checker raises anything but its own error, whatever it is given."""
    for check in (lambda: check_plan(plan), lambda: check_against(graph, plan)):
        try:
            check()
        except InternalError:
            return True
    return False


@pytest.mark.parametrize("name", TAMPERINGS)
def test_no_tampering_runs_silently(decoder: Graph, name: str) -> None:
    plan = plan_graph(decoder)
    changed = [TAMPERINGS[name](plan, random.Random(seed)) for seed in range(60)]
    changed = [tampered for tampered in changed if tampered != plan]
    assert len(changed) > 20
    assert [tampered for tampered in changed if not is_refused(decoder, tampered)] == []


@given(graphs(), st.sampled_from([*MUTATIONS]), st.randoms(use_true_random=False))
def test_no_tampering_with_a_random_plan_runs_silently(graph: Graph, name: str, draw: random.Random) -> None:
    plan = plan_graph(graph)
    tampered = MUTATIONS[name](plan, draw)
    assert tampered == plan or is_refused(graph, tampered)


def test_a_plan_of_another_graph_is_refused(decoder: Graph) -> None:
    plan = plan_graph(decoder)
    renamed = replace(decoder, ops=tuple(replace(op, name=f"{op.name}x") for op in decoder.ops))
    assert plan.graph_digest == digest_graph(decoder) != digest_graph(renamed)
    with pytest.raises(InternalError, match=r"differs from graph .* in 1 place:\n  the digest of the graph is"):
        check_against(renamed, plan)


def test_the_message_names_call_and_field(decoder: Graph) -> None:
    plan = plan_graph(decoder)
    at, call = next((at, call) for at, call in enumerate(plan.calls) if len(call.in_vids) > 1)
    turned = replace(call, in_vids=call.in_vids[::-1])
    with pytest.raises(InternalError) as caught:
        check_against(decoder, replace(plan, calls=(*plan.calls[:at], turned, *plan.calls[at + 1 :])))
    assert f"call {at} has the operands {turned.in_vids}; expected {call.in_vids}" in str(caught.value)


def test_a_schema_of_no_kernel_is_refused() -> None:
    """A schema that has the field which the kernel reads, and is no schema of it; nor is such an op lowered."""
    builder = GraphBuilder("leaky")
    x = builder.input("x", TensorSpec((2,), "float32"))
    (y,) = builder.emit("aten.leaky_relu.default", [x], [("y", TensorSpec((2,), "float32"))], {"negative_slope": 0.5})
    graph = builder.build([y])
    plan = plan_graph(graph)
    strange = replace(plan, calls=(replace(plan.calls[0], attr_schema="other/99:negative_slope=n"),))
    message = (
        "LeakyRelu has the attr schema 'other/99:negative_slope=n'; expected 'leakyrelu/1:negative_slope=n,order=i[]'"
    )
    assert violations(strange) == [f"call 0: {message}"]
    kernel = KernelSpec(int(Kind["LeakyRelu"]), "other/99:negative_slope=n", plan.calls[0].attr_blob)
    with pytest.raises(InternalError, match=re.escape(message)):
        lower(replace(graph, ops=(replace(graph.ops[0], kernel=kernel),)))


def test_a_slice_of_step_0_is_refused_in_a_sentence() -> None:
    builder = GraphBuilder("cut")
    x = builder.input("x", TensorSpec((4,), "float32"))
    (v,) = builder.emit("aten.slice.Tensor", [x], [("v", TensorSpec((2,), "float32"))], {"step": 2})
    (y,) = builder.emit("aten.relu.default", [v], [("y", TensorSpec((2,), "float32"))])
    plan = plan_graph(builder.build([y]))
    blob = pack(plan.calls[0].attr_schema, {"starts": (0,), "ends": (4,), "axes": (0,), "steps": (0,)})
    strange = replace(plan, calls=(replace(plan.calls[0], attr_blob=blob), plan.calls[1]))
    assert violations(strange) == ["call 0 Slice: 'v' (vid 1, tmp) does not lie on the elements of 'x' (vid 0, input)"]


def test_a_weight_without_bytes_is_refused_when_it_is_bound(decoder: Graph) -> None:
    plan = plan_graph(decoder)
    lacking = replace(plan, feed_signature=plan.feed_signature[:-1])
    with pytest.raises(SourceError, match="weights without bytes: p_layer_bias; "):
        BoundProgram.bind(lacking, decoder)
