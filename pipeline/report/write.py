"""Report → JSON. Numbers that JSON cannot hold are the words `Infinity`, `-Infinity` and `NaN`."""

from __future__ import annotations

from pydantic import TypeAdapter

from pipeline.report.model import Report

__all__ = ["report_json"]


def report_json(report: Report) -> str:
    return TypeAdapter(Report).dump_json(report, indent=1).decode() + "\n"
