"""`simplify_path`, onnxsim's way from file to file: native in onnxsim 0.8.1, and a Python function where a release has
one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from passes.guard.calls.base import LetThrough
from passes.guard.calls.models import opened, write
from passes.guard.calls.onnxsim import OnnxSimCall
from passes.model.weights import PROTOBUF_LIMIT, DetachedModel

__all__ = ["read_simplify_path"]

NATIVE: Final = (
    *("executor", "in_path", "out_path", "skip_optimizers", "constant_folding", "shape_inference"),
    *("tensor_size_threshold", "target_opset_version", "rewriter", "initializers_as_constants"),
    *("include_inline_functions", "mutable_initializer", "overwrite_input_shapes", "unused_output"),
    "extra_optimizers",
)
"""The arguments of the native function, which has no signature that Python can read."""

SAME: Final = (
    *("target_opset_version", "initializers_as_constants", "mutable_initializer", "overwrite_input_shapes"),
    *("unused_output", "extra_optimizers"),
)
"""Arguments that simplify has under the same name."""


def read_simplify_path(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSimCall:
    """Understand a call of `simplify_path(executor, in_path, out_path, …) -> bool`."""
    given = _bound(original, args, kwargs)
    source, target = given.get("in_path"), given.get("out_path")
    if not isinstance(source, str) or not isinstance(target, str):
        raise LetThrough("simplify_path takes two paths")
    options = {name: given[name] for name in SAME if given.get(name) is not None}
    skipped = given.get("skip_optimizers", given.get("skipped_optimizers"))
    options |= {"perform_optimization": False} if skipped is None else {"skipped_optimizers": list(skipped)}
    options["skip_constant_folding"] = not given.get("constant_folding", True)
    options["skip_shape_inference"] = not given.get("shape_inference", True)
    options["inline_functions"] = bool(given.get("include_inline_functions"))
    if given.get("tensor_size_threshold") is not None:
        options["tensor_size_threshold"] = f"{given['tensor_size_threshold']}B"

    def run(path: str, result: str, settings: Mapping[str, Any]) -> None:
        changed = {
            "in_path": path,
            "out_path": result,
            "skip_optimizers": None if skipped is None else settings["skipped_optimizers"],
            "constant_folding": not settings["skip_constant_folding"],
            "shape_inference": not settings["skip_shape_inference"],
        }
        original(**{name: value for name, value in {**given, **changed}.items() if name in given or name in changed})

    def returns(final: DetachedModel, proven: bool) -> bool:
        write(final, target, PROTOBUF_LIMIT)
        return True

    unsent = ("rewriter",) if given.get("rewriter") is not None else ()
    return OnnxSimCall(opened(source), source, options, run, returns, unsent=unsent)


def _bound(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise LetThrough(str(error)) from error
    except ValueError:  # native
        if len(args) > len(NATIVE):
            raise LetThrough("more arguments than simplify_path takes") from None
        return {**dict(zip(NATIVE, args, strict=False)), **kwargs}
