"""Judges a plan by itself: its tables, where each value lies, what each view shows, and a walk with a shadow memory.

Shares no code with the planner (it reads the plan's tables, never the plan's methods nor the layout rules), and always
runs.
"""

from __future__ import annotations

from pipeline.planning.check.walk import check_plan, violations

__all__ = ["check_plan", "violations"]
