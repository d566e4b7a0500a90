"""Lifetimes, aliases and arena offsets: kernel calls → ExecutionPlan, and an independent plan checker."""

from __future__ import annotations

from pipeline.planning.check import check_plan
from pipeline.planning.json import to_json
from pipeline.planning.plan import ExecutionPlan, FeedEntry, FeedSignature, Slot, make_plan

__all__ = ["ExecutionPlan", "FeedEntry", "FeedSignature", "Slot", "check_plan", "make_plan", "to_json"]
