"""Find the pass at fault, and the smallest model that shows the fault. Nothing is kept, pinned or reverted here.

bisect.py      `bisect`, which runs the steps below: read this first
faults.py      what a fault is, and a lost structure
run_faults.py  faults that a run shows: a step that breaks down, an error over a tolerance
search.py      runs the recipe, finds the first step that shows the fault, the passes inside of a composite step, and
               the smallest model that shows the fault
result.py      the result: as data, as text, for JSON
"""

from passes.bisect.bisect import BUDGET_S as BUDGET_S
from passes.bisect.bisect import bisect as bisect
from passes.bisect.faults import Fault as Fault
from passes.bisect.faults import Loss as Loss
from passes.bisect.result import Bisection as Bisection
from passes.bisect.result import Culprit as Culprit
from passes.bisect.result import Smallest as Smallest
from passes.bisect.result import bisection_as_data as bisection_as_data
from passes.bisect.result import bisection_text as bisection_text
from passes.bisect.run_faults import Breakdown as Breakdown
from passes.bisect.run_faults import Deviation as Deviation
from passes.context import open_context as open_context
from passes.doors import list_names
from passes.recipe.recipe import steps_of as steps_of
from passes.weights.detached import read_model as read_model

list_names(__name__)
