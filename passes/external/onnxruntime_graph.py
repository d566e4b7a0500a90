"""onnxruntime's optimizers as two composite steps: its graph optimizations, done once and offline, of its transformers
and rules; and its Python fusions for models called transformers, whose inner passes are its switches.

The model that the graph optimizations save is for the CPU provider. Level `extended` and above may use operators that
only onnxruntime has (`com.microsoft`); `layout` and `all` also lay weights out for the machine that the step runs on.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.custom_ops.declarations import add_libraries
from passes.errors import PolicyError
from passes.external.installed import TABLES, ask, read_groups, read_table, refuse_unknown, texts, trivial_model
from passes.external.through_files import give_back_inputs, through_files, write
from passes.graph.index import replace_entries
from passes.graph.traversal import every_node
from passes.step import CompositeStep, PassResult
from passes.weights.detached import DetachedModel

TABLE: Final = read_table("onnxruntime")


@dataclass(frozen=True, slots=True)
class OnnxRuntimeGraph(CompositeStep, name="onnxruntime", reads="values", source="onnxruntime"):
    """Save what onnxruntime's own graph optimization makes of the model. An onnxruntime session does it when it loads
    the model.

    Args:
        level: `basic`, `extended`, `layout` or `all`.
        disabled_optimizers: names that do not run, as onnxruntime's own option of that name takes them.
    """

    level: str = "extended"
    disabled_optimizers: Sequence[str] = ()
    left_out: tuple[str, ...] = ()
    limits: ClassVar[tuple[str, ...] | None] = ()
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = TABLE.destroys
    destroys_equals: ClassVar[tuple[str, ...]] = TABLE.destroys_equals

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        options = {"level": self.level, "disabled": [*self._disabled_names(), *self.left_out]}
        return PassResult(through_files(model, context, optimize, options))

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
            settings = open_settings(self.level)
            settings.log_severity_level = SILENT
            settings.intra_op_num_threads = 1
            settings.optimized_model_filepath = str(Path(folder, "after.onnx"))
            load_in_session(model.SerializeToString(), settings, [*self._disabled_names(), *self.left_out])
            return onnx.load(settings.optimized_model_filepath)

    def inner(self, context: PassContext) -> tuple[str, ...]:
        disabled = {*self._disabled_names(), *self.left_out}
        return tuple(name for name in self._names(context) if name not in disabled)

    def appliers(self, name: str) -> tuple[str, ...]:
        return tuple(group for group, rules in RULES.items() if name in rules)

    def check(self, context: PassContext) -> None:
        """Refuse names that the installed release does not have; onnxruntime itself ignores them in silence.

        Raises:
            PolicyError: an unknown level or optimizer, with the nearest.
        """
        refuse_unknown([self.level], LEVELS, "onnxruntime has no optimization level")
        if self._disabled_names():
            refuse_unknown(self._disabled_names(), self._names(context), f"onnxruntime at level {self.level} has no")

    def _disabled_names(self) -> list[str]:
        return texts({"disabled_optimizers": self.disabled_optimizers}, "disabled_optimizers", self.name)

    def _names(self, context: PassContext) -> list[str]:
        refuse_unknown([self.level], LEVELS, "onnxruntime has no optimization level")
        return ask(context, transformer_facts, self.name, level=self.level)["passes"]


@cache
def transformer_facts(level: str) -> dict[str, list[str]]:
    """In the worker: what runs at `level` and can be left out; rules first, then transformers.

    Transformers are read from the log of a session. Transformers that still run when all are disabled (the insertion of
    Casts and copies) cannot be left out, and are not listed. Rules do not appear in the log and come from `RULES`.
    """
    logged = _find_logged_transformers(level, ())
    if not logged:
        raise RuntimeError("its log names no graph transformer")
    fixed = set(_find_logged_transformers(level, logged))
    transformers = [name for name in logged if name not in fixed]
    rules = [rule for group in RULES if group in transformers for rule in RULES[group]]
    groups = [name for name in transformers if name in RULES]
    # Groups last: the search for the culprit takes the first match, and a rule is more specific than its group.
    return {"passes": [*dict.fromkeys(rules), *(name for name in transformers if name not in RULES), *groups]}


def optimize(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: let a session at `level` load the file `source`, and save what it made of it as `target`."""
    settings = open_settings(options["level"])
    settings.log_severity_level = ERRORS
    settings.optimized_model_filepath = target
    data = f"{Path(target).name}.data"
    settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", data)
    settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    load_in_session(source, settings, options["disabled"])
    _drop_unused_domains(onnx.load(source, load_external_data=False), target)


def _drop_unused_domains(before: onnx.ModelProto, target: str) -> None:
    """onnxruntime declares every domain that it knows; what the model had and what its nodes use is enough."""
    after = onnx.load(target, load_external_data=False)
    used = {entry.domain for entry in before.opset_import} | {node.domain for node in every_node(after.graph)}
    used |= {node.domain for function in after.functions for node in function.node}
    replace_entries(after.opset_import, [entry for entry in after.opset_import if entry.domain in used])
    Path(target).write_bytes(after.SerializeToString())


def open_settings(level: str) -> Any:
    """In the worker: the settings of a session that optimizes at `level`, one of `LEVELS`, or `NOTHING`."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    name = "ORT_DISABLE_ALL" if level == NOTHING else LEVELS[level]
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, name)
    add_libraries(settings)
    return settings


def load_in_session(model: bytes | str, settings: Any, disabled: Sequence[str]) -> None:
    """In the worker: have a session of the CPU load a model or a file, without the `disabled` optimizers."""
    import onnxruntime

    onnxruntime.InferenceSession(
        model, settings, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )


def _find_logged_transformers(level: str, disabled: Sequence[str]) -> list[str]:
    """The graph transformers that a session at `level` names in its log, each once."""
    settings = open_settings(level)
    settings.log_severity_level = INFO
    with _capture_stderr() as log:
        load_in_session(trivial_model().SerializeToString(), settings, disabled)
    return list(dict.fromkeys(re.findall(r"GraphTransformer (\w+) modified", log[0])))


@contextmanager
def _capture_stderr() -> Iterator[list[str]]:
    """What native code writes to standard error inside the block, as the one item of the list."""
    written: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))


INFO: Final = 1
ERRORS: Final = 3
SILENT: Final = 4
"""Severities of onnxruntime's log."""

LEVELS: Final[Mapping[str, str]] = {
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}

NOTHING: Final = "disabled"
"""The level at which a session loads a model and optimizes nothing. No step has it."""

RULES: Final = read_groups(TABLES / "onnxruntime_rules.txt")
"""Transformer → the rewrite rules that it applies."""


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
class OnnxRuntimeFusions(CompositeStep, name="onnxruntime_fusions", reads="values", source="onnxruntime"):
    """Run onnxruntime's fusions for transformers. The call is `onnxruntime.transformers.optimizer.optimize_model`.

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
    limits: ClassVar[tuple[str, ...] | None] = ()
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = read_table("onnxruntime_fusions").destroys
    hands_on_options: ClassVar[bool] = True

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> OnnxRuntimeFusions:
        """From a recipe, where the flags stand next to the other options."""
        own = {name: options[name] for name in OWN_OPTIONS if name in options}
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
        known = ask(context, fusion_facts, self.name)
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
def fusion_facts() -> dict[str, dict[str, Any]]:
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
