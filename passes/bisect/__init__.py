"""Find the pass that is at fault, and the smallest model on which it is. Nothing is kept, pinned or reverted here.

bisect.py      the whole of it: read this first
route.py       the states that a model goes through, a library's call at a time
faults.py      what is looked for: a structure that is lost, a step that breaks down
deviation.py   and numbers that leave a tolerance
search.py      where it shows first
inner.py       which passes inside of a step do it
smallest.py    the smallest model that shows it; near.py, where to begin
found.py       what was found, as data; text.py in words, data.py for JSON
"""

from __future__ import annotations

from passes.bisect.bisect import BUDGET_S, bisect
from passes.bisect.data import finding_as_data
from passes.bisect.deviation import Deviation
from passes.bisect.faults import Breakdown, Fault, Loss
from passes.bisect.found import Culprit, Finding, Smallest
from passes.bisect.text import finding_text

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
