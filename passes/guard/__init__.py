"""The same policy inside code that may be read but not edited, which calls an optimizer somewhere deep down.

context.py      `with passes.guard(...)`: the face, and the last lines of a guard
settings.py     what was asked for, and the environment that gives it to child processes
registry.py     the guards in force, and what an intercepted function does with a call
patching.py     swap a function's code, so that every reference to it leads to us
calls/          what is intercepted, and what each optimizer's call means
handle_call.py  a call, from its arguments to what it returns and to its record
enforce.py      one call under a policy; proof.py says how its result is proven
call_log.py     records, from all processes
startup/        how child processes begin with the guard
children.py     child processes that run without it
"""

from __future__ import annotations

from passes.guard.call_log import GuardedCall, Returned
from passes.guard.children import adopt_orphans
from passes.guard.context import Guard, GuardLog, guard

__all__ = ["Guard", "GuardLog", "GuardedCall", "Returned", "adopt_orphans", "guard"]
