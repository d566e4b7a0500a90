"""What each optimizer's call means: its model, the steps that do the same under a policy, and what it returns."""

from __future__ import annotations

from typing import Final

from passes.guard.calls import onnxoptimizer, onnxsim, onnxslim
from passes.guard.calls.base import CallPlan, InterceptedCall, PassThrough, Skips, Target

TARGETS: Final = (*onnxsim.TARGETS, *onnxoptimizer.TARGETS, *onnxslim.TARGETS)
"""The intercepted functions. Commands of a library call its functions. A function with two names is intercepted once,
under the first."""
