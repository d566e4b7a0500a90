"""Lifetimes, aliases and arena offsets: kernel calls → ExecutionPlan, and an independent plan checker."""

from __future__ import annotations

from pipeline.planning.check import check_against, check_plan
from pipeline.planning.files import PlanFile, StoredBytes, check_weights, decode_plans, encode_plans, from_json, to_json
from pipeline.planning.plan import (
    ExecutionPlan,
    FeedEntry,
    FeedSignature,
    MemoryMap,
    MemoryRegion,
    Move,
    Residence,
    Slot,
    make_plan,
    parse_regions,
    refuse_named_dims,
)
from pipeline.planning.regions import Occupant, alive_bytes, map_memory, occupants

__all__ = [
    "ExecutionPlan",
    "FeedEntry",
    "FeedSignature",
    "MemoryMap",
    "MemoryRegion",
    "Move",
    "Occupant",
    "PlanFile",
    "Residence",
    "Slot",
    "StoredBytes",
    "alive_bytes",
    "check_against",
    "check_plan",
    "check_weights",
    "decode_plans",
    "encode_plans",
    "from_json",
    "make_plan",
    "map_memory",
    "occupants",
    "parse_regions",
    "refuse_named_dims",
    "to_json",
]
