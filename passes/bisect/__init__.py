"""Find the pass at fault, and the smallest model that shows the fault. Nothing is kept, pinned or reverted here.

bisect.py    `bisect`, which runs the steps below: read this first
faults.py    the faults to look for: a lost structure, a step that breaks down, an error over a tolerance
search.py    runs the recipe, finds the first step that shows the fault, the passes inside of a composite step, and the
             smallest model that shows the fault
result.py    the result: as data, as text, for JSON
"""

from __future__ import annotations

from passes.bisect.bisect import BUDGET_S, bisect
from passes.bisect.faults import Breakdown, Deviation, Fault, Loss
from passes.bisect.result import Bisection, Culprit, Smallest, bisection_as_data, bisection_text
from passes.context import open_context
from passes.recipe.recipe import steps_of
from passes.weights.detached import read_model

__all__ = [
    "BUDGET_S",
    "Bisection",
    "Breakdown",
    "Culprit",
    "Deviation",
    "Fault",
    "Loss",
    "Smallest",
    "bisect",
    "bisection_as_data",
    "bisection_text",
    "open_context",
    "read_model",
    "steps_of",
]
