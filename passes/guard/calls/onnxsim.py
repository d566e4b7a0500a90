"""`onnxsim.simplify`, from a file or from memory; the `onnxsim` command calls it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external import onnxsim
from passes.external.onnxsim import STAGES, OnnxSim
from passes.graph.index import delete_named, required_inputs
from passes.guard.calls.base import (
    CallPlan,
    InProcessStep,
    InterceptedCall,
    PassThrough,
    Skips,
    Target,
    bind_arguments,
    is_valid,
    known_only,
    open_model,
    plan_without,
    with_weights,
    without_defaults,
    write,
)
from passes.weights.detached import DetachedModel

OBJECTS: Final = ("custom_rewriter", "function_rewrite_rules")
"""Options that cannot be sent to a worker."""

FILES: Final[Mapping[str, str]] = {
    "custom_lib": "",
    "profile": "onnxsim_profile.json",
    "ort_profile": "onnxsim_ort_profile",
}
"""Option that names a file → its default. Paths are made absolute: the worker may have another working directory."""

UNITS: Final[Mapping[str, int]] = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
THRESHOLD: Final = 100 * 2**20
"""The fewest bytes at which `output_path` gets external data, unless the caller says otherwise."""

Deliver = Callable[[DetachedModel, bool], Any]
Run = Callable[[str, str, Mapping[str, Any]], None]


class AnnotatingOnnxSim(OnnxSim):
    """onnxsim, whose caller gets the shapes that it infers, also where no node changes."""

    __slots__ = ()
    annotates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSimCall(InterceptedCall):
    """`options` are those of simplify that affect the result. `run(source, target, options)` runs it here."""

    options: Mapping[str, Any]
    run: Run
    returns: Deliver
    unsent: tuple[str, ...] = ()
    """Options that keep the call in this process."""

    def plan(self, skips: Skips, context: PassContext) -> CallPlan:
        if self.unsent:
            plan = self.plan_here(skips, context)
            why = f"{', '.join(self.unsent)} cannot be sent to another process, so the call ran in this one"
            return CallPlan(plan.steps, plan.skipped, (*plan.notes, why))
        known = OnnxSim().inner(context)
        if self.options.get("extra_optimizers"):
            _refuse_unknown(self.options["extra_optimizers"], context.worker.ask(all_passes))
        options, notes = known_only(self.options, "skipped_optimizers", known, "onnxsim")
        return plan_without(AnnotatingOnnxSim(options), known, skips, notes)

    def plan_here(self, skips: Skips, context: PassContext) -> CallPlan:
        known = (*onnxsim.facts()["passes"], *STAGES)
        if self.options.get("extra_optimizers"):
            _refuse_unknown(self.options["extra_optimizers"], all_passes())
        return plan_without(self._here(known), known, skips, ())

    def run_unguarded(self, context: PassContext) -> DetachedModel:
        quiet = {name: value for name, value in self.options.items() if "profile" not in name}
        step = self._here(()) if self.unsent else OnnxSim(quiet)
        return step.apply(self.model, context).model

    def deliver(self, model: DetachedModel, *, proven: bool) -> Any:
        return self.returns(model, proven)

    def _here(self, known: Sequence[str]) -> InProcessStep:
        def run(source: str, target: str, left_out: Sequence[str]) -> None:
            self.run(source, target, OnnxSim(self.options, tuple(left_out)).build_arguments())

        return InProcessStep("onnxsim", tuple(known), run, OnnxSim(self.options).narrows)


def read_simplify(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSimCall:
    """Understand a call of `onnxsim.simplify(model, …) -> (ModelProto, bool)`."""
    arguments = bind_arguments(original, args, kwargs)
    source = arguments.pop("model")
    options = without_defaults(original, arguments)
    target = options.pop("output_path", None)
    threshold = _bytes(options.pop("external_data_threshold", None))
    if isinstance(source, str):
        model = open_model(source)
    elif isinstance(source, onnx.ModelProto) and target is None:
        model = open_model(source, lambda: (source, True))
    else:
        raise PassThrough(f"simplify does not take a model of type {type(source).__name__} here")
    feeds = _feeds(options)
    check_n = options.get("check_n", 0)
    model = _without_outputs(model, options)
    for name, default in FILES.items():
        if options.get(name) is not None:
            options[name] = str(Path(options[name] or default).absolute())

    def run(path: str, result: str, settings: Mapping[str, Any]) -> None:
        onnxsim.simplify(path, result, dict(settings))

    def returns(final: DetachedModel, proven: bool) -> tuple[onnx.ModelProto, bool]:
        sound = proven or is_valid(final)
        if target is None:
            return with_weights(final), sound
        write(final, target, threshold)
        # Without a check of its own, simplify does not read the weights back from the file that it wrote.
        return (with_weights(final) if check_n else onnx.load(target, load_external_data=False)), sound

    return OnnxSimCall(
        model=model,
        source=source if isinstance(source, str) else "",
        feeds=feeds,
        shapes=_shapes(options, model),
        options=options,
        run=run,
        returns=returns,
        unsent=tuple(name for name in OBJECTS if options.get(name)),
    )


def all_passes() -> list[str]:
    """In the worker: the passes that onnxsim always runs, and the passes that `extra_optimizers` may name."""
    known = onnxsim.facts()
    return [*known["passes"], *known["extra"]]


def _refuse_unknown(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that onnxsim lacks: it is a mistake of the caller, and not a pass to leave out."""
    for name in names:
        if name not in known:
            raise StepFailed(f"extra_optimizers names {name!r}, which this onnxsim does not have")


def _feeds(options: dict[str, Any]) -> tuple[Mapping[str, np.ndarray], ...]:
    """Take `input_data` and `check_n` out of the options: the proof on these inputs replaces onnxsim's check."""
    data = options.pop("input_data", None)
    if not isinstance(data, Mapping) or not data:
        return ()
    options.pop("check_n", None)
    return ({name: np.asarray(value) for name, value in data.items()},)


def _shapes(options: Mapping[str, Any], model: DetachedModel) -> dict[str, Sequence[int]]:
    """The input shapes that the caller gave; `overwrite_input_shapes` takes precedence."""
    inputs = [info.name for info in required_inputs(model.proto.graph)]
    shapes: dict[str, Sequence[int]] = {}
    for option in ("test_input_shapes", "input_shapes", "overwrite_input_shapes"):
        chosen = options.get(option)
        if isinstance(chosen, Mapping):
            # No name means the model's only input.
            shapes |= {str(inputs[0] if name is None and inputs else name): shape for name, shape in chosen.items()}
    return shapes


def _without_outputs(model: DetachedModel, options: dict[str, Any]) -> DetachedModel:
    """Remove the outputs that `unused_output` names beforehand: a step may not change the model's signature."""
    names = options.get("unused_output")
    outputs = [info.name for info in model.proto.graph.output]
    if not names or isinstance(names, str) or not set(names) < set(outputs):
        return model
    del options["unused_output"]
    proto = model.copy_proto()
    delete_named(proto.graph.output, names)
    return model.with_proto(proto)


def _bytes(size: object) -> int:
    """Parse `"500MB"` into bytes."""
    text = str(size).strip().upper() if size else ""
    unit = next((unit for unit in ("KB", "MB", "GB", "TB", "B") if text.endswith(unit)), "")
    try:
        return int(float(text.removesuffix(unit)) * UNITS[unit]) if unit else THRESHOLD
    except ValueError as error:
        raise PassThrough(f"external_data_threshold is {size!r}") from error


TARGETS: Final = (
    Target("onnxsim.simplify", "onnxsim", "onnxsim", "simplify", read_simplify),
    Target(
        "onnxsim.onnx_simplifier.simplify",
        "onnxsim",
        "onnxsim.onnx_simplifier",
        "simplify",
        read_simplify,
        required=False,
    ),
)
