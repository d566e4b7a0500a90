"""The page of operators, which the site makes from the rows of `pipeline.ops`."""

from __future__ import annotations

import re

import pytest

from pipeline.ops import Kind

site = pytest.importorskip("docs.site", reason="the site's own packages are not installed")

ROWS = {
    "an operator": "| 1827 | Add | `aten.add.Tensor` | `(T self, T\\|n other, n alpha=1)` | `aten.add.out` | "
    "self, other | fast path |  |",
    "a copied result": "| 1821 | LayerNorm | `aten.layer_norm.default` | `(T input, i[] normalized_shape, T? weight, "
    "T? bias, f eps=1e-05, - cudnn_enable=None)` | copied | input | C++, fast path |  |",
    "an obstacle": "| copied |  |  | on any device: it waits for the host: a value that a kernel computed decides what "
    "is launched next |",
    "a view": "| `aten.transpose.int` `aten.swapdims.default` | swap |",
    "a kind of a pass": "| 1501 | LinearPointwise | `trans=?,add=?,bias=?,activation=s,numbers=f[]` |  |  | "
    "packed weight, C++ |  |",
}


def test_every_kind_has_one_row() -> None:
    text = "\n".join(site.operator_lines())
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert sorted(numbers) == sorted(Kind)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_says_what_the_table_says(row: str) -> None:
    assert row in "\n".join(site.operator_lines())
