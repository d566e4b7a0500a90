"""The report of a run in parts: that of each part, and of the chain, as `report.json` and as a page."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.report import ChainReport, ImageReport, Report, report_json
from pipeline.report.html.parts import render_parts
from pipeline.workspace import Workspace


def write_parts_report(
    name: str,
    parts: Mapping[str, Report],
    cached: tuple[str, ...],
    seconds: Mapping[str, float],
    chain: tuple[ChainReport | ImageReport, ...],
    versions: Mapping[str, str],
    workspace: Workspace,
    failure: str = "",
    exit_code: int = 0,
) -> Report:
    """Write `report.json` and `report.html` with the results so far; `parts` are the reports that there are."""
    folder = workspace.folder
    present = {
        path.relative_to(folder).as_posix() for path in (*folder.iterdir(), *folder.glob("models/*")) if path.is_file()
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
    workspace.write_text("report.html", render_parts(report))
    return report
