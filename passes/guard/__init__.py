"""The same policy inside code that may be read but not edited, which calls an optimizer somewhere deep down.

context.py      `with passes.guard(...)`: the face
settings.py     what was asked for
active.py       the guards in force, and what a door does with a call
doors.py        swap a function's code, so that every reference to it leads through the door
targets.py      what is intercepted
handling.py     a call, from its arguments to what it returns and to its record
calls/          what each optimizer's call means
enforce.py      one call under a policy
journal.py      records, from all processes
environment.py, startup/    child processes: how they are given the guard
children.py     child processes that run without it
"""

from __future__ import annotations

from passes.guard.children import adopt_orphans
from passes.guard.context import Guard, GuardLog, guard
from passes.guard.record import GuardedCall, Returned

__all__ = ["Guard", "GuardLog", "GuardedCall", "Returned", "adopt_orphans", "guard"]
