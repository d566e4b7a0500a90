"""A report as no run has made it: small, and with whatever a test wants in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from passes.proof.numbers import Errors
from passes.run.result import PassRow, Status, StructureVerdict
from pipeline.report import (
    SOURCE,
    BackendReport,
    Box,
    BoxKind,
    Drawing,
    ExportReport,
    Mark,
    NodeRow,
    Pictures,
    Report,
    RuntimeReport,
    StructurePicture,
    Wire,
)
from pipeline.report.html import page_of, render

ERRORS = {"y": Errors(1.5e-6, 1e-5, 1.0, 120.0, 1e-4, 0.015)}


def row(name: str, status: Status = Status.RAN, before: int = 9, after: int = 9, **changes: object) -> PassRow:
    pass_row = PassRow(name, "onnxoptimizer", status, "", before, after, 0.1, before != after, ERRORS)
    return replace(pass_row, **changes)  # type: ignore[arg-type]


def report(*rows: PassRow, marks: tuple[Mark, ...] = (), **changes: object) -> Report:
    run_report = Report(
        name="made_up",
        exit_code=0,
        failure="",
        export=ExportReport("torch", 20, 9, 4096, ("x: float32[2, 8]",), ("y",), ("draw 0",), frozenset(), ERRORS),
        passes=rows,
        structures=(StructureVerdict("qkv", "layers.0", "layers.0", True, None),),
        sensitivity=None,
        runtime=RuntimeReport((BackendReport("onnxruntime", ERRORS, 0.01),)),
        versions={"onnx": "1.0"},
        cached=(),
        seconds={"export": 1.0, "passes": 2.0},
        files=(),
        marks=(Mark(SOURCE, "0" * 12, 4096, {"MatMul": 4, "Add": 5}), *marks),
    )
    return replace(run_report, **changes)  # type: ignore[arg-type]


def attention(layer: int, *, merged: bool = False) -> Drawing:
    """Q, K and V of one layer, or one product in their place."""
    source = Box(BoxKind.INPUT, f"norm_{layer}", "2×8", name=f"norm_{layer}")
    if merged:
        product = Box(BoxKind.NODE, "MatMul", "8×24", made_by="onnxsim", name="merged")
        split = Box(BoxKind.NODE, "Split", "→ 3 × 2×8", made_by="onnxsim", name="split")
        return Drawing((source, product, split), (Wire(0, 1, "2×8"), Wire(1, 2, "2×24")))
    products = [Box(BoxKind.NODE, "MatMul", "8×8", role, name=f"{role}_{layer}") for role in "QKV"]
    last = Box(BoxKind.NODE, "Attention", name=f"attention_{layer}")
    wires = [*(Wire(0, place, "2×8") for place in (1, 2, 3)), *(Wire(place, 4, "2×8") for place in (1, 2, 3))]
    return Drawing((source, *products, last), tuple(wires))


def pictures(layers: int = 1, nodes: int = 3, name: str = "node") -> Pictures:
    structures = [StructurePicture("qkv", f"layers.{at}", attention(at), attention(at)) for at in range(layers)]
    structures[0] = replace(structures[0], broken=attention(0, merged=True), broken_by="onnxsim")
    rows = [
        NodeRow(
            f"{name}_{at}",
            "MatMul",
            ("float 2×8",),
            f"model.layers.{at // 4}.{'attention' if at % 4 else 'mlp'}",
            "onnxsim" if at % 5 == 4 else "",
            (f"v{at}", f"w{at}"),
            (f"v{at + 1}",),
        )
        for at in range(nodes)
    ]
    return Pictures(
        tuple(structures), tuple(rows), {"v0": "float 2×8"} | {f"w{at}": "float 8×8" for at in range(nodes)}
    )


def html_of(run_report: Report, shown: Pictures, folder: Path) -> str:
    return render(page_of(run_report, shown, folder))
