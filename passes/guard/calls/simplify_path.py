"""The native functions of onnxsim: `simplify_path` from file to file, which is a Python function in some releases, and
`simplify` from bytes to bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnx

from passes.guard.calls.base import LetThrough
from passes.guard.calls.models import copied, opened, parsed, whole, write
from passes.guard.calls.onnxsim import OnnxSimCall
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel

__all__ = ["read_simplify_bytes", "read_simplify_path"]

NATIVE: Final = (
    *("skip_optimizers", "constant_folding", "shape_inference"),
    *("tensor_size_threshold", "target_opset_version", "rewriter", "initializers_as_constants"),
    *("include_inline_functions", "mutable_initializer", "overwrite_input_shapes", "unused_output"),
    "extra_optimizers",
)
"""The arguments of both native functions behind the model's, which have no signature that Python can read."""

SAME: Final = (
    *("target_opset_version", "initializers_as_constants", "mutable_initializer", "overwrite_input_shapes"),
    *("unused_output", "extra_optimizers"),
)
"""Arguments that simplify has under the same name."""


def read_simplify_path(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSimCall:
    """Understand a call of `simplify_path(executor, in_path, out_path, …) -> bool`."""
    given = _bound(original, ("executor", "in_path", "out_path", *NATIVE), args, kwargs)
    source, target = given.get("in_path"), given.get("out_path")
    if not isinstance(source, str) or not isinstance(target, str):
        raise LetThrough("simplify_path takes two paths")

    def run(path: str, result: str, settings: Mapping[str, Any]) -> None:
        original(**{**given, **_changed(given, settings), "in_path": path, "out_path": result})

    def returns(final: DetachedModel, proven: bool) -> bool:
        write(final, target, PROTOBUF_LIMIT)
        return True

    return OnnxSimCall(opened(source), source, _options(given), run, returns, unsent=_unsent(given))


def read_simplify_bytes(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSimCall:
    """Understand a call of the native `simplify(executor, model_bytes, …) -> bytes`."""
    given = _bound(original, ("executor", "model_bytes", *NATIVE), args, kwargs)
    data = given.get("model_bytes")
    if not isinstance(data, bytes):
        raise LetThrough("the native simplify takes the bytes of a model")

    def run(path: str, result: str, settings: Mapping[str, Any]) -> None:
        model = onnx.load(path).SerializeToString()
        made = original(**{**given, **_changed(given, settings), "model_bytes": model})
        Path(result).write_bytes(made)

    def returns(final: DetachedModel, proven: bool) -> bytes:
        return whole(final).SerializeToString()

    model = copied(parsed(data), lambda: data)
    return OnnxSimCall(model, "", _options(given), run, returns, unsent=_unsent(given))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `onnxsim.simplify` that do the same."""
    options = {name: given[name] for name in SAME if given.get(name) is not None}
    skipped = _skipped(given)
    options |= {"perform_optimization": False} if skipped is None else {"skipped_optimizers": list(skipped)}
    options["skip_constant_folding"] = not given.get("constant_folding", True)
    options["skip_shape_inference"] = not given.get("shape_inference", True)
    options["inline_functions"] = bool(given.get("include_inline_functions"))
    if given.get("tensor_size_threshold") is not None:
        options["tensor_size_threshold"] = f"{given['tensor_size_threshold']}B"
    return options


def _changed(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The native arguments for `settings`, which are options of `onnxsim.simplify`."""
    return {
        "skip_optimizers": None if _skipped(given) is None else settings["skipped_optimizers"],
        "constant_folding": not settings["skip_constant_folding"],
        "shape_inference": not settings["skip_shape_inference"],
    }


def _skipped(given: Mapping[str, Any]) -> Sequence[str] | None:
    return given.get("skip_optimizers", given.get("skipped_optimizers"))


def _unsent(given: Mapping[str, Any]) -> tuple[str, ...]:
    return ("rewriter",) if given.get("rewriter") is not None else ()


def _bound(
    original: Callable[..., Any], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        return dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise LetThrough(str(error)) from error
    except ValueError:  # native
        if len(args) > len(names):
            raise LetThrough("more arguments than the function takes") from None
        return {**dict(zip(names, args, strict=False)), **kwargs}
