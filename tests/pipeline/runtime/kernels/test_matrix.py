"""The tree reads as a matrix: every kind has its row and its kernel in the file of the same family."""

from __future__ import annotations

import pytest

from pipeline.ops import Kind
from pipeline.ops.aten import CALL_KINDS
from pipeline.ops.tables import FAMILIES as ROW_FAMILIES
from pipeline.ops.tables import KINDS
from pipeline.planning.check.meaning import VIEW_INDEX
from pipeline.runtime.kernels import FAMILIES as KERNEL_FAMILIES
from pipeline.runtime.kernels import KERNELS
from tests.pipeline.runtime.kernels import test_elementwise as elementwise
from tests.pipeline.runtime.kernels import test_fused as fused
from tests.pipeline.runtime.kernels import test_linear_conv as linear_conv
from tests.pipeline.runtime.kernels import test_norm_reduce as norm_reduce
from tests.pipeline.runtime.kernels import test_recurrent as recurrent
from tests.pipeline.runtime.kernels import test_shape_index as shape_index
from tests.pipeline.runtime.kernels import test_vision as vision

NO_KERNEL: dict[str, str] = {}
"""kind → why this runtime has no kernel for it."""

NO_CASE: dict[str, str] = {
    **dict.fromkeys(
        (kind.name for kind in CALL_KINDS),
        "operators of torch become it; runtime/kernels/aten compares them with torch",
    ),
    "OnnxNode": "it holds any node; test_fallback.py compares some with ONNX's evaluator",
    **dict.fromkeys(
        ("SGD", "Adam", "NotFinite", "CountStep"),
        "tests/pipeline/training compares a hundred steps with torch's optimizers",
    ),
    "ReluProduct": "only train steps have it; native/test_near.py compares it with float64",
    "RowProgram": "ONNX has no such node; test_row_programs.py compares its forms with each other and with torch",
    **dict.fromkeys(fused.KINDS, "ONNX has no such node; test_fused.py compares it with the ops that it stands for"),
}
"""kind → why no case compares its kernel with a reference."""


def family(table: object) -> str:
    return getattr(table, "__name__", "").rpartition(".")[2]


def test_the_families_are_the_same() -> None:
    assert list(map(family, ROW_FAMILIES)) == list(map(family, KERNEL_FAMILIES))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_every_kind_has_a_kernel_in_its_family(kind: Kind) -> None:
    emitted = [family(table) for table in ROW_FAMILIES for row in table.KINDS if row.kind is kind]
    run = [family(table) for table in KERNEL_FAMILIES if kind in table.KERNELS]
    assert len(emitted) == 1
    assert run == ([] if kind.name in NO_KERNEL else emitted)


def test_every_kernel_has_a_case() -> None:
    modules = (elementwise, linear_conv, norm_reduce, recurrent, shape_index, vision)
    shown = {case.kind for module in modules for case in module.CASES} - {kind.name for kind in CALL_KINDS}
    assert {kind.name for kind in KERNELS} - shown == set(NO_CASE)


def test_every_in_place_fact_has_a_case() -> None:
    shown = {case.kind for module in (elementwise, norm_reduce, shape_index) for case in module.CASES}
    assert {name for name, row in KINDS.items() if row.inplace} - set(NO_CASE) <= shown


def test_every_view_rule_has_a_definition_for_the_checker() -> None:
    assert {row.kind for row in KINDS.values() if row.view is not None} == set(VIEW_INDEX)
