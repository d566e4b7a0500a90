"""`report.json`: the run as data."""

from __future__ import annotations

from pipeline.report.model import REPORT_VERSION, BackendReport, ExportReport, OptimizeReport, Report, RuntimeReport
from pipeline.report.write import report_json

__all__ = [
    "REPORT_VERSION",
    "BackendReport",
    "ExportReport",
    "OptimizeReport",
    "Report",
    "RuntimeReport",
    "report_json",
]
