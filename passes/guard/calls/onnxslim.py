"""`onnxslim.slim`, from a file or from memory, and the functions of its core; the `onnxslim` command calls it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.external.installed import ask
from passes.external.onnxslim import OnnxSlim, facts
from passes.guard.calls.base import (
    CallPlan,
    InProcessStep,
    InterceptedCall,
    PassThrough,
    Skips,
    Target,
    bind_arguments,
    known_only,
    open_model,
    plan_without,
    with_weights,
)
from passes.weights.detached import DetachedModel

BEFORE: Final = ("inputs", "outputs", "input_shapes")
"""Options that change the model before it is optimized: the changed model is the reference."""

AFTER: Final = ("dtype", "save_as_external_data")
"""Options applied after optimization, which no policy concerns."""

OURS: Final = ("model_check", "model_check_inputs", "inspect", "dump_to_disk", "verbose")
"""Options that print, or check what the proof checks anyway."""


LISTS: Final = ("skip_fusion_patterns", "skip_optimizations")


class AnnotatingOnnxSlim(OnnxSlim):
    """onnxslim, whose caller gets the shapes that it infers, also where no node changes."""

    __slots__ = ()
    annotates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSlimCall(InterceptedCall):
    """`options` are those of slim that decide what is optimized; `slim` is the original function."""

    options: Mapping[str, Any]
    slim: Callable[..., Any]
    target: str | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    off: tuple[str, ...] = ()
    """The switches that are off in this process after the call, as they would be without a guard."""
    in_core: bool = False
    """Whether a function of the core was called, which only optimizes: no `AFTER` options apply."""

    def plan(self, skips: Skips, context: PassContext) -> CallPlan:
        own = _own_patterns()
        if own:
            plan = self.plan_here(skips, context)
            why = f"this process has fusion patterns of its own ({', '.join(own)}), so the call ran in it"
            return CallPlan(plan.steps, plan.skipped, (*plan.notes, why))
        known = ask(context, facts, "onnxslim")
        options, notes = known_only(self.options, "skip_fusion_patterns", known["patterns"], "onnxslim")
        options, more = known_only(options, "skip_optimizations", known["optimizations"], "onnxslim")
        step = AnnotatingOnnxSlim(options)
        return plan_without(step, step.inner(context), skips, (*notes, *more))

    def plan_here(self, skips: Skips, context: PassContext) -> CallPlan:
        names = (*_patterns(), *_optimizations())
        return plan_without(InProcessStep("onnxslim", names, self._run), names, skips, ())

    def run_unguarded(self, context: PassContext) -> DetachedModel:
        step = InProcessStep("onnxslim", (), self._run) if _own_patterns() else OnnxSlim(self.options)
        return step.apply(self.model, context).model

    def _run(self, source: str, target: str, left_out: Sequence[str]) -> None:
        options = dict(self.options)
        for key, among in (("skip_fusion_patterns", _patterns()), ("skip_optimizations", _optimizations())):
            options[key] = [*options.get(key, ()), *(name for name in left_out if name in among)]
        onnx.save(self.slim(source, **options), target)

    def deliver(self, model: DetachedModel, *, proven: bool) -> onnx.ModelProto | None:
        """Let the library itself apply the `AFTER` options, with every optimization off."""
        where = () if self.target is None else (self.target,)
        try:
            return (
                with_weights(model)
                if self.in_core
                else self.slim(with_weights(model), *where, **_nothing(), **self.last)
            )
        finally:
            _settings().reset(list(self.off))


def read_slim(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSlimCall:
    """Understand a call of `onnxslim.slim(model, output_model=None, **options) -> ModelProto | None`."""
    if not args and "model" not in kwargs:
        raise PassThrough("slim does not take these arguments")
    options = {name: value for name, value in kwargs.items() if value}
    source = args[0] if args else options.pop("model")
    target = args[1] if len(args) > 1 else options.pop("output_model", None)
    if isinstance(source, list):
        raise PassThrough("a list of models is printed, not optimized")
    before = {name: options.pop(name) for name in BEFORE if name in options}
    last = {name: options.pop(name) for name in AFTER if name in options}
    for name in OURS:
        options.pop(name, None)
    for name in LISTS:
        if isinstance(options.get(name), str):
            options[name] = [options[name]]
    if isinstance(source, str):
        model = open_model(source)
    elif isinstance(source, onnx.ModelProto):
        model = open_model(source, lambda: source)
    else:
        raise PassThrough(f"slim does not take a model of type {type(source).__name__}")
    if before:
        try:
            model = open_model(original(with_weights(model), **_nothing(), **before), lambda: source)
        except Exception as error:  # the library will raise it again
            raise PassThrough(str(error)) from error
    off = tuple(options.get("skip_optimizations", ()))
    return OnnxSlimCall(
        model=model,
        source=source if isinstance(source, str) else "",
        options=options,
        slim=original,
        target=target,
        last=last,
        off=off,
    )


def read_slim_core(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSlimCall:
    """Understand a call of `onnxslim.core.optimize(model, skip_fusion_patterns=None, size_threshold=None)`."""
    arguments = bind_arguments(original, args, kwargs)
    return _read_core(arguments.pop("model"), arguments, ())


def read_optimize_model(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSlimCall:
    """Understand a call of `onnxslim.core.optimization.optimize_model(model or graph, skip_fusion_patterns=None)`."""
    arguments = bind_arguments(original, args, kwargs)
    return _read_core(arguments.pop("model"), arguments, ("constant_folding",))


def read_graph(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxSlimCall:
    """A call of a function of onnxslim that changes a graph in memory.

    Raises:
        PassThrough: always, so that it is in the log.
    """
    raise PassThrough("it changes a graph of onnxslim's own in place, of which no policy can speak; call onnxslim.slim")


def _read_core(source: Any, arguments: dict[str, Any], without: Sequence[str]) -> OnnxSlimCall:
    """`without` are the optimizations that the function does not run."""
    surgeon = importlib.import_module("onnxslim.third_party.onnx_graphsurgeon")
    model = surgeon.export_onnx(source) if isinstance(source, surgeon.Graph) else source
    if not isinstance(model, onnx.ModelProto):
        raise PassThrough(f"it does not take a model of type {type(model).__name__}")
    off = tuple(name for name, is_on in _settings().stats().items() if not is_on)
    options = {
        **{name: value for name, value in arguments.items() if value is not None},
        "skip_optimizations": [*off, *without],
        "no_shape_infer": True,
    }
    slim = importlib.import_module("onnxslim").slim
    detached = open_model(model, lambda: model)
    return OnnxSlimCall(model=detached, options=options, slim=slim, off=off, in_core=True)


def _nothing() -> dict[str, Any]:
    """Options that turn every optimization of slim off."""
    return {"skip_optimizations": list(_optimizations()), "no_shape_infer": True}


def _optimizations() -> tuple[str, ...]:
    return tuple(_settings().keys())


def _settings() -> Any:
    """The switches of this process: slim sets them at each call, and the functions of the core read them."""
    return importlib.import_module("onnxslim.core.optimization").OptimizationSettings


def _patterns() -> Mapping[str, Any]:
    """The fusion patterns of this process: name → one or several."""
    return importlib.import_module("onnxslim.core.pattern.registry").DEFAULT_FUSION_PATTERNS


def _own_patterns() -> list[str]:
    """The names of fusion patterns that the script has registered."""
    patterns = {name: known if isinstance(known, list) else [known] for name, known in _patterns().items()}
    return [
        name
        for name, named_patterns in patterns.items()
        if any(not type(pattern).__module__.startswith("onnxslim.") for pattern in named_patterns)
    ]


CORE: Final = "onnxslim.core.optimization"

TARGETS: Final = (
    Target("onnxslim.slim", "onnxslim", "onnxslim", "slim", read_slim),
    Target("onnxslim.core.optimize", "onnxslim", "onnxslim.core", "optimize", read_slim_core, required=False),
    Target(f"{CORE}.optimize_model", "onnxslim", CORE, "optimize_model", read_optimize_model, required=False),
    *(
        Target(f"{CORE}.{name}", "onnxslim", CORE, name, read_graph, required=False)
        for name in ("graph_fusion", "dead_node_elimination", "subexpression_elimination", "tie_weights")
    ),
)
