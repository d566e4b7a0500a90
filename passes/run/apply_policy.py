"""A policy applied to the steps of a recipe: are its names known, and what does each step leave out for it?"""

from __future__ import annotations

from collections.abc import Sequence

from passes.catalog import pass_names
from passes.errors import PolicyError
from passes.external import onnxoptimizer
from passes.policy.policy import Policy
from passes.recipe.steps import OWN_STEPS
from passes.step import Composite, Early, Step, Workbench

__all__ = ["check_names", "with_skips"]


def check_names(steps: Sequence[Step], policy: Policy, bench: Workbench) -> None:
    """Refuse every name and option that nothing here has, before a model is opened.

    A library is asked only for what onnxline does not know itself, since its import takes a second.

    Raises:
        PolicyError: an unknown pass, structure or option, with the nearest; or a value of the wrong type.
    """
    used = [step.name for step in steps]
    Policy(keep=policy.keep).check((), ())
    for step in steps:
        if isinstance(step, Composite):
            step.check(bench)
    try:
        policy.check((*onnxoptimizer.available(), *OWN_STEPS, *used), used)
    except PolicyError:
        policy.check(pass_names(steps, bench), used)


def with_skips(step: Step, policy: Policy, bench: Workbench) -> Step:
    """The step with the policy's skips told to it, if it runs other passes than its own.

    Raises:
        PolicyError: options that the installed release does not take.
    """
    if isinstance(step, Early):  # what is skipped, since it never ends say, is not tried in advance either
        return step.looking_past([name for name in step.ahead if policy.skips(name)])
    if not isinstance(step, Composite):
        return step
    step.check(bench)
    return step.without([name for name in step.inner(bench) if policy.skips(f"{step.name}/{name}")])
