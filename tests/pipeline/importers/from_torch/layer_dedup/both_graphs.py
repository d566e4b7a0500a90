"""Trace a model whole, stamp it, and hold both against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.importers.from_torch.layer_dedup import DeduplicatedGraph, TracedWhole, deduplicate_layers
from pipeline.ir import Graph, check, to_text

Call = tuple[Sequence[Any], Mapping[str, Any]]


def trace_whole(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Graph:
    with torch.no_grad():
        program = torch.export.export(module, tuple(args), dict(kwargs or {}), strict=False)
    return from_torch(functionalize_program(program), "model")


def deduplicate(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> DeduplicatedGraph | TracedWhole:
    with torch.no_grad():
        return deduplicate_layers(module, args, kwargs or {}, trace_whole)


def expect_traced_graph(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, saved: int
) -> Graph:
    """The stamped graph, which is the traced one to the letter; `saved` layers had no trace."""
    outcome = deduplicate(module, args, kwargs)
    assert isinstance(outcome, DeduplicatedGraph), outcome.reason
    assert (sum(run.saved for run in outcome.runs), outcome.left) == (saved, ())
    whole = trace_whole(module, args, kwargs)
    assert to_text(outcome.graph) == to_text(whole)
    assert outcome.graph.payloads.keys() == whole.payloads.keys()
    for vid, payload in whole.payloads.items():
        np.testing.assert_array_equal(outcome.graph.payloads[vid].numpy(), payload.numpy())
    check(outcome.graph)
    return outcome.graph


def why_whole(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """Why it is traced whole."""
    outcome = deduplicate(module, args, kwargs)
    assert isinstance(outcome, TracedWhole), f"stamped, {outcome.runs}"
    return outcome.reason
