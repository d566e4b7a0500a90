"""The report of a run in parts: that of each part, and of the chain, as `report.json` and as a page.

The page shows the chain of the quantized parts, too, for as long as their models stay the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Final

from pipeline.report import ChainQuantization, ChainReport, ImageReport, Report, ValuesReport, report_json
from pipeline.report.html.parts import render_parts
from pipeline.stages.report import ENCODINGS, QUANTIZATION, QUANTIZATION_REPORT, key_of_models
from pipeline.workspace import Workspace


def write_parts_report(
    name: str,
    parts: Mapping[str, Report],
    cached: tuple[str, ...],
    seconds: Mapping[str, float],
    chain: tuple[ChainReport | ImageReport | ValuesReport, ...],
    versions: Mapping[str, str],
    workspace: Workspace,
    failure: str = "",
    exit_code: int = 0,
) -> Report:
    """Write `report.json` and `report.html` with the results so far; `parts` are the reports that there are."""
    folder = workspace.folder
    present = {
        path.relative_to(folder).as_posix()
        for path in (*folder.iterdir(), *folder.glob("models/*"), *folder.glob("models/*/model.onnx*"))
        if path.is_file()
    }
    report = Report(
        name=name,
        exit_code=exit_code,
        failure=failure,
        export=None,
        passes=tuple(row for part in parts.values() for row in part.passes),
        structures=tuple(verdict for part in parts.values() for verdict in part.structures),
        sensitivity=None,
        runtime=None,
        versions=versions,
        cached=cached,
        seconds=seconds,
        files=tuple(sorted(present | {"report.json", "report.html", "log.txt"})),
        notes=tuple(dict.fromkeys(note for part in parts.values() for note in part.notes)),
        parts=parts,
        chain=chain,
    )
    workspace.write_text("report.json", report_json(report))
    _write_page(report, workspace)
    return report


def save_chain(found: ChainQuantization, report: Report, workspace: Workspace) -> None:
    """Save what the page shows of the quantized parts of a run, and write the page with it."""
    workspace.save(QUANTIZATION, key_of_models(report), found)
    _write_page(report, workspace)


def _write_page(report: Report, workspace: Workspace) -> None:
    chain = workspace.load(QUANTIZATION, key_of_models(report), ChainQuantization)
    workspace.write_text("report.html", render_parts(report, chain))


def remove_quantized(workspace: Workspace) -> None:
    """Remove what a simulation has written for all parts together, so that it is never next to other models."""
    workspace.forget(QUANTIZATION)
    shutil.rmtree(workspace.folder / QUANTIZED, ignore_errors=True)
    for name in (ENCODINGS, QUANTIZATION_REPORT):
        (workspace.folder / name).unlink(missing_ok=True)


QUANTIZED: Final = "quantized"
"""The folder of the quantized parts, with what an application reads next to them."""
