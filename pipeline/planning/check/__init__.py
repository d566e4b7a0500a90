"""Check a plan: its tables, the place of each value, the elements of each view, and a walk with a shadow memory.

The checker shares no code with the planner (it reads the plan's tables, and uses neither the plan's methods nor the
layout rules). It always runs. `check_against` compares a plan with the graph that it was made of.
"""

from pipeline.planning.check.meaning import check_against, differences
from pipeline.planning.check.walk import check_plan, violations
