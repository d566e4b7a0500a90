"""`onnxsim.simplify`, from a file or from memory; the `onnxsim` command calls it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external import onnxsim
from passes.external.onnxsim import STAGES, OnnxSim
from passes.guard.calls.arguments import bound, known_only, without_defaults
from passes.guard.calls.base import LetThrough, Plan, Skips
from passes.guard.calls.here import Here
from passes.guard.calls.models import copied, is_valid, opened, whole, write
from passes.guard.recorded import Recorded
from passes.model.weights import DetachedModel

__all__ = ["OnnxSimCall", "all_passes", "read_simplify"]

OBJECTS: Final = ("custom_rewriter", "function_rewrite_rules")
"""Options that a worker cannot be given."""

FILES: Final[Mapping[str, str]] = {
    "custom_lib": "",
    "profile": "onnxsim_profile.json",
    "ort_profile": "onnxsim_ort_profile",
}
"""Options that name files, with what an empty one stands for; the worker may have another working directory."""

UNITS: Final[Mapping[str, int]] = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
THRESHOLD: Final = 100 * 2**20
"""Bytes from which `output_path` gets external data, unless the caller says otherwise."""

Deliver = Callable[[DetachedModel, bool], Any]
Run = Callable[[str, str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class OnnxSimCall:
    """`options` are those of simplify that change what it does. `run(source, target, options)` does it here."""

    model: DetachedModel
    source: str
    options: Mapping[str, Any]
    run: Run
    returns: Deliver
    feeds: tuple[Mapping[str, np.ndarray], ...] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    unsent: tuple[str, ...] = ()
    """Options that keep the call in this process."""

    def plan(self, skips: Skips, bench: PassContext) -> Plan:
        if self.unsent:
            plan = self.plan_here(skips, bench)
            why = f"{', '.join(self.unsent)} cannot be sent to another process, so the call ran in this one"
            return Plan(plan.steps, plan.skipped, (*plan.notes, why))
        known = OnnxSim().inner(bench)
        if self.options.get("extra_optimizers"):
            _refuse_unknown(self.options["extra_optimizers"], bench.worker.ask(f"{__name__}:all_passes"))
        options, notes = known_only(self.options, "skipped_optimizers", known, "onnxsim")
        return _plan(OnnxSim(options), known, skips, notes)

    def plan_here(self, skips: Skips, bench: PassContext) -> Plan:
        known = (*onnxsim.facts()["passes"], *STAGES)
        if self.options.get("extra_optimizers"):
            _refuse_unknown(self.options["extra_optimizers"], all_passes())
        return _plan(self._here(known), known, skips, ())

    def unguarded(self, bench: PassContext) -> DetachedModel:
        quiet = {name: value for name, value in self.options.items() if "profile" not in name}
        step = self._here(()) if self.unsent else OnnxSim(quiet)
        return step.apply(self.model, bench)

    def deliver(self, model: DetachedModel, *, proven: bool) -> Any:
        return self.returns(model, proven)

    def _here(self, known: Sequence[str]) -> Here:
        def run(source: str, target: str, left_out: Sequence[str]) -> None:
            skipped = [*(self.options.get("skipped_optimizers") or ()), *(n for n in left_out if n not in STAGES)]
            stages = {STAGES[name]: True for name in left_out if name in STAGES}
            self.run(source, target, {**self.options, **stages, "skipped_optimizers": skipped})

        return Here("onnxsim", tuple(known), run, OnnxSim(self.options).narrows)


def read_simplify(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSimCall:
    """Understand a call of `onnxsim.simplify(model, …) -> (ModelProto, bool)`."""
    given = bound(original, args, kwargs)
    source = given.pop("model")
    options = without_defaults(original, given)
    target = options.pop("output_path", None)
    threshold = _bytes(options.pop("external_data_threshold", None))
    if isinstance(source, str):
        model = opened(source)
    elif isinstance(source, onnx.ModelProto) and target is None:
        model = copied(source, lambda: (source, True))
    else:
        raise LetThrough(f"simplify does not take a model of type {type(source).__name__} here")
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
            return whole(final), sound
        write(final, target, threshold)
        # Without a check of its own, simplify does not read the weights back from the file that it wrote.
        return (whole(final) if check_n else onnx.load(target, load_external_data=False)), sound

    unsent = tuple(name for name in OBJECTS if options.get(name))
    path = source if isinstance(source, str) else ""
    return OnnxSimCall(model, path, options, run, returns, feeds, _shapes(options, model), unsent)


def _plan(step: OnnxSim | Here, known: Sequence[str], skips: Skips, notes: tuple[str, ...]) -> Plan:
    skipped = {f"onnxsim/{name}": skip.reason for name in known if (skip := skips(f"onnxsim/{name}"))}
    left_out = [name.partition("/")[2] for name in skipped]
    return Plan((Recorded(step.without(left_out)),), skipped, notes)


def all_passes() -> list[str]:
    """In the worker: the passes that onnxsim runs, and those that it runs only where `extra_optimizers` names them."""
    known = onnxsim.facts()
    return [*known["passes"], *known["extra"]]


def _refuse_unknown(names: Sequence[str], known: Sequence[str]) -> None:
    """A mistake of the caller's is no pass that could be left out."""
    for name in names:
        if name not in known:
            raise StepFailed(f"extra_optimizers names {name!r}, which this onnxsim does not have")


def _feeds(options: dict[str, Any]) -> tuple[Mapping[str, np.ndarray], ...]:
    """Take `input_data` out: the proof runs on it, and with it goes the check that onnxsim would do on it."""
    data = options.pop("input_data", None)
    if not isinstance(data, Mapping) or not data:
        return ()
    options.pop("check_n", None)
    return ({name: np.asarray(value) for name, value in data.items()},)


def _shapes(options: Mapping[str, Any], model: DetachedModel) -> dict[str, Sequence[int]]:
    """The input shapes that the caller gave, those that are written into the model last."""
    stored = {tensor.name for tensor in model.proto.graph.initializer}
    inputs = [info.name for info in model.proto.graph.input if info.name not in stored]
    shapes: dict[str, Sequence[int]] = {}
    for option in ("test_input_shapes", "input_shapes", "overwrite_input_shapes"):
        given = options.get(option)
        if isinstance(given, Mapping):
            # No name means the model's only input.
            shapes |= {str(inputs[0] if name is None and inputs else name): shape for name, shape in given.items()}
    return shapes


def _without_outputs(model: DetachedModel, options: dict[str, Any]) -> DetachedModel:
    """Do what `unused_output` asks for beforehand: a step may not change the model's signature."""
    names = options.get("unused_output")
    outputs = [info.name for info in model.proto.graph.output]
    if not names or isinstance(names, str) or not set(names) < set(outputs):
        return model
    del options["unused_output"]
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    stays = [info for info in model.proto.graph.output if info.name not in names]
    del proto.graph.output[:]
    proto.graph.output.extend(stays)
    return model.with_proto(proto)


def _bytes(size: object) -> int:
    """`"500MB"` as a number."""
    text = str(size).strip().upper() if size else ""
    unit = next((unit for unit in ("KB", "MB", "GB", "TB", "B") if text.endswith(unit)), "")
    try:
        return int(float(text.removesuffix(unit)) * UNITS[unit]) if unit else THRESHOLD
    except ValueError as error:
        raise LetThrough(f"external_data_threshold is {size!r}") from error
