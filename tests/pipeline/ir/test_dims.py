"""Named dims: bound to numbers, solved from shapes, refused where the graph does not hold."""

from __future__ import annotations

import pytest

from pipeline.errors import SourceError, UsageError
from pipeline.ir import Graph, check, dims_of, fix_dims, from_text, to_text
from pipeline.ir.dims import evaluate, names_in

TEXT = """
graph "pairs" (%0 "x": float32[n, 3] strides [1, n], %1 "y": float32["2*n"]) {
  %2 "s": float32["((n//2)) + 1", 3] = aten.slice.Tensor(%0) {self: $0, end: size("n"), sizes: [1, size("n + 1")]}

  dim n: 2 .. 64
  guard "Eq(Mod(n, 2), 0)"
  guard "Ne(Mod(n, n - 2), 1)"
  return %2
}
"""


@pytest.fixture
def graph() -> Graph:
    return from_text(TEXT)


def test_every_name_becomes_a_number(graph: Graph) -> None:
    bound = fix_dims(graph, {"n": 4})
    check(bound)
    assert (
        to_text(bound)
        == """graph "pairs" (%0 "x": float32[4, 3] strides [1, 4], %1 "y": float32[8]) {
  %2 "s": float32[3, 3] = aten.slice.Tensor(%0) {self: $0, end: 4, sizes: [1, 5]}

  return %2
}
"""
    )


def test_every_violation_is_named(graph: Graph) -> None:
    with pytest.raises(UsageError) as error:
        fix_dims(graph, {"n": 65})
    assert "n = 65 is not in 2 .. 64" in str(error.value)
    assert "the trace relies on Eq(Mod(n, 2), 0)" in str(error.value)
    with pytest.raises(UsageError, match=r"relies on Ne\(Mod\(n, n - 2\), 1\)"):
        fix_dims(graph, {"n": 2})  # it cannot even be worked out there
    with pytest.raises(UsageError, match=r"no dim 'N'; did you mean 'n'\?\n  - the dim 'n' has no size"):
        fix_dims(graph, {"N": 4})


def test_dims_follow_from_shapes(graph: Graph) -> None:
    assert dims_of(graph, {"x": (6, 3), "y": (12,)}) == {"n": 6}
    assert dims_of(graph, {"y": (12,)}) == {"n": 6}
    with pytest.raises(UsageError, match=r"'y' is \[11\]; the graph has \['2\*n'\]"):
        dims_of(graph, {"x": (6, 3), "y": (11,)})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*n + m", 17),
        ("(n//2)", 3),
        ("Max(1, n) - Min(n, m)", 4),
        ("FloorDiv(n, 2) + CeilToInt(IntTrueDiv(n, 2))", 7),
        ("n**2", 49),
        ("FloatPow(ToFloat(n), 0.5)", 7**0.5),
        ("Eq(Mod(n, m), 1)", True),
        ("Ne(n, 7) | (n <= m)", False),
        ("And(n > m, Not(Eq(n, 0)))", True),
        ("-n", -7),
    ],
)
def test_expressions(expression: str, value: float) -> None:
    actual = evaluate(expression, {"n": 7, "m": 3})
    assert (actual, type(actual)) == (value, type(value))


def test_only_expressions() -> None:
    assert names_in("Max(1, n) + m") == {"n", "m"}
    for text in ("__import__('os')", "n.real", "n +", "[n]"):
        with pytest.raises(SourceError, match="is no expression of named dims"):
            evaluate(text, {"n": 1})
