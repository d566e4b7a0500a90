"""A diff as plain data, for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from passes.diff.found import Diff
from passes.diff.layers import LayerErrors
from passes.diff.numbers import Numbers
from passes.diff.text import summary
from passes.proof.numbers import Errors

__all__ = ["diff_as_data", "layers_as_data", "numbers_as_data"]


def diff_as_data(diff: Diff) -> dict[str, Any]:
    """The fields of `Diff`, with `different` and the one line `summary`."""
    return {"different": not diff.is_empty, "summary": summary(diff), **dataclasses.asdict(diff)}


def numbers_as_data(numbers: Numbers | None, why: str = "") -> dict[str, Any]:
    """`outputs` by name and `values` in order; `why_no_numbers` says why there are none."""
    if numbers is None:
        return {"why_no_numbers": why}
    values = [{"before": one.before, "after": one.after, "errors": _errors(one.errors)} for one in numbers.values]
    outputs = {name: _errors(one) for name, one in numbers.outputs.items()}
    return {"outputs": outputs, "values": values, "draws": numbers.draws, "not_run": numbers.not_run}


def layers_as_data(layers: Sequence[LayerErrors]) -> list[dict[str, Any]]:
    """The fields of `LayerErrors`, in order."""
    return [{**dataclasses.asdict(one), "errors": _errors(one.errors)} for one in layers]


def _errors(errors: Errors) -> dict[str, Any]:
    """JSON has no infinity and no NaN; the words stand for them."""
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value).replace("inf", "Infinity")
        for name, value in dataclasses.asdict(errors).items()
    }
