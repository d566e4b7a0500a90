"""onnxruntime's Python fusions for transformers: one composite step, whose inner passes are its switches."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.installed import ask, refuse_unknown
from passes.external.pass_tables import read_table
from passes.external.through_files import give_back_inputs, through_files, write
from passes.step import CompositeStep, Description, PassResult, values
from passes.weights.detached import DetachedModel

CONTRIB: Final = "com.microsoft"
"""The domain of the operators that only onnxruntime has."""

OWN_OPTIONS: Final = ("model_type", "num_heads", "hidden_size", "opt_level")
OPT_LEVELS: Final = (0, 1, 2, 99)

SWITCH: Final = "enable_"
"""What the name of a switch begins with."""

ENUMS: Final[Mapping[str, str]] = {
    "attention_mask_format": "AttentionMaskFormat",
    "attention_op_type": "AttentionOpType",
}
"""Options whose values the library gives names to, with the class that holds them."""


@dataclass(frozen=True, slots=True)
class OnnxRuntimeFusions(CompositeStep):
    """Run `onnxruntime.transformers.optimizer.optimize_model`.

    Args:
        model_type: the library's name for the family; its fusions differ by it. `bert` is the general one.
        num_heads: of the attention; 0 reads it from the graph, which the library does for some families.
        hidden_size: 0 likewise; both are given, or neither.
        opt_level: what onnxruntime's graph optimizations do before: 0 nothing, 1 basic, 2 extended, 99 all. Above 0 the
            library imports torch; the step `onnxruntime` does the same without.
        flags: the attributes of the library's FusionOptions. Its `enable_…` switches are the inner passes.
    """

    model_type: str = "bert"
    num_heads: int = 0
    hidden_size: int = 0
    opt_level: int = 0
    flags: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    name: str = field(default="onnxruntime_fusions", init=False)
    source: str = field(default="onnxruntime", init=False)
    description: ClassVar[Description] = values("Run onnxruntime's fusions for transformers")
    limits: ClassVar[tuple[str, ...] | None] = ()
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = read_table("onnxruntime_fusions").destroys
    hands_on_options: ClassVar[bool] = True

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> OnnxRuntimeFusions:
        """From a recipe, where the flags stand next to the other options."""
        own = {
            name: options[name] for name in ("model_type", "num_heads", "hidden_size", "opt_level") if name in options
        }
        return cls(**own, flags={name: value for name, value in options.items() if name not in own})

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(through_files(model, context, fuse, self.build_arguments()))

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
            source = Path(folder, "before.onnx")
            onnx.save(model, source)
            return call_optimizer(str(source), **self.build_arguments())

    def build_arguments(self) -> dict[str, Any]:
        """What `call_optimizer` takes besides the file."""
        return {
            "model_type": self.model_type,
            "num_heads": self.num_heads,
            "hidden_size": self.hidden_size,
            "opt_level": self.opt_level,
            "flags": {**self.flags, **dict.fromkeys(self.left_out, False)},
        }

    def inner(self, context: PassContext) -> tuple[str, ...]:
        flags = {**self._flags(context), **self.flags, **dict.fromkeys(self.left_out, False)}
        return tuple(name for name, value in flags.items() if name.startswith(SWITCH) and value)

    def check(self, context: PassContext) -> None:
        """Refuse what the installed release does not take.

        Raises:
            PolicyError: an unknown family or flag, with the nearest; num_heads without hidden_size; or an opt_level
                that needs torch.
        """
        if self == type(self)(left_out=self.left_out):
            return
        flags = self._flags(context)
        refuse_unknown(self.flags, flags, f"{self.name} (model_type {self.model_type}) has no option")
        for name, value in self.flags.items():
            if name in ENUMS:
                refuse_unknown([str(value)], flags[name], f"{self.name}: {name} has no")
            elif not isinstance(value, bool):
                raise PolicyError(f"{self.name}: {name} is {value!r}; expected true or false")
        _check_sizes(self)
        if self.opt_level and importlib.util.find_spec("torch") is None:
            raise PolicyError(
                f"{self.name}: opt_level {self.opt_level} needs torch, an extra: pip install 'onnxline[torch]'; "
                "or leave it at 0 and put the step onnxruntime before this one"
            )

    def _flags(self, context: PassContext) -> Mapping[str, Any]:
        known = ask(context, facts, self.name)
        refuse_unknown([self.model_type], known, f"{self.name} has no model_type")
        return known[self.model_type]


def _check_sizes(step: OnnxRuntimeFusions) -> None:
    for name in ("num_heads", "hidden_size"):
        value = getattr(step, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PolicyError(f"{step.name}: {name} is {value!r}; expected an integer, 0 to read it from the graph")
    heads, hidden = step.num_heads, step.hidden_size
    if bool(heads) != bool(hidden) or (heads and hidden % heads):
        raise PolicyError(
            f"{step.name}: num_heads is {heads} and hidden_size {hidden}; expected both, with hidden_size a multiple "
            "of num_heads, or neither"
        )
    if step.opt_level not in OPT_LEVELS:
        raise PolicyError(f"{step.name}: opt_level is {step.opt_level!r}; expected one of {OPT_LEVELS}")


@cache
def facts() -> dict[str, dict[str, Any]]:
    """In the worker: family → its flags with their defaults; for a flag of named values, the names."""
    from onnxruntime.transformers import fusion_options
    from onnxruntime.transformers.optimizer import MODEL_TYPES

    flags_by_family = {}
    for family in MODEL_TYPES:
        flags = vars(fusion_options.FusionOptions(family))
        named = {name: list(_values_by_name(name)) for name in ENUMS if name in flags}
        flags_by_family[family] = {**flags, **named}
    return flags_by_family


def _values_by_name(flag: str) -> dict[str, Any]:
    """The values of a flag by name."""
    from onnxruntime.transformers import fusion_options

    return {name: value for name, value in vars(getattr(fusion_options, ENUMS[flag])).items() if name[0].isupper()}


def fuse(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: fuse the file `source` into the file `target`."""
    fused = call_optimizer(source, **options)
    declared = {entry.domain for entry in fused.opset_import}
    if CONTRIB not in declared and any(node.domain == CONTRIB for node in fused.graph.node):
        fused.opset_import.add(domain=CONTRIB, version=1)  # onnxruntime does without, ONNX does not
    give_back_inputs(source, fused)
    write(fused, target)


def call_optimizer(source: str, model_type: str, flags: Mapping[str, Any], **options: Any) -> onnx.ModelProto:
    """In the worker: the result of the library on the unchanged file `source`."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    chosen = FusionOptions(model_type)
    for name, value in flags.items():
        setattr(chosen, name, _values_by_name(name)[value] if name in ENUMS else value)
    return optimize_model(source, model_type, optimization_options=chosen, use_gpu=False, **options).model
