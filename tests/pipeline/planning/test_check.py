"""The checker against the planner: it passes every plan that the planner makes, and no plan that was tampered with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.errors import InternalError
from pipeline.ir.graph import Graph, Role, TensorSpec
from pipeline.ops import KINDS, GraphBuilder, Layout
from pipeline.planning import ExecutionPlan, check_plan
from pipeline.planning.check import violations
from pipeline.planning.check.meaning import VIEW_INDEX
from tests.support.planning_graphs import graphs, plan_graph


@given(graphs())
def test_every_plan_passes(graph: Graph) -> None:
    plan = plan_graph(graph)
    assert violations(plan) == []
    assert plan.arena_bytes >= plan.live_bytes


@given(graphs(), st.sampled_from([-64, 1, 64]))
def test_a_wrong_lower_bound_is_caught(graph: Graph, change: int) -> None:
    plan = plan_graph(graph)
    wrong = replace(plan, live_bytes=plan.live_bytes + change)
    assert violations(wrong) == [
        f"the plan says that {wrong.live_bytes} bytes are alive at once; its calls need {plan.live_bytes}"
    ]


@given(graphs(), st.data())
def test_a_shift_off_the_boundary_is_caught(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    assume(plan.offsets)
    vid = data.draw(st.sampled_from(sorted(plan.offsets)))
    shift = data.draw(st.integers(1, 63))
    assert violations(replace(plan, offsets={**plan.offsets, vid: plan.offsets[vid] + shift}))


@given(graphs(), st.data())
def test_a_shift_out_of_the_arena_is_caught(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    full = [vid for vid in plan.offsets if plan.slots[vid].spec.nbytes]
    assume(full)
    vid = data.draw(st.sampled_from(full))
    offset = data.draw(st.sampled_from([-64, plan.arena_bytes]))
    assert violations(replace(plan, offsets={**plan.offsets, vid: offset}))


@given(graphs(most_ops=12), st.data())
def test_a_shift_onto_an_operand_or_an_output_is_caught(graph: Graph, data: st.DataObject) -> None:
    """Two values that one call needs at once (its operands and results, or two graph outputs) on the same bytes."""
    plan = plan_graph(graph)
    together = [(*call.in_vids, *call.out_vids) for call in plan.calls] + [plan.outputs]
    own = [vid for vid in plan.offsets if plan.slots[vid].spec.nbytes]
    pairs = sorted({(a, b) for vids in together for a in vids for b in vids if a != b and a in own and b in own})
    assume(pairs)
    moved, onto = data.draw(st.sampled_from(pairs))
    assert violations(
        replace(
            plan,
            offsets={**plan.offsets, moved: plan.offsets[onto]},
            arena_bytes=plan.arena_bytes + plan.slots[moved].spec.nbytes,
        )
    )


@given(graphs(), st.data())
def test_a_dropped_offset_is_caught(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    assume(plan.offsets)
    gone = data.draw(st.sampled_from(sorted(plan.offsets)))
    assert violations(replace(plan, offsets={vid: at for vid, at in plan.offsets.items() if vid != gone}))


@given(graphs(), st.data())
def test_an_alias_that_no_kernel_allows_is_caught(graph: Graph, data: st.DataObject) -> None:
    """Of all operands that the planner did not choose, each is a wrong choice where the call declares nothing."""
    plan = plan_graph(graph)
    strict = [
        (call.out_vids[0], source)
        for call in plan.calls
        if not call.constraints and call.out_vids[0] in plan.offsets
        for source in call.in_vids
    ]
    assume(strict)
    out, source = data.draw(st.sampled_from(strict))
    offsets = {vid: at for vid, at in plan.offsets.items() if vid != out}
    assert violations(replace(plan, offsets=offsets, alias={**plan.alias, out: source}))


@given(graphs(least_ops=2), st.data())
def test_swapped_dependent_calls_are_caught(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    pairs = [at for at in range(len(plan.calls) - 1) if set(plan.calls[at].out_vids) & set(plan.calls[at + 1].in_vids)]
    assume(pairs)
    at = data.draw(st.sampled_from(pairs))
    calls = [*plan.calls]
    calls[at], calls[at + 1] = calls[at + 1], calls[at]
    assert violations(replace(plan, calls=tuple(calls)))


@given(graphs(least_ops=2), st.data())
def test_a_dropped_call_is_caught(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    at = data.draw(st.integers(0, len(plan.calls) - 1))
    calls, order = ((*items[:at], *items[at + 1 :]) for items in (plan.calls, plan.order))
    assert violations(replace(plan, calls=calls, order=order))


F32 = TensorSpec((16,), "float32")


def small() -> tuple[ExecutionPlan, dict[str, int]]:
    """x → a = Tanh → v = Identity(a) → b = Neg(a) → y = Sub(b, v); a, v share storage, b and y share storage."""
    builder = GraphBuilder("small")
    x = builder.input("x", F32)
    (a,) = builder.emit("aten.tanh.default", [x], [("a", F32)])
    (v,) = builder.emit("aten.clone.default", [a], [("v", F32)])
    (b,) = builder.emit("aten.neg.default", [a], [("b", F32)])
    (y,) = builder.emit("aten.sub.Tensor", [b, v], [("y", F32)])
    return plan_graph(builder.build([y])), {"x": x, "a": a, "v": v, "b": b, "y": y}


def without(plan: ExecutionPlan, *vids: int) -> dict[int, int]:
    return {vid: offset for vid, offset in plan.offsets.items() if vid not in vids}


def test_the_message_names_the_reader_the_value_and_the_culprit() -> None:
    plan, vid = small()
    bad = replace(plan, offsets=without(plan, vid["b"]), alias={**plan.alias, vid["b"]: vid["a"]})
    with pytest.raises(InternalError) as caught:
        check_plan(bad)
    assert "call 3 Sub reads 'v' (vid 2, tmp), which is overwritten by call 2" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, v: {"alias": {**p.alias, v["a"]: v["x"]}, "offsets": without(p, v["a"])}, "'x' .*not the plan's"),
        (lambda p, v: {"alias": {**p.alias, v["b"]: v["x"]}, "offsets": without(p, v["b"])}, "may not put 'b'"),
        (lambda p, v: {"alias": {**p.alias, v["a"]: v["v"]}, "offsets": without(p, v["a"])}, "run in a cycle"),
        (lambda p, v: {"offsets": {**p.offsets, v["x"]: 0}}, "'x' .*has 2 sources"),
        (lambda p, v: {"offsets": {**p.offsets, v["y"]: 0}}, "'y' .*has 2 sources"),
        (lambda p, v: {"alias": {v["y"]: v["b"]}}, "'v' .*has 0 sources"),
        (lambda p, v: {"arena_bytes": 64}, "outside 0..64"),
        (lambda p, v: {"outputs": (99,)}, "vid 99 has no slot"),
        (lambda p, v: {"outputs": (v["b"],)}, "the caller reads 'b' .*overwritten by call 3"),
        (lambda p, v: {"order": (0,)}, "1 op id for 4 calls"),
        (lambda p, v: {"feed_signature": ()}, "'x' is not in the feed signature"),
        (lambda p, v: {"calls": (p.calls[0], *p.calls)[: len(p.calls)]}, "'a' .*already has a value"),
        (lambda p, v: {"slots": tuple(reversed(p.slots))}, "slot 0 describes vid 4"),
    ],
)
def test_each_rule(change, message: str) -> None:
    plan, vid = small()
    assert violations(plan) == []
    with pytest.raises(InternalError, match=message):
        check_plan(replace(plan, **change(plan, vid)))


def test_outputs_that_share_storage_are_caught() -> None:
    builder = GraphBuilder("two")
    x = builder.input("x", F32)
    (a,) = builder.emit("aten.tanh.default", [x], [("a", F32)])
    (b,) = builder.emit("aten.clone.default", [a], [("b", F32)])
    plan = plan_graph(builder.build([a, b]))
    assert plan.alias == {}
    shared = replace(plan, alias={b: a}, offsets=without(plan, b))
    assert violations(shared) == ["outputs 'a' (vid 1, output) and 'b' (vid 2, output) share storage"]


def test_an_output_on_an_inputs_storage_is_caught() -> None:
    builder = GraphBuilder("through")
    x = builder.input("x", F32)
    (y,) = builder.emit("aten.clone.default", [x], [("y", F32)])
    plan = plan_graph(builder.build([y]))
    assert plan.slots[y].role is Role.OUTPUT
    through = replace(plan, alias={y: x}, offsets={})
    assert violations(through) == ["output 'y' (vid 1, output) shares the storage of 'x' (vid 0, input)"]


def test_a_broadcast_operand_may_not_be_written_over() -> None:
    builder = GraphBuilder("broadcast")
    x = builder.input("x", TensorSpec((2, 8), "float32"))
    row = TensorSpec((1, 8), "float32")
    (r,) = builder.emit("aten.sum.dim_IntList", [x], [("row", row)], {"dim": (0,), "keepdim": True})
    (y,) = builder.emit("aten.add.Tensor", [r, x], [("y", TensorSpec((2, 8), "float32"))])
    plan = plan_graph(builder.build([y]))
    bad = replace(plan, alias={y: r}, offsets=without(plan, y))
    assert "call 1 Add may not put 'y' (vid 2, output) on the storage of 'row' (vid 1, tmp)" in violations(bad)


def test_an_operand_that_is_given_twice_may_not_be_written_over() -> None:
    builder = GraphBuilder("square")
    x = builder.input("x", F32)
    (a,) = builder.emit("aten.tanh.default", [x], [("a", F32)])
    (y,) = builder.emit("aten.mul.Tensor", [a, a], [("y", F32)])
    plan = plan_graph(builder.build([y]))
    assert plan.alias == {}
    bad = replace(plan, alias={y: a}, offsets=without(plan, y))
    assert violations(bad) == ["call 1 Mul writes over its operand 'a' (vid 1, tmp) while it reads it"]


def test_a_view_of_another_size_is_no_view() -> None:
    plan, vid = small()
    wider = replace(plan.slots[vid["v"]], spec=TensorSpec((32,), "float32"))
    slots = tuple(wider if slot.vid == wider.vid else slot for slot in plan.slots)
    assert "call 1 Identity: 'v' (vid 2, tmp) does not lie on the elements of 'a' (vid 1, tmp)" in violations(
        replace(plan, slots=slots)
    )


@given(graphs(), st.data())
def test_a_layout_that_is_moved_turned_or_dropped_is_caught(graph: Graph, data: st.DataObject) -> None:
    plan = plan_graph(graph)
    vids = [vid for vid in plan.layouts if plan.slots[vid].spec.numel > 1]
    assume(vids)
    vid = data.draw(st.sampled_from(vids))
    layout = plan.layouts[vid]
    axis = data.draw(st.sampled_from([axis for axis, size in enumerate(layout.sizes) if size > 1]))
    strides = (*layout.strides[:axis], layout.strides[axis] + 1, *layout.strides[axis + 1 :])
    wrong = data.draw(st.sampled_from([replace(layout, offset=layout.offset + 1), replace(layout, strides=strides)]))
    assert violations(replace(plan, layouts={**plan.layouts, vid: wrong}))
    assert violations(replace(plan, layouts={other: plan.layouts[other] for other in plan.layouts if other != vid}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layout: replace(layout, offset=9), "lies on elements 9 to 17 of a storage of 16"),
        (lambda layout: replace(layout, offset=-1), "lies on elements -1 to 7"),
        (lambda layout: replace(layout, offset=7), "'q' .* does not lie on the elements of 'a'"),
        (lambda layout: replace(layout, sizes=(4,)), "the layout of 'q' .*expected sizes"),
        (lambda layout: replace(layout, strides=(-1,)), "the layout of 'q' .*one stride of 0 or more"),
    ],
)
def test_each_rule_of_layouts(change, message: str) -> None:
    builder = GraphBuilder("pieces")
    x, half = builder.input("x", F32), TensorSpec((8,), "float32")
    (a,) = builder.emit("aten.tanh.default", [x], [("a", F32)])
    p, q = builder.emit(
        "aten.split_with_sizes.default", [a], [("p", half), ("q", half)], {"split_sizes": (8, 8), "dim": 0}
    )
    plan = plan_graph(builder.build(builder.emit("aten.sub.Tensor", [p, q], [("y", half)])))
    assert violations(plan) == []
    with pytest.raises(InternalError, match=message):
        check_plan(replace(plan, layouts={q: change(plan.layouts[q])}))


def test_a_result_over_the_root_of_a_piece_that_is_read_later_is_caught() -> None:
    builder = GraphBuilder("pieces")
    x, half = builder.input("x", F32), TensorSpec((8,), "float32")
    (a,) = builder.emit("aten.tanh.default", [x], [("a", F32)])
    p, q = builder.emit(
        "aten.split_with_sizes.default", [a], [("p", half), ("q", half)], {"split_sizes": (8, 8), "dim": 0}
    )
    (b,) = builder.emit("aten.neg.default", [a], [("b", F32)])
    (r,) = builder.emit(
        "aten.sum.dim_IntList", [b], [("r", TensorSpec((1,), "float32"))], {"dim": (0,), "keepdim": True}
    )
    (s,) = builder.emit("aten.sub.Tensor", [p, r], [("s", half)])
    plan = plan_graph(builder.build(builder.emit("aten.sub.Tensor", [s, q], [("y", half)])))
    bad = replace(plan, offsets=without(plan, b), alias={**plan.alias, b: a})
    assert "call 4 Sub reads 'p' (vid 2, tmp), which is overwritten by call 2" in violations(bad)


def test_every_kind_that_may_be_a_view_has_its_definition() -> None:
    assert {row.kind for row in KINDS.values() if row.view is not None} == set(VIEW_INDEX)


def test_two_results_of_one_call_on_the_same_bytes_are_caught_even_if_one_is_never_read() -> None:
    builder = GraphBuilder("split")
    x = builder.input("x", F32)
    half = TensorSpec((8,), "float32")
    a, b = builder.emit(
        "aten.split_with_sizes.default", [x], [("a", half), ("b", half)], {"split_sizes": (8, 8), "dim": 0}
    )
    plan = plan_graph(builder.build([b]))
    assert violations(plan) == []
    assert violations(replace(plan, offsets={a: 0, b: 0})) == [
        "call 0 Split writes two outputs to the same bytes, 'a' (vid 1, tmp) is one"
    ]


def test_a_call_that_writes_an_input_is_caught() -> None:
    plan, vid = small()
    calls = (*plan.calls, replace(plan.calls[0], in_vids=(vid["y"],), out_vids=(vid["x"],)))
    problems = violations(replace(plan, calls=calls, order=(*plan.order, 4)))
    assert "call 4 Tanh writes 'x' (vid 0, input), which already has a value" in problems


def strided_plan(strides: tuple[int, ...]) -> ExecutionPlan:
    """y = Tanh(Transpose(x)) of an x with these strides in the trace."""
    builder = GraphBuilder("strided")
    x = builder.input("x", TensorSpec((2, 3), "float32"))
    turned = TensorSpec((3, 2), "float32")
    (t,) = builder.emit("aten.permute.default", [x], [("t", turned)], {"dims": (1, 0)})
    graph = builder.build(builder.emit("aten.tanh.default", [t], [("y", turned)]))
    first, *rest = graph.values
    return plan_graph(replace(graph, values=(replace(first, strides=strides), *rest)))


@pytest.mark.parametrize(
    ("traced", "laid", "turned"),
    [((1, 2), (1, 2), None), ((8, 2), (8, 2), (2, 8)), ((0, 1), None, (1, 3)), ((2, 1), None, (1, 3))],
    ids=["transposed", "with gaps", "expanded", "overlapping"],
)
def test_what_is_given_has_the_strides_of_the_trace(traced: tuple[int, ...], laid: object, turned: object) -> None:
    """Row after row where several elements lay on one place. Views of it follow."""
    plan = strided_plan(traced)
    assert violations(plan) == []
    assert ([plan.strides(0), plan.feed_signature[0].strides], plan.strides(1)) == ([laid, laid], turned)


@pytest.mark.parametrize(("traced", "wrong"), [((1, 2), (3, 1)), ((0, 1), (0, 1)), ((8, 2), (9, 2))])
def test_a_given_tensor_in_another_order_is_caught(traced: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    plan = strided_plan(traced)
    entry = replace(plan.feed_signature[0], strides=wrong)
    layouts = {0: Layout((2, 3), wrong), 1: Layout((3, 2), wrong[::-1])}
    bad = replace(plan, layouts=layouts, feed_signature=(entry,))
    assert [problem for problem in violations(bad) if f"input 'x' has strides {wrong}" in problem]
    fed_otherwise = replace(plan, feed_signature=(entry,))
    assert [problem for problem in violations(fed_otherwise) if "'x' is fed with strides" in problem]


def counting_plan(*, late: bool = False, shown: bool = False, updated: bool = True) -> ExecutionPlan:
    """new = Add(state, x); y = Neg(new), or of the old state (`late`), and perhaps the new value as an output."""
    builder = GraphBuilder("counted")
    x, state = builder.input("x", F32), builder.state("s", F32)
    (new,) = builder.emit("aten.add.Tensor", [state, x], [("new", F32)])
    outputs = builder.emit("aten.neg.default", [state if late else new], [("y", F32)])
    graph = builder.build([*outputs, *([new] if shown else [])])
    return plan_graph(replace(graph, updates={state: new} if updated else {}))


def test_a_state_is_written_in_place_only_if_nobody_sees_that() -> None:
    plan = counting_plan()
    state, new = 1, 2
    assert (violations(plan), plan.root(new)) == ([], state)
    for other, message in (
        (counting_plan(late=True), "call 1 Neg reads 's' (vid 1, state), which is overwritten by call 0"),
        (counting_plan(shown=True), "output 'new' (vid 2, output) shares the storage of 's' (vid 1, state)"),
        (counting_plan(updated=False), "call 0 Add writes over 's' (vid 1, state), which is not the plan's to change"),
    ):
        assert (violations(other), other.root(new)) == ([], new)
        assert message in violations(replace(other, alias={**other.alias, new: state}, offsets=without(other, new)))
