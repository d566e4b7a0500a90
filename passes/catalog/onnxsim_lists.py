"""In the worker: the passes of onnxsim that its default list does not have."""

from __future__ import annotations

import importlib
from functools import cache

from passes.external.onnxsim import facts

__all__ = ["extra_passes"]


@cache
def extra_passes() -> dict[str, list[str]]:
    """What onnxsim runs only where its option `extra_optimizers` names it; empty in a release without that option.

    This list, too, is complete only after the first call of `simplify`, which `facts` makes.
    """
    known = facts()
    if "extra_optimizers" not in known["options"]:
        return {"passes": []}
    native = importlib.import_module("onnxsim.onnxsim_cpp2py_export")
    listed = getattr(native, "_list_other_optimizers", list)()
    return {"passes": [name for name in listed if name not in known["passes"]]}
