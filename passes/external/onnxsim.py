"""onnxsim: one composite step. Importing it takes seconds (it loads torch where that is installed): the worker does."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.errors import PolicyError, StepFailed, StepTimedOut
from passes.external import onnxoptimizer
from passes.external.hidden_outputs import hide_outputs, show_outputs
from passes.external.installed import (
    ask,
    read_table,
    refuse_failing,
    refuse_older,
    refuse_wrong_shapes,
    refuse_wrong_values,
    texts,
    trivial_model,
)
from passes.external.onnxsim_detached import ROUNDS, call_simplify, import_onnxsim, simplify_detached
from passes.external.through_files import through_files
from passes.step import CompositeStep, Description, PassResult
from passes.suggest import nearest
from passes.weights.detached import DetachedModel

OLDEST: Final = "0.8.1"
"""The first release that lists its passes and takes a skip list as we need them."""

STAGES: Final[Mapping[str, str]] = {
    "constant_folding": "skip_constant_folding",
    "shape_inference": "skip_shape_inference",
}
"""Stage of simplify outside its listed passes → the option that leaves it out. Stages are inner passes too."""

RUN_UNLISTED: Final = frozenset({"fuse_matmul_add_bias_into_gemm_batched"})
"""Passes that simplify always runs although onnxsim lists them among its optional passes."""

NEVER_RUN: Final[Mapping[str, str]] = {
    "eliminate_shape_gather": "it is listed, but never run: onnxsim folds shapes in another way",
    "extract_constant_to_initializer": "it is listed, but never run: onnxsim keeps constants apart from weights",
}
"""Passes that simplify always removes from its list, as its sources and its runs show."""

TABLE: Final = read_table("onnxsim")
"""The passes that run by default. Passes that run only if they are named are listed without a description."""

SHAPES: Final = ("overwrite_input_shapes", "input_shapes")
"""Options that fix the shapes of inputs."""

OF_ANY_MODEL: Final = frozenset({*SHAPES, "test_input_shapes", "skipped_optimizers", "extra_optimizers", "output_path"})
"""Options that are not tried on another model: they name its inputs, or were looked at."""

MOST_FOLDED: Final = "64MB"
"""What a Tile or an Expand may be folded to where the option does not say. What grows the model much is undone anyway,
and by default onnxsim makes 1.5 GB of a few bytes first."""

NATIVE: Final = "onnxsim.onnxsim_cpp2py_export"

OWN_ARGUMENTS: Final[Mapping[str, str]] = {
    "model": "a step gets the model from the step before",
    "output_path": "a run writes the model",
    "input_data": "the run itself compares, on draws and on inputs of your own (verify.inputs)",
    **dict.fromkeys(("custom_rewriter", "function_rewrite_rules"), "it is a Python object; write a pass of your own"),
}
"""Arguments of simplify that no recipe gives → why: they are ours to give, or cannot be written in YAML."""


@dataclass(frozen=True, slots=True)
class OnnxSim(CompositeStep, name="onnxsim", reads="values", source="onnxsim"):
    """Run onnxsim.simplify: its passes, constant folding and shape inference until nothing changes. It takes any
    option of `onnxsim.simplify`; passes in `left_out` do not run."""

    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    rounds: int = ROUNDS

    suspects: ClassVar[tuple[str, ...]] = tuple(STAGES)
    joins_weights: ClassVar[tuple[str, ...]] = ("fuse_attention",)
    merges_siblings: ClassVar[bool] = True
    limits: ClassVar[tuple[str, ...] | None] = ("tensor_size_threshold",)
    growing: ClassVar[tuple[str, ...]] = (
        "fuse_matmul_add_bias_into_gemm_batched",
        "eliminate_loop_with_const_trip_count",
    )
    writes_contrib: ClassVar[tuple[str, ...]] = ("fuse_attention", "fuse_gqa")
    never_run: ClassVar[Mapping[str, str]] = NEVER_RUN
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = TABLE.destroys
    destroys_equals: ClassVar[tuple[str, ...]] = TABLE.destroys_equals
    describes: ClassVar[Mapping[str, Description]] = {**onnxoptimizer.TABLE.describes, **TABLE.describes}
    hands_on_options: ClassVar[bool] = True

    @property
    def narrows(self) -> bool:  # type: ignore[override]
        return bool(self.input_shapes)

    @property
    def input_shapes(self) -> Mapping[str, Sequence[int]]:  # type: ignore[override]
        return {name: shape for key in SHAPES for name, shape in (self.options.get(key) or {}).items()}

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        result = self._simplify(hide_outputs(model, self.input_shapes), context)
        return replace(result, model=show_outputs(model, result.model))

    def _simplify(self, model: DetachedModel, context: PassContext) -> PassResult:
        options, why = self.build_arguments(), None
        options.setdefault("tensor_size_threshold", MOST_FOLDED)
        if options.get("check_n", 0) == 0:
            try:
                return PassResult(
                    simplify_detached(model, context, options, options["skipped_optimizers"], self.rounds)
                )
            except StepTimedOut:  # with the weights it would take no less
                raise
            except StepFailed as failure:  # what it cannot do without the weights, it may do with them
                if model.unread():
                    raise
                why = f"with all weights in its memory, since it failed without them: {failure}"
        return PassResult(through_files(model, context, simplify, options), why=why)

    def in_one_round(self) -> OnnxSim:
        return replace(self, rounds=1)

    @staticmethod
    def import_library() -> None:
        import_onnxsim()

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`check_n` stays at 0: onnxsim's own comparison would hide what it has broken."""
        return call_simplify(model, self.build_arguments())

    def format_call(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.build_arguments().items())
        return f"onnxsim.simplify(model, {arguments})"

    def build_arguments(self) -> dict[str, Any]:
        """What simplify is called with, besides the model: the options, and what else is left out."""
        listed = self.options.get("skipped_optimizers") or ()
        skipped = dict.fromkeys((*listed, *(name for name in self.left_out if name not in STAGES)))
        stages = {STAGES[name]: True for name in self.left_out if name in STAGES}
        return {**self.options, **stages, "skipped_optimizers": list(skipped)}

    def inner(self, context: PassContext) -> tuple[str, ...]:
        known = _facts(context)
        names = (
            *known["passes"],
            *self._check_pass_names("extra_optimizers", (*known["passes"], *known["extra"])),
            *STAGES,
        )
        return tuple(name for name in names if name not in self.left_out)

    def extras(self, context: PassContext) -> tuple[str, ...]:
        return tuple(_facts(context)["extra"])

    def with_extra(self, name: str) -> OnnxSim:
        return replace(self, options={**self.options, "extra_optimizers": [name]})

    def known_inner(self, context: PassContext) -> tuple[str, ...]:
        known = _facts(context)
        return (*known["passes"], *known["extra"], *STAGES)

    def check(self, context: PassContext) -> None:
        """Refuse options that this release's simplify does not take, and names of passes that it does not have.

        Raises:
            PolicyError: naming the nearest, since onnxsim itself ignores a misspelt pass in silence; a value of
                another type; or the installed release is too old.
        """
        refuse_older("onnxsim", OLDEST)
        if not self.options:
            return
        known = _facts(context)
        for name in self.options:
            if name in OWN_ARGUMENTS:
                raise PolicyError(f"{self.name}: {name} is no option of the step: {OWN_ARGUMENTS[name]}")
            if name not in known["options"]:
                raise PolicyError(f"onnxsim.simplify has no option {name!r}{nearest(name, known['options'])}")
        self._check_pass_names("skipped_optimizers", known["passes"])
        self._check_pass_names("extra_optimizers", (*known["passes"], *known["extra"]))
        refuse_wrong_values(context, hints, self.name, self.options)
        refuse_wrong_shapes(self.name, self.options, SHAPES)
        if self.options.get("unused_output"):
            raise PolicyError(f"{self.name}: unused_output drops outputs of the model, which a step has to leave")
        library = str(self.options.get("custom_lib") or "")
        if library and not Path(library).is_file():
            raise PolicyError(f"{self.name}: custom_lib is {library!r}, and there is no such file")
        tried = {name: value for name, value in self.options.items() if name not in OF_ANY_MODEL}
        refuse_failing(context, try_options, self.name, tried)

    def _check_pass_names(self, option: str, known: Sequence[str]) -> Sequence[str]:
        """The passes that `option` names, all of them known. Raises PolicyError as `check` does."""
        names = texts(self.options, option, self.name)
        for name in names:
            if name not in known:
                raise PolicyError(f"onnxsim has no pass named {name!r}{nearest(name, known)}")
        return names


def try_options(options: dict[str, Any]) -> None:
    """In the worker: simplify a model in which there is nothing to do; what onnxsim raises is passed on."""
    call_simplify(trivial_model(), options)


def _facts(context: PassContext) -> dict[str, list[str]]:
    refuse_older("onnxsim", OLDEST)
    return ask(context, facts, "onnxsim")


@cache
def facts() -> dict[str, list[str]]:
    """In the worker: the passes and options of the installed release.

    `extra` are the passes that run only where the option `extra_optimizers` names them; none in a release without it.
    The list that onnxsim prints at first is short; the rest is registered by its first call.
    """
    onnxsim = import_onnxsim()
    native = importlib.import_module(NATIVE)

    onnxsim.simplify(trivial_model())
    options = [name for name in inspect.signature(onnxsim.simplify).parameters if name not in OWN_ARGUMENTS]
    others = native._list_other_optimizers()
    known = [*native._list_optimizers(), *(name for name in others if name in RUN_UNLISTED)]
    extra = [name for name in others if name not in known] if "extra_optimizers" in options else []
    return {"passes": known, "extra": extra, "options": options}


def hints() -> dict[str, Any]:
    """In the worker: option → the type that simplify declares, or that of its default."""
    parameters = inspect.signature(import_onnxsim().simplify).parameters
    declared = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if parameter.annotation is not parameter.empty
    }
    defaults = {
        name: type(parameter.default)
        for name, parameter in parameters.items()
        if parameter.default not in (None, parameter.empty)
    }
    return {**defaults, **declared}


def simplify(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: simplify the file `source` into the file `target`."""
    model = call_simplify(source, {**options, "output_path": target})
    # Only onnxsim's fast path writes `output_path`; its other path returns the whole model.
    if not os.path.exists(target):
        onnx.save(model, target, save_as_external_data=True, location="after.onnx.data")
