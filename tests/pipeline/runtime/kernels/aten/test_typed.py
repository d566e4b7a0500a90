"""Each operator of torch that has a kind of its own: its call as typed fields, and the bits of eager torch.

The operands are results of other calls, so a result may be written over one where the row of its kind allows that.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as f

from pipeline.ops import KINDS, Kind, unpack
from pipeline.ops.aten import DRAWING, TYPED
from pipeline.runtime import compile_graph
from tests.pipeline.runtime.kernels.aten.typed_calls import CASES, Function, X
from tests.support.host_reads import reads_host
from tests.support.torch_programs import Calls, graph_of, run_both

WITHOUT_A_CASE = {
    Kind["RoiAlign"]: "it reads the corners of regions, which torch.export refuses; test_vision.py compares it",
    Kind["Inverse"]: "its result lies in columns, so a view follows it; test_contrib_nodes.py compares it",
    **dict.fromkeys(DRAWING, "a plan draws other numbers than torch; test_elementwise.py looks at their distribution"),
}


def made_by_calls(function: Function) -> Function:
    return lambda *operands: function(*(operand.flip(0) for operand in operands))


@pytest.mark.parametrize("name", CASES)
def test_the_call_is_typed_and_gives_the_bits_of_eager_torch(name: str) -> None:
    function, operands, fields = CASES[name]
    graph = graph_of(Calls([made_by_calls(function)]), operands)
    plan = compile_graph(graph).plan
    call = plan.calls[-1]
    assert Kind(call.kind_id).name == name
    found = unpack(call.attr_schema, call.attr_blob)
    assert found.pop("order", ()) == ()
    assert " ".join(f"{key}={value!r}" for key, value in found.items()) == fields
    specs = [plan.slots[vid].spec for vid in call.in_vids]
    may_lie_on = [
        at for at in KINDS[name].inplace if at < len(specs) and specs[at] == plan.slots[call.out_vids[0]].spec
    ]
    assert (call.out_vids[0] in plan.alias) == bool(may_lie_on)
    planned, _, expected = run_both(Calls([made_by_calls(function)]), operands)
    assert [tensor.dtype for tensor in planned] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(one, other) for one, other in zip(planned, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_no_operator_without_an_obstacle_reads_the_host(name: str) -> None:
    function, operands, _ = CASES[name]
    assert not KINDS[name].obstacles
    assert not reads_host(function, *operands)


def test_every_kind_has_a_case() -> None:
    assert [*CASES] == [kind.name for kind in TYPED if kind not in WITHOUT_A_CASE]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 + 2j),
        lambda x: torch.clamp(x, max=x),
        lambda x: f.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: torch.ops.aten.batch_norm(x, None, None, x[0, :, 0] + 0, x[0, :, 1] + 1, False, 0.1, 1e-5, True),
    ],
    ids=["complex", "a tensor as bound", "random", "no weight"],
)
def test_a_call_that_no_signature_covers_is_named(function: Function) -> None:
    graph = graph_of(Calls([function]), [X])
    (op,) = [op for op in graph.ops if op.kind in compile_graph(graph).plan.generic_calls()]
    assert op.kind.startswith("aten.")


def test_a_result_in_another_order_says_so() -> None:
    """Attention writes token by token, so its result is stored with its axes permuted."""
    heads = X.reshape(1, 3, 2, 4).transpose(1, 2)
    plan = compile_graph(graph_of(Calls([lambda x: f.scaled_dot_product_attention(x, x, x)]), [heads])).plan
    (call,) = [call for call in plan.calls if call.kind_id == Kind["AtenScaledDotProductAttention"]]
    assert unpack(call.attr_schema, call.attr_blob)["order"] == (0, 2, 1, 3)


def test_a_conversion_is_a_cast() -> None:
    plan = compile_graph(graph_of(Calls([lambda x: x.to(torch.float16), lambda x: x.double()]), [X])).plan
    assert [Kind(call.kind_id).name for call in plan.calls] == ["Cast", "Cast"]
