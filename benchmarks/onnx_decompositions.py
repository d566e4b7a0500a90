"""The operators of torch, and of our own, that each ONNX operator becomes: docs/reference/onnx-decompositions.md.

    python -m benchmarks.onnx_decompositions        writes the page

Imports the models of ONNX's own operator cases, and lists the kinds of the ops that each operator was made into.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx.backend.test.case.test_case import TestCase as Case
from onnx.backend.test.loader import load_model_tests

from pipeline.errors import OnnxlineError
from pipeline.importers import from_onnx
from pipeline.importers.from_onnx.model import FAMILIES
from pipeline.ir import Op

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "onnx-decompositions.md"

INTEGERS = (np.dtype("int32"), np.dtype("int64"))

HEAD = """# ONNX operators as operators of torch

`python -m benchmarks.onnx_decompositions` writes this page from the tables of importers and ONNX's own operator cases.
The last column has the operators that a node became in some case; where it is empty, no case of ONNX leaves an op.
[Operators](operators.md) has the rows of these, and [ONNX operators](onnx-operators.md) says what happens to a node
that no importer takes.

| operator | family | opsets | becomes |
| --- | --- | --- | --- |
"""


def find_decompositions(cases: Iterable[Case]) -> Mapping[str, set[str]]:
    """{ONNX operator: kinds of the ops that its nodes became}; a case that is refused has no part in it."""
    found: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        for op in ops_of(case):
            found[op.operator].add(op.kind)
    return found


def ops_of(case: Case) -> Iterator[Op]:
    """The ops of the model of `case`, as it is, and with its integers as constants, which axes and sizes have to be."""
    if case.model is None or not case.data_sets:
        return
    inputs = zip(case.model.graph.input, case.data_sets[0][0], strict=False)
    integers = {value.name: array for value, array in inputs if getattr(array, "dtype", None) in INTEGERS}
    for values in ({}, integers) if integers else ({},):
        try:
            yield from from_onnx(case.model, values=values).ops
        except OnnxlineError:
            continue


def read_page() -> dict[str, set[str]]:
    """{ONNX operator: kinds} as the page has them."""
    rows = (line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `"))
    return {row[1].strip(" `"): set(filter(None, row[4].replace("`", "").replace(",", " ").split())) for row in rows}


def rows_of(found: Mapping[str, set[str]]) -> Iterator[str]:
    for family, importers in FAMILIES.items():
        for name in sorted(importers):
            kinds = ", ".join(f"`{kind}`" for kind in sorted(found.get(name.rpartition("::")[2], ())))
            yield f"| `{name}` | {family} | {', '.join(map(str, opsets_of(name)))} | {kinds} |"


def opsets_of(operator: str) -> list[int]:
    """The opsets in which ONNX has defined `operator` anew."""
    domain, _, name = operator.rpartition("::")
    schemas = onnx.defs.get_all_schemas_with_history()
    return sorted({schema.since_version for schema in schemas if (schema.name, schema.domain) == (name, domain)})


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, where the cases compute what they expect
        rows = rows_of(find_decompositions(load_model_tests(kind="node")))
    PAGE.write_text(HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
