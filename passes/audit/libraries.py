"""In the worker: call a library as its users do. Nothing is repaired here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from passes.audit.target import AuditTarget
from passes.context import PassContext
from passes.external import onnxruntime_fusions, onnxscript, onnxslim
from passes.external.onnxruntime_graph import LEVELS
from passes.external.onnxsim import STAGES
from passes.external.onnxsim_detached import import_onnxsim
from passes.rewrites.fold_constants import FoldConstants
from passes.rewrites.split_merged import split_gate_up, split_qkv
from passes.rewrites.split_product import SplitModel
from passes.weights.detached import DetachedModel, attach, detach
from passes.worker.client import Function, Worker

__all__ = ["call"]


def call(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """Run the library on `model`, which it may change, and return its result. Raises whatever the library raises."""
    return CALLS[subject.step](subject, model)


def _onnxoptimizer(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxoptimizer

    return onnxoptimizer.optimize(model, list(subject.passes))


def _onnxsim(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """`check_n` stays at 0: onnxsim's own comparison would hide what it has broken."""
    stages = {STAGES[name]: True for name in subject.left_out if name in STAGES}
    skipped = [name for name in subject.left_out if name not in STAGES]
    return import_onnxsim().simplify(model, skipped_optimizers=skipped or None, **stages, **subject.options)[0]


def _onnxslim(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxslim as library

    known = onnxslim.facts()
    skipped = {
        option: [name for name in subject.left_out if name in known[names]]
        for option, names in (("skip_fusion_patterns", "patterns"), ("skip_optimizations", "optimizations"))
    }
    slim: Any = library.slim  # its annotations are not those of its arguments
    result = slim(model, no_shape_infer=onnxslim.SHAPES in subject.left_out, **skipped)
    if not isinstance(result, onnx.ModelProto):
        raise ValueError("onnxslim returned no model")
    return result


def _onnxruntime(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """Save the graph of the CPU provider, by default at level extended: higher levels depend on the machine."""
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = getattr(
            onnxruntime.GraphOptimizationLevel, ORT_LEVELS[subject.options.get("level", "extended")]
        )
        settings.log_severity_level = 4
        settings.intra_op_num_threads = 1
        settings.optimized_model_filepath = str(Path(folder, "after.onnx"))
        onnxruntime.InferenceSession(
            model.SerializeToString(),
            settings,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(subject.left_out),
        )
        return onnx.load(settings.optimized_model_filepath)


def _onnxruntime_fusions(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    family = onnxruntime_fusions.OnnxRuntimeFusions().model_type
    chosen = FusionOptions(family)
    for name in subject.left_out:
        setattr(chosen, name, False)
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        source = Path(folder, "before.onnx")
        onnx.save(model, source)
        return optimize_model(str(source), family, optimization_options=chosen, opt_level=0, use_gpu=False).model


def _onnxscript(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return _on_ir(onnxscript.optimize, model, {"left_out": list(subject.left_out)})


def _onnxscript_rewrites(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return _on_ir(onnxscript.rewrite, model, {"rules": ["default"], "left_out": list(subject.left_out)})


def _on_ir(
    function: Callable[[Any, Mapping[str, Any]], None], model: onnx.ModelProto, options: Mapping[str, Any]
) -> onnx.ModelProto:
    """Run one of our adapters that only calls the library and repairs nothing."""
    import onnx_ir as ir

    edited = ir.from_proto(model)
    function(edited, options)
    return ir.to_proto(edited)


def _infer_shapes(_: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def _fold_constants(_: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """Our own pass. It asks for a worker; this process already is one."""
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        return attach(FoldConstants().apply(detach(model), PassContext(_InThisProcess(), Path(folder))))


def _split(_: AuditTarget, model: onnx.ModelProto, *, split: Callable[[DetachedModel], SplitModel]) -> onnx.ModelProto:
    return attach(split(detach(model)).model)


class _InThisProcess(Worker):
    """A worker that makes each call in this process."""

    def call(self, function: Function, /, *, within_s: float | None = None, **arguments: Any) -> Any:
        assert callable(function)
        return function(**arguments)


ORT_LEVELS: Final[Mapping[str, str]] = {**LEVELS, "disabled": "ORT_DISABLE_ALL"}

CALLS: Final[Mapping[str, Callable[[AuditTarget, onnx.ModelProto], onnx.ModelProto]]] = {
    "onnxoptimizer": _onnxoptimizer,
    "onnxsim": _onnxsim,
    "onnxslim": _onnxslim,
    "onnxruntime": _onnxruntime,
    "onnxruntime_fusions": _onnxruntime_fusions,
    "onnxscript": _onnxscript,
    "onnxscript_rewrites": _onnxscript_rewrites,
    "infer_shapes": _infer_shapes,
    "fold_constants": _fold_constants,
    "split-qkv": partial(_split, split=split_qkv),
    "split-gate-up": partial(_split, split=split_gate_up),
}
"""Step → how its library is called."""
