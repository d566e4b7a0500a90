"""onnxslim, an extra: one composite step, whose inner passes are its fusion patterns and its optimizations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.installed import (
    ask,
    read_table,
    refuse_failing,
    refuse_unknown,
    refuse_wrong_shapes,
    refuse_wrong_values,
    require,
    texts,
    trivial_model,
)
from passes.external.through_files import give_back_inputs, through_files, write
from passes.step import CompositeStep, PassResult
from passes.weights.detached import DetachedModel

TABLE: Final = read_table("onnxslim")

SHAPES: Final = "shape_inference"
"""The work of slim that is not among its listed optimizations; `no_shape_infer` leaves it out."""

ALL_PATTERNS: Final = "graph_fusion"
"""The optimization that applies the fusion patterns. Each pattern is an inner pass, so this one is not."""

OWN_OPTIONS: Final = frozenset({"inspect", "dump_to_disk", "save_as_external_data", "verbose"})
"""Options that print, or that write files of their own."""

REFUSED: Final[Mapping[str, str]] = {
    "dtype": (
        "is refused: it gives the model's inputs and outputs another type, so the proof would compare other numbers; "
        "call onnxslim.slim(model, dtype='fp16') on the result of the run (onnxslim ignores 'float16' in silence)"
    ),
    "inputs": "is refused: it changes the types of the model's inputs, which a step has to leave",
    "outputs": "is refused: it makes other outputs of the model, which a step has to leave",
}
"""Options that change what the caller of the model relies on."""


@dataclass(frozen=True, slots=True)
class OnnxSlim(CompositeStep, name="onnxslim", reads="values", source="onnxslim"):
    """Run onnxslim.slim: its fusion patterns and optimizations. It takes any option of `onnxslim.slim`; the inner
    passes in `left_out` do not run."""

    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    suspects: ClassVar[tuple[str, ...]] = ("constant_folding", SHAPES)
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = TABLE.destroys
    destroys_equals: ClassVar[tuple[str, ...]] = TABLE.destroys_equals
    limits: ClassVar[tuple[str, ...] | None] = ("size_threshold",)
    hands_on_options: ClassVar[bool] = True

    @property
    def narrows(self) -> bool:  # type: ignore[override]
        return bool(self.input_shapes)

    @property
    def input_shapes(self) -> Mapping[str, Sequence[int]]:  # type: ignore[override]
        return self.options.get("input_shapes") or {}

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(through_files(model, context, slim, self.build_arguments()))

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return call_slim(model, self.build_arguments())

    def format_call(self) -> str:
        without = f"  # without {', '.join(self.left_out)}" if self.left_out else ""
        return f"onnxslim.slim(model){without}"

    def build_arguments(self) -> dict[str, Any]:
        """What `call_slim` takes besides the model. Its shapes are texts, whatever it declares."""
        shapes = [f"{name}:{','.join(map(str, shape))}" for name, shape in self.input_shapes.items()]
        return {**self.options, **({"input_shapes": shapes} if shapes else {}), "left_out": list(self.left_out)}

    def inner(self, context: PassContext) -> tuple[str, ...]:
        known = _facts(context)
        skipped = {*texts(self.options, "skip_fusion_patterns", self.name), *self.left_out}
        skipped |= set(texts(self.options, "skip_optimizations", self.name))
        skipped |= set(known["patterns"]) if ALL_PATTERNS in skipped else set()
        skipped |= {SHAPES} if self.options.get("no_shape_infer") else set()
        names = (*known["patterns"], *known["optimizations"], SHAPES)
        return tuple(name for name in names if name not in skipped and name != ALL_PATTERNS)

    def check(self, context: PassContext) -> None:
        """Refuse what this release does not have; onnxslim itself ignores it in silence.

        Raises:
            PolicyError: onnxslim is not installed, an option or a name to skip is unknown, with the nearest, or a
                value is of another type.
        """
        require("onnxslim", "onnxslim", extra="onnxslim")
        if not self.options:
            return
        known = _facts(context)
        refuse_unknown(self.options, known["options"], "onnxslim.slim has no option")
        for key, names in (("skip_fusion_patterns", "patterns"), ("skip_optimizations", "optimizations")):
            refuse_unknown(texts(self.options, key, self.name), known[names], f"onnxslim: {key} knows no")
        for option, why in REFUSED.items():
            if self.options.get(option):
                raise PolicyError(f"{self.name}: {option} {why}")
        refuse_wrong_values(context, hints, self.name, self.options)
        refuse_wrong_shapes(self.name, self.options, ("input_shapes",))
        refuse_failing(context, try_options, self.name, {**self.options, "input_shapes": None})


def _facts(context: PassContext) -> dict[str, list[str]]:
    require("onnxslim", "onnxslim", extra="onnxslim")
    return ask(context, facts, "onnxslim")


@cache
def facts() -> dict[str, list[str]]:
    """In the worker: the patterns, optimizations and options of the installed release."""
    from onnxslim.argparser import OnnxSlimKwargs
    from onnxslim.core.optimization import OptimizationSettings
    from onnxslim.core.pattern.registry import DEFAULT_FUSION_PATTERNS

    return {
        "patterns": list(DEFAULT_FUSION_PATTERNS),
        "optimizations": list(OptimizationSettings.keys()),
        "options": [name for name in OnnxSlimKwargs.__annotations__ if name not in OWN_OPTIONS],
    }


def hints() -> dict[str, Any]:
    """In the worker: option → the type that slim declares."""
    from onnxslim.argparser import OnnxSlimKwargs

    return dict(OnnxSlimKwargs.__annotations__)


def try_options(options: dict[str, Any]) -> None:
    """In the worker: slim a model in which there is nothing to do; what onnxslim raises is passed on."""
    call_slim(trivial_model(), {**options, "left_out": []})


def slim(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: slim the file `source` into the file `target`."""
    model = call_slim(source, options)
    give_back_inputs(source, model)
    write(model, target)


def call_slim(model: onnx.ModelProto | str, options: Mapping[str, Any]) -> onnx.ModelProto:
    """In the worker: the result of `onnxslim.slim` on an unchanged model or file.

    `options` are those of `onnxslim.slim`, and `left_out`, names of either kind.
    """
    import onnxslim

    known, left_out = facts(), options["left_out"]
    arguments = {name: value for name, value in options.items() if name != "left_out"}
    for key, names in (("skip_fusion_patterns", "patterns"), ("skip_optimizations", "optimizations")):
        arguments[key] = [*options.get(key, ()), *(name for name in left_out if name in known[names])]
    arguments["no_shape_infer"] = bool(options.get("no_shape_infer")) or SHAPES in left_out
    library: Any = onnxslim.slim  # its annotations are not those of its arguments
    slimmed = library(model, **arguments)
    if not isinstance(slimmed, onnx.ModelProto):
        raise ValueError("onnxslim's own model_check found that the outputs have changed")
    return slimmed
