"""The run as data: `report.json`, and what `report.html` shows in addition."""

from __future__ import annotations

from pipeline.report.chain import ChainQuantization, ChainReport, ImageReport, ValuesReport
from pipeline.report.model import (
    DIFFS,
    REPORT_VERSION,
    SOURCE,
    BackendReport,
    Box,
    BoxKind,
    Drawing,
    ExportReport,
    Mark,
    NodeRow,
    PassesReport,
    Pictures,
    Report,
    RuntimeReport,
    StructurePicture,
    Wire,
    diff_folder,
    report_json,
)
