"""`onnxoptimizer.optimize`, and the native functions below it: each pass runs alone, so that each change has an
author."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from passes.context import PassContext
from passes.external.onnxoptimizer import available, call_optimize, default_set, passes_of
from passes.guard.calls.base import (
    CallPlan,
    InterceptedCall,
    PassThrough,
    Skips,
    Target,
    bind_arguments,
    open_model,
    parse_model,
    with_weights,
)
from passes.step import Repeat
from passes.weights.detached import DetachedModel

NATIVE: Final = "onnxoptimizer.onnx_opt_cpp2py_export"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptimizerCall(InterceptedCall):
    """Passes of onnxoptimizer, in order; with `fixed_point` again and again until nothing changes."""

    names: tuple[str, ...]
    fixed_point: bool
    returns: Callable[[DetachedModel], Any]

    def plan(self, skips: Skips, context: PassContext) -> CallPlan:
        skipped = {name: skip.reason for name in self.names if (skip := skips(name))}
        names = tuple(name for name in self.names if name not in skipped)
        steps = passes_of(names)
        return CallPlan((Repeat(steps),) if self.fixed_point else steps, skipped)

    def run_unguarded(self, context: PassContext) -> DetachedModel:
        result = context.worker.call(
            optimize, model=self.model.proto.SerializeToString(), names=list(self.names), fixed_point=self.fixed_point
        )
        return self.model.with_proto(onnx.load_from_string(result))

    def deliver(self, model: DetachedModel, *, proven: bool) -> Any:
        return self.returns(model)


def read_optimize(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxOptimizerCall:
    """Understand a call of `onnxoptimizer.optimize(model, passes=None, fixed_point=False) -> ModelProto`."""
    arguments = bind_arguments(original, args, kwargs)
    model, names = arguments["model"], arguments.get("passes")
    if not isinstance(model, onnx.ModelProto):
        raise PassThrough(f"optimize does not take a model of type {type(model).__name__}")
    if names is None:
        names = default_set()
    fixed_point = bool(arguments.get("fixed_point"))
    return OnnxOptimizerCall(
        model=open_model(model, lambda: model),
        names=_pass_names(names, lambda: model),
        fixed_point=fixed_point,
        returns=with_weights,
    )


def read_bytes(
    original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, fixed_point: bool
) -> OnnxOptimizerCall:
    """Understand a call of the native `optimize` or `optimize_fixedpoint(bytes, passes) -> bytes`."""
    if len(args) != 2 or kwargs or not isinstance(args[0], bytes):
        raise PassThrough("the native optimize takes the bytes of a model and a list of passes")
    content, names = args
    model = open_model(parse_model(content), lambda: content)
    return OnnxOptimizerCall(
        model=model,
        names=_pass_names(names, lambda: content),
        fixed_point=fixed_point,
        returns=lambda result: with_weights(result).SerializeToString(),
    )


def read_paths(
    original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, fixed_point: bool
) -> OnnxOptimizerCall:
    """Understand a call of the native `optimize_from_path` or `optimize_fixedpoint_from_path`, from file to file."""
    if len(args) != 4 or kwargs or not all(isinstance(arg, str) for arg in (args[0], args[1], args[3])):
        raise PassThrough(
            "the native optimize takes two paths, a list of passes and the name of a file for the weights"
        )
    source, target, names, data = args

    def write(result: DetachedModel) -> None:
        data_file = Path(target).parent / data
        data_file.unlink(missing_ok=True)  # onnx appends to an existing file
        onnx.save(with_weights(result), target, save_as_external_data=True, location=data, convert_attribute=True)

    names = _pass_names(names, None)
    return OnnxOptimizerCall(
        model=open_model(source), names=names, fixed_point=fixed_point, returns=write, source=source
    )


def _pass_names(names: object, instead: Callable[[], Any] | None) -> tuple[str, ...]:
    """The passes of a call.

    Raises:
        PassThrough: there is no such pass.
    """
    known = available()
    if not isinstance(names, list | tuple) or any(name not in known for name in names):
        raise PassThrough(f"not all of {names!r} are passes of this onnxoptimizer", instead)
    return tuple(names)


def optimize(model: bytes, names: list[str], fixed_point: bool) -> bytes:
    """In the worker: run several passes on a serialized model, as one call."""
    return call_optimize(onnx.load_from_string(model), names, fixed_point=fixed_point).SerializeToString()


TARGETS: Final = (
    Target("onnxoptimizer.optimize", "onnxoptimizer", "onnxoptimizer", "optimize", read_optimize),
    *(
        Target(f"{NATIVE}.{name}", "onnxoptimizer", NATIVE, name, partial(read, fixed_point=fixed), required=False)
        for name, read, fixed in (
            ("optimize", read_bytes, False),
            ("optimize_fixedpoint", read_bytes, True),
            ("optimize_from_path", read_paths, False),
            ("optimize_fixedpoint_from_path", read_paths, True),
        )
    ),
)
