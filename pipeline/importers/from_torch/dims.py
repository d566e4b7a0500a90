"""Named dims of the traced program: the sizes that it holds for, and what else it asked of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from pipeline.ir.expression import names_in
from pipeline.ir.graph import DimRange

__all__ = ["guards", "ranges"]

SYMBOL = re.compile(r"[A-Za-z_]\w*")
UNBOUNDED = 2**62
"""torch writes "no limit" as its own infinity, or as the largest integer that it can index with."""


def ranges(program: ExportedProgram, dims: Mapping[str, str]) -> dict[str, DimRange]:
    """{name: the sizes that the program was traced for}; `dims` renames symbols.

    Functionalizing leaves ranges of symbols that are nowhere in the program; those of the inputs are what counts.
    """
    found = {}
    known = {str(symbol) for size in _named_sizes(program) for symbol in size.node.expr.free_symbols}
    for symbol, span in program.range_constraints.items():
        name = str(symbol)
        if name in known:
            most = int(span.upper) if span.upper.is_finite and span.upper < UNBOUNDED else None
            found[dims.get(name, name)] = DimRange(int(span.lower), most)
    return found


def guards(program: ExportedProgram, dims: Mapping[str, str]) -> tuple[str, ...]:
    """Conditions on named dims that the trace relied on, beyond their ranges: `Eq(Mod(batch, 2), 0)`.

    Those of other symbols, which torch has for itself, no caller could break.
    """
    environment = _environment(program)
    if environment is None:
        return ()
    texts = [str(guard.expr.xreplace(environment.replacements)) for guard in environment.guards]
    renamed = [SYMBOL.sub(lambda found: dims.get(found[0], found[0]), text) for text in texts]
    known = ranges(program, dims).keys()
    return tuple(text for text in dict.fromkeys(renamed) if text != "True" and names_in(text) <= known)


def _environment(program: ExportedProgram) -> Any:
    """What torch knows of its symbols; None where every size is a number."""
    return next((size.node.shape_env for size in _named_sizes(program)), None)


def _named_sizes(program: ExportedProgram) -> Iterator[torch.SymInt]:
    """Sizes of the inputs that are no numbers."""
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                yield size
