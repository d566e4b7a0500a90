"""Enforce a policy on calls of optimizers inside code that cannot be edited.

context.py      `with passes.guard(...)`: the public function, and the summary of a guard
settings.py     the settings of a guard, and the environment that hands them to child processes
registry.py     the active guards, and what an intercepted function does with a call, to its result and its record
patching.py     swap a function's code, so that every reference to it calls the guard
calls/          the intercepted functions, and what each optimizer's call means
enforce.py      one call under a policy, and how its result is proven
call_log.py     records, from all processes
startup/        how child processes start with the guard; escapes.py names those that start without it
"""

from passes.guard.call_log import GuardedCall, Returned
from passes.guard.context import Guard, GuardLog, guard
