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

__version__ = "0.1.0"

# By path: `passes` may be a module of the script's. Decided once, so that nothing of ours is loaded twice.
_OWN_NAMES: Final = Path(__file__).resolve().parents[1] / "passes" / "worker" / "own_names.py"
PREFIX: Final[str] = runpy.run_path(str(_OWN_NAMES))["choose_prefix"]()
"""What stands before `passes` and `pipeline` in this process: nothing, or `_onnxline.`."""

_names, _find = importlib.import_module(f"{PREFIX}passes.doors").open_door(__name__, __file__, PREFIX)

if TYPE_CHECKING:
    from passes.custom_ops import ArrayType as ArrayType
    from passes.custom_ops import CustomOp as CustomOp
    from passes.custom_ops import declare_ops as declare_ops
    from passes.diff import compare_models as compare_models
    from passes.diff import diff_text as diff_text
    from passes.errors import ModelError as ModelError
    from passes.errors import OnnxlineError as OnnxlineError
    from passes.errors import PassError as PassError
    from passes.errors import PolicyError as PolicyError
    from passes.guard import guard as guard
    from passes.run.result import OptimizeResult as OptimizeResult
    from passes.run.result import PassRow as PassRow
    from passes.run.result import PassRun as PassRun
    from passes.run.result import Status as Status
    from passes.run.result import StructureVerdict as StructureVerdict
    from passes.tools import change_batch as change_batch
    from passes.tools import change_outputs as change_outputs
    from passes.tools import compare as compare
    from passes.tools import convert_opset as convert_opset
    from passes.tools import extract as extract
    from passes.tools import fix_shapes as fix_shapes
    from passes.tools import inspect_model as inspect_model
    from passes.tools import merge as merge
    from passes.tools import rename as rename
    from passes.tools import split as split
    from passes.tools import to_bf16 as to_bf16
    from passes.tools import to_fp16 as to_fp16
    from passes.why import Origin as Origin
    from passes.why import WeightOrigin as WeightOrigin
    from passes.why import why as why
    from passes.why import why_weights as why_weights
    from pipeline.config import RunConfig as RunConfig
    from pipeline.errors import CheckFailed as CheckFailed
    from pipeline.errors import ConfigError as ConfigError
    from pipeline.errors import InternalError as InternalError
    from pipeline.errors import SourceError as SourceError
    from pipeline.errors import Unsupported as Unsupported
    from pipeline.errors import UsageError as UsageError
    from pipeline.importers import from_onnx as from_onnx
    from pipeline.ir import Graph as Graph
    from pipeline.ir import as_states as as_states
    from pipeline.optimize import optimize as optimize
    from pipeline.optimize import run as run
    from pipeline.planning import check_plan as check_plan
    from pipeline.quantsim.int8 import Int8Result as Int8Result
    from pipeline.quantsim.int8 import to_int8 as to_int8
    from pipeline.result import RunResult as RunResult
    from pipeline.run import Pipeline as Pipeline
    from pipeline.runtime import Capture as Capture
    from pipeline.runtime import CaptureReport as CaptureReport
    from pipeline.runtime import CaptureWarning as CaptureWarning
    from pipeline.runtime import CheckedBuilder as CheckedBuilder
    from pipeline.runtime import CompiledProgram as CompiledProgram
    from pipeline.runtime import SizedProgram as SizedProgram
    from pipeline.runtime import Snapshot as Snapshot
    from pipeline.runtime import compile_graph as compile_graph
    from pipeline.torch_ir import IR as IR
    from pipeline.torch_ir import execute_ir as execute_ir
    from pipeline.torch_ir import extract_ir as extract_ir
    from pipeline.torch_ir import ir_to_mermaid as ir_to_mermaid
    from pipeline.torch_ir import verify_ir_with_state_dict as verify_ir_with_state_dict
    from pipeline.training import NotFinite as NotFinite
    from pipeline.training import TrainProgram as TrainProgram
    from pipeline.training import record_step as record_step

    Builder = CheckedBuilder
    diff = compare_models
else:
    __all__ = ["__version__", *_names]

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
    with _extras_named(f"onnxline.{name}"):
        return _find(name)


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
    return sorted(("__version__", *_names, *ROOMS))
