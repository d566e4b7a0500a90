"""Embedding: rows of a table, chosen at run time."""

from __future__ import annotations

import pytest

from tests.support.structure_models import drawn, found, lost, names

LOOKUPS = {
    "by the input": "y = Gather (table, ids)",
    "by what is computed": "one = Constant <value_ints = [1]> () i = Add (ids, one) y = Gather <axis = 0> (table, i)",
    "a table after Identity": "t = Identity (table) y = Gather (t, ids)",
}
OTHERS = {
    "by a constant": "two = Constant <value_ints = [2, 0]> () r = Gather (table, two) y = Cast <to = 1> (r)",
    "of columns": "r = Gather <axis = 1> (table, ids) y = Relu (r)",
    "of a size": "s = Shape (ids) zero = Constant <value_int = 0> () n = Gather (s, zero) y = Cast <to = 1> (n)",
    "of what is computed": "c = Cast <to = 1> (ids) r = Gather (c, ids) y = Relu (r)",
    "in a table of numbers": "r = Gather (numbers, ids) y = Cast <to = 1> (r)",
}


def model(body: str):
    return drawn(f"g (int64[2, 3] ids) => (float[] y) <float[7, 4] table, int64[7, 4] numbers> {{ {body} }}")


@pytest.mark.parametrize("form", LOOKUPS)
def test_finds_lookups(form: str) -> None:
    instances = found("embedding", model(LOOKUPS[form]))
    assert names(instances) == ["y"]
    assert [weight.name for weight in instances[0].weights] == ["table"]


@pytest.mark.parametrize("form", OTHERS)
def test_finds_no_other_gather(form: str) -> None:
    assert found("embedding", model(OTHERS[form])) == ()


def test_a_table_in_another_type_is_a_loss() -> None:
    instances = found("embedding", model(LOOKUPS["by the input"]))
    half = model("t = Cast <to = 10> (table) h = Gather (t, ids) y = Cast <to = 1> (h)")
    assert list(lost("embedding", instances, half)) == ["embedding"]
