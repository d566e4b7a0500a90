"""ONNX's own tests of single operators, from the installed onnx."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from passes.audit.case import Case, value_of

__all__ = ["load", "names"]


def names() -> tuple[str, ...]:
    return tuple(sorted(_tests()))


def load(name: str) -> Case:
    test = _tests()[name]
    given, expected = test.data_sets[0]
    feeds = {info.name: value_of(value) for info, value in zip(test.model.graph.input, given, strict=False)}
    return Case(f"node/{name}", test.model, feeds, [value_of(value) for value in expected], test.rtol, test.atol)


@cache
def _tests() -> dict[str, Any]:
    """Name → test. To make them takes seconds, and some compute infinities on purpose."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return {test.name: test for test in collect_testcases(None)}  # type: ignore[arg-type]
