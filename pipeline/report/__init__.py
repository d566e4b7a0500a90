"""`report.json`: the run as data."""

from __future__ import annotations

from pipeline.report.model import (
    REPORT_VERSION,
    SOURCE,
    BackendReport,
    ExportReport,
    Mark,
    OptimizeReport,
    Report,
    RuntimeReport,
)
from pipeline.report.write import report_json

__all__ = [
    "REPORT_VERSION",
    "SOURCE",
    "BackendReport",
    "ExportReport",
    "Mark",
    "OptimizeReport",
    "Report",
    "RuntimeReport",
    "report_json",
]
