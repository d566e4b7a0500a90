"""Whatever is emitted into onnxline.Builder: it is refused by a UsageError where it is emitted, or it runs.

Operators, operands, arguments and results are drawn, most of them wrong. What is accepted gives the values and the
forms of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.ir import DTYPE_BITS, Attr, BodyRef, InputRef, TensorSpec, TorchConst
from pipeline.ops.aten.memory import ANY_ORDER, CHANGED
from pipeline.ops.aten.typed import BY_OPERATOR
from pipeline.ops.aten.views import RULES
from pipeline.runtime import CheckedBuilder, compile_graph
from pipeline.runtime.eager import call_operator
from pipeline.runtime.operators import argument, find_operator, tensors_in
from pipeline.runtime.tensors import dtype_name, torch_dtype

ODD_KINDS = (
    "aten.relu_.default",
    "aten.add.out",
    "aten.nonzero.default",
    "aten.item.default",
    "higher_order.cond",
    "no",
)

KINDS: Final = sorted({*BY_OPERATOR, *RULES, *ANY_ORDER, *CHANGED, *ODD_KINDS})

DTYPES = st.one_of(st.sampled_from(("float32", "float32", "int64")), st.sampled_from([*DTYPE_BITS]))
SHAPES = st.lists(st.sampled_from((1, 2, 2, 3, 3, 4, 0)), max_size=4).map(tuple)
SPECS = st.builds(TensorSpec, SHAPES, DTYPES)

WORDS = (
    "none",
    "mean",
    "reflect",
    "trunc",
    "float32",
    "float8_e5m2",
    "add",
    "LSTM",
    "forward",
    "avg",
    "ij->ji",
    "bogus",
)
CONSTANTS = st.builds(
    TorchConst,
    st.sampled_from(("dtype", "memory_format", "device")),
    st.sampled_from(("int64", "channels_last", "cpu")),
)
NUMBERS = st.sampled_from((0, 1, -1, 2, -2, 3, 7, 2**40, 0.5, float("nan"), True, False))
PLAIN = st.one_of(NUMBERS, st.sampled_from(WORDS), st.none(), CONSTANTS, st.sampled_from((InputRef(0), BodyRef(0), "")))
ATTRS: st.SearchStrategy[Any] = st.one_of(PLAIN, st.lists(PLAIN, max_size=3).map(tuple), st.just([1]), st.just({}))

FITTING: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-2, 3),
    "List[int]": st.lists(st.integers(-1, 3), min_size=1, max_size=4).map(tuple),
    "bool": st.booleans(),
    "str": st.sampled_from(WORDS),
    "float": st.sampled_from((0.0, 0.5, 1.0, -1.0)),
    "number": st.sampled_from((0, 1, 2, 0.5, -1.0)),
    "ScalarType": st.sampled_from([TorchConst("dtype", name) for name in ("float32", "int64", "float16")]),
}
"""Type of an argument → attributes for it, which an operator may refuse all the same."""


@st.composite
def emissions(draw: st.DrawFn) -> tuple[str, list[TensorSpec], dict[str, Attr], int]:
    """A kind, the specs of its operands, its arguments, and how its results are changed (0: not at all)."""
    kind = draw(st.sampled_from(KINDS))
    first = draw(SPECS)
    like_first = st.one_of(st.just(first), st.just(first), SPECS)
    arguments = find_operator(kind)._schema.arguments if kind.count(".") == 2 else ()
    operands = [entry for entry in arguments if "Tensor" in str(entry.type)]
    count = draw(st.sampled_from((len(operands), len(operands), 1, 2, 3, 0)))
    ins = [first, *(draw(like_first) for _ in range(count - 1))][:count]
    attrs = {
        entry.name: draw(st.one_of(FITTING.get(core_of(entry), ATTRS), FITTING.get(core_of(entry), ATTRS), ATTRS))
        for entry in arguments
        if entry not in operands and (not entry.has_default_value() or draw(st.booleans()))
    }
    return kind, ins, attrs, draw(st.sampled_from((0, 0, 0, 1, 2, 3)))


def core_of(entry: Any) -> str:
    return (
        str(entry.real_type).removeprefix("Optional[").removesuffix("]" * str(entry.real_type).startswith("Optional["))
    )


def results_of_torch(kind: str, call: dict[str, Attr], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    given_arguments = {name: argument(item, tensors) for name, item in call.items()}
    return [*tensors_in(call_operator(kind, given_arguments))]


def declared_results(
    builder: CheckedBuilder, kind: str, ins: list[TensorSpec], attrs: dict[str, Attr]
) -> list[TensorSpec]:
    """What torch makes of zeros, or a guess where it refuses them."""
    try:
        call = builder.complete_arguments(kind, len(ins), attrs)
        made = results_of_torch(kind, call, [filled(spec, 0) for spec in ins])
        return [TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in made]
    except Exception:
        return ins[:1] or [TensorSpec((2,), "float32")]


def filled(spec: TensorSpec, number: int) -> torch.Tensor:
    return torch.full(spec.sizes, number, dtype=torch_dtype(spec.dtype))


CHANGES: Final[dict[int, Callable[[list[TensorSpec]], list[TensorSpec]]]] = {
    0: lambda specs: specs,
    1: lambda specs: [TensorSpec((*spec.shape, 1), spec.dtype) for spec in specs],
    2: lambda specs: [TensorSpec(spec.shape, "float64" if spec.dtype == "float32" else "float32") for spec in specs],
    3: lambda specs: specs[1:],
}


@pytest.mark.filterwarnings("ignore")
@seed(0)
@settings(max_examples=400, deadline=None, database=None)
@given(drawn=emissions())
def test_only_usage_errors_leave_and_what_is_accepted_runs(
    drawn: tuple[str, list[TensorSpec], dict[str, Attr], int],
) -> None:
    kind, ins, attrs, change = drawn
    builder = CheckedBuilder("drawn")
    vids = [builder.input(f"x{at}", spec) for at, spec in enumerate(ins)]
    outs = CHANGES[change](declared_results(builder, kind, ins, attrs))
    try:
        made = builder.emit(kind, vids, [(f"y{at}", spec) for at, spec in enumerate(outs)], attrs)
    except UsageError:
        return
    graph = builder.build(made)
    try:
        program = compile_graph(graph)
    except UsageError as refusal:
        assert "a plan has fixed sizes" in str(refusal)  # which a run op by op does not need
        return
    fed = [filled(spec, 1) for spec in ins]
    found = program.run({f"x{at}": tensor for at, tensor in enumerate(fed)})
    assert [
        TensorSpec(tuple(found[f"y{at}"].shape), dtype_name(found[f"y{at}"].dtype)) for at in range(len(outs))
    ] == outs
    assume(torch.Tag.nondeterministic_seeded not in find_operator(kind).tags)
    expected = results_of_torch(kind, dict(graph.ops[0].attrs), fed)
    for at, tensor in enumerate(expected):
        torch.testing.assert_close(found[f"y{at}"].double(), tensor.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
