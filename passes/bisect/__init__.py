"""Find the pass that is at fault, and the smallest model on which it is. Nothing is kept, pinned or reverted here.

bisect.py    the whole of it: read this first
replay.py    the states that a model goes through, a library's call at a time
faults.py    what is looked for: a lost structure, a step that breaks down, numbers that leave a tolerance
search.py    where it shows first, and which passes inside of a step do it
smallest.py  the smallest model that shows it
result.py    what was found: as data, in words, for JSON
"""

from __future__ import annotations

from passes.bisect.bisect import BUDGET_S, bisect
from passes.bisect.faults import Breakdown, Deviation, Fault, Loss
from passes.bisect.result import Culprit, Finding, Smallest, finding_as_data, finding_text

__all__ = [
    "BUDGET_S",
    "Breakdown",
    "Culprit",
    "Deviation",
    "Fault",
    "Finding",
    "Loss",
    "Smallest",
    "bisect",
    "finding_as_data",
    "finding_text",
]
