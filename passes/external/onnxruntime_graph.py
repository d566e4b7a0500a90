"""onnxruntime's graph optimizations, done once and offline: one composite step, of its transformers and rules.

The saved model is for the CPU provider. Level `extended` and above may use operators that only onnxruntime has
(`com.microsoft`); `layout` and `all` also lay weights out for the machine that the step runs on.
"""

from __future__ import annotations

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
from passes.external.installed import ask, refuse_unknown, texts
from passes.external.pass_tables import TABLES, read_groups, read_table
from passes.external.through_files import through_files
from passes.graph.traversal import every_node
from passes.step import CompositeStep, Description, PassResult, values
from passes.weights.detached import DetachedModel

TABLE: Final = read_table("onnxruntime")


@dataclass(frozen=True, slots=True)
class OnnxRuntimeGraph(CompositeStep):
    """Save what an onnxruntime session makes of the model when it is loaded.

    Args:
        level: `basic`, `extended`, `layout` or `all`.
        disabled_optimizers: names that do not run, as onnxruntime's own option of that name takes them.
    """

    level: str = "extended"
    disabled_optimizers: Sequence[str] = ()
    left_out: tuple[str, ...] = ()
    name: str = field(default="onnxruntime", init=False)
    source: str = field(default="onnxruntime", init=False)
    description: ClassVar[Description] = values("Save what onnxruntime's own graph optimization makes of the model")
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
        return ask(context, facts, self.name, level=self.level)["passes"]


@cache
def facts(level: str) -> dict[str, list[str]]:
    """In the worker: what runs at `level` and can be left out; rules first, then transformers.

    Transformers are read from the log of a session. Some of what the log names cannot be left out (the insertion of
    Casts and copies): what still runs when all are disabled. Rules do not appear in the log and come from `RULES`.
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
    kept = [entry for entry in after.opset_import if entry.domain in used]
    del after.opset_import[:]
    after.opset_import.extend(kept)
    Path(target).write_bytes(after.SerializeToString())


def open_settings(level: str) -> Any:
    """In the worker: the settings of a session that optimizes at `level`, one of `LEVELS`, or `NOTHING`."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    name = "ORT_DISABLE_ALL" if level == NOTHING else LEVELS[level]
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, name)
    return settings


def load_in_session(model: bytes | str, settings: Any, disabled: Sequence[str]) -> None:
    """In the worker: have a session of the CPU load a model or a file, without the `disabled` optimizers."""
    import onnxruntime

    onnxruntime.InferenceSession(
        model, settings, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )


def _find_logged_transformers(level: str, disabled: Sequence[str]) -> list[str]:
    """The graph transformers that a session at `level` names in its log, each once."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[1] x) => (float[1] y) {y = Neg(x)}'
    )
    settings = open_settings(level)
    settings.log_severity_level = INFO
    with _capture_stderr() as log:
        load_in_session(model.SerializeToString(), settings, disabled)
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
