"""PyTorch to ONNX, pass by pass, with proof; then a static IR and a planned run.

    import onnxline

    run = onnxline.optimize("model.onnx", keep=["qkv"])          # an ONNX file: needs no torch
    result = onnxline.optimize(module, (example,), keep=["qkv"])  # a torch module: export, passes, proof

This package holds no code of its own: it names the public parts of `passes` and `pipeline`, and loads each when it is
first used. Whole rooms have import paths here too: `from onnxline.authoring import Model`. A script may have modules of
its own that are called `passes` or `pipeline`; ours are then loaded under other names.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from passes.custom_ops import ArrayType, CustomOp, declare_ops
    from passes.diff import compare_models, diff_text
    from passes.diff import compare_models as diff
    from passes.errors import ModelError, OnnxlineError, PassError, PolicyError
    from passes.guard import guard
    from passes.run.result import OptimizeResult, PassRow, PassRun, Status, StructureVerdict
    from passes.tools import (
        change_batch,
        change_outputs,
        compare,
        convert_opset,
        extract,
        fix_shapes,
        inspect_model,
        merge,
        rename,
        split,
        to_bf16,
        to_fp16,
    )
    from passes.why import Origin, WeightOrigin, why, why_weights
    from pipeline.config import RunConfig
    from pipeline.errors import CheckFailed, ConfigError, InternalError, SourceError, Unsupported, UsageError
    from pipeline.importers import from_onnx
    from pipeline.ir import Graph, as_states
    from pipeline.optimize import optimize, run
    from pipeline.planning import check_plan
    from pipeline.result import RunResult
    from pipeline.run import Pipeline
    from pipeline.runtime import (
        Capture,
        CaptureReport,
        CaptureWarning,
        CheckedBuilder,
        CompiledProgram,
        SizedProgram,
        Snapshot,
        compile_graph,
    )
    from pipeline.runtime import CheckedBuilder as Builder
    from pipeline.torch_ir import IR, execute_ir, extract_ir, ir_to_mermaid, verify_ir_with_state_dict
    from pipeline.training import NotFinite, TrainProgram, record_step

__version__ = "0.1.0"

__all__ = [
    "IR",
    "ArrayType",
    "Builder",
    "Capture",
    "CaptureReport",
    "CaptureWarning",
    "CheckFailed",
    "CheckedBuilder",
    "CompiledProgram",
    "ConfigError",
    "CustomOp",
    "Graph",
    "InternalError",
    "ModelError",
    "NotFinite",
    "OnnxlineError",
    "OptimizeResult",
    "Origin",
    "PassError",
    "PassRow",
    "PassRun",
    "Pipeline",
    "PolicyError",
    "RunConfig",
    "RunResult",
    "SizedProgram",
    "Snapshot",
    "SourceError",
    "Status",
    "StructureVerdict",
    "TrainProgram",
    "Unsupported",
    "UsageError",
    "WeightOrigin",
    "__version__",
    "as_states",
    "change_batch",
    "change_outputs",
    "check_plan",
    "compare",
    "compare_models",
    "compile_graph",
    "convert_opset",
    "declare_ops",
    "diff",
    "diff_text",
    "execute_ir",
    "extract",
    "extract_ir",
    "fix_shapes",
    "from_onnx",
    "guard",
    "inspect_model",
    "ir_to_mermaid",
    "merge",
    "optimize",
    "record_step",
    "rename",
    "run",
    "split",
    "to_bf16",
    "to_fp16",
    "verify_ir_with_state_dict",
    "why",
    "why_weights",
]

HOMES: Final = {
    "passes": (
        "ModelError", "OnnxlineError", "OptimizeResult", "Origin", "PassError", "PassRow", "PassRun", "PolicyError",
        "Status", "StructureVerdict", "WeightOrigin", "guard", "why", "why_weights",
    ),
    "passes.custom_ops": ("ArrayType", "CustomOp", "declare_ops"),
    "passes.diff": ("compare_models", "diff_text"),
    "passes.tools": (
        "change_batch", "change_outputs", "compare", "convert_opset", "extract", "fix_shapes", "inspect_model", "merge",
        "rename", "split", "to_bf16", "to_fp16",
    ),
    "pipeline.config": ("RunConfig",),
    "pipeline.errors": (
        "CheckFailed", "ConfigError", "InternalError", "SourceError", "Unsupported", "UsageError",
    ),
    "pipeline.importers": ("from_onnx",),
    "pipeline.ir": ("Graph", "as_states"),
    "pipeline.optimize": ("optimize", "run"),
    "pipeline.planning": ("check_plan",),
    "pipeline.result": ("RunResult",),
    "pipeline.run": ("Pipeline",),
    "pipeline.runtime": (
        "Capture", "CaptureReport", "CaptureWarning", "CheckedBuilder", "CompiledProgram", "SizedProgram", "Snapshot",
        "compile_graph",
    ),
    "pipeline.training": ("NotFinite", "TrainProgram", "record_step"),
    "pipeline.torch_ir": ("IR", "execute_ir", "extract_ir", "ir_to_mermaid", "verify_ir_with_state_dict"),
}  # fmt: skip

ALIASES: Final = {"Builder": "CheckedBuilder", "diff": "compare_models"}
"""Names that are shorter here than in their room."""

# By path: `passes` may be a module of the script's. Decided once, so that nothing of ours is loaded twice.
_OWN_NAMES: Final = Path(__file__).resolve().parents[1] / "passes" / "worker" / "own_names.py"
PREFIX: Final[str] = runpy.run_path(str(_OWN_NAMES))["choose_prefix"]()
"""What stands before `passes` and `pipeline` in this process: nothing, or `_onnxline.`."""


ROOMS: Final = (
    "authoring", "bisect", "errors", "importers", "ir", "jobs", "onnx_backend", "passes", "planning", "quantsim",
    "runtime", "static_cache", "torch_ir", "training",
)  # fmt: skip
"""The modules of this package that name a whole room, such as `onnxline.ir`."""


def open_room(home: str) -> tuple[Sequence[str], Callable[[str], Any]]:
    """The `__all__` and `__getattr__` of a module that shows the public names of `home`, such as `pipeline.ir`.

    The module is no package, so that no file of the room can be imported a second time by another name.
    """
    with _extras_named(home):
        room = importlib.import_module(PREFIX + home)

    def find(name: str) -> Any:
        if name not in room.__all__:
            raise AttributeError(f"{home} has no public name {name!r}")
        with _extras_named(f"{home}.{name}"):
            return getattr(room, name)

    return room.__all__, find


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    name = ALIASES.get(name, name)
    home = next((module for module, names in HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'onnxline' has no attribute {name!r}")
    with _extras_named(f"onnxline.{name}"):
        return getattr(importlib.import_module(PREFIX + home), name)


@contextmanager
def _extras_named(what: str) -> Iterator[None]:
    """Say which extra `what` needs, where a module of an extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        errors = importlib.import_module(f"{PREFIX}pipeline.errors")
        if error.name not in errors.EXTRAS or isinstance(error, errors.MissingExtra):
            raise
        raise errors.MissingExtra(error.name, what) from None


def __dir__() -> list[str]:
    return sorted((*__all__, *ROOMS))
