"""In the worker: call a library as its users do, by the function of its adapter that only calls it.

The adapters' repairs come after that, and would hide findings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from passes.audit.target import AuditTarget
from passes.context import PassContext
from passes.external.onnx_shapes import InferShapes, call_inference
from passes.external.onnxoptimizer import call_optimize
from passes.external.onnxruntime_fusions import OnnxRuntimeFusions, call_optimizer
from passes.external.onnxruntime_graph import OnnxRuntimeGraph, load_in_session, open_settings
from passes.external.onnxscript import OnnxScriptOptimizer, OnnxScriptRewrites, optimize, rewrite
from passes.external.onnxsim import OnnxSim
from passes.external.onnxsim_detached import call_simplify
from passes.external.onnxslim import OnnxSlim, call_slim
from passes.rewrites.fold_constants import FoldConstants
from passes.rewrites.split_merged import split_gate_up, split_qkv
from passes.rewrites.split_product import SplitModel
from passes.weights.detached import DetachedModel, attach, detach
from passes.worker.client import Worker

__all__ = ["call"]


def call(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """Run the library on `model`, which it may change, and return its result. Raises whatever the library raises."""
    return CALLS[subject.step](subject, model)


def _onnxoptimizer(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return call_optimize(model, subject.passes)


def _onnxsim(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """`check_n` stays at 0: onnxsim's own comparison would hide what it has broken."""
    return call_simplify(model, OnnxSim(subject.options, tuple(subject.left_out)).build_arguments())


def _onnxslim(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return call_slim(model, OnnxSlim(left_out=tuple(subject.left_out)).build_arguments())


def _onnxruntime(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """Save the graph of the CPU provider, by default at level extended: higher levels depend on the machine."""
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        settings = open_settings(subject.options.get("level", OnnxRuntimeGraph().level))
        settings.log_severity_level = SILENT
        settings.intra_op_num_threads = 1
        settings.optimized_model_filepath = str(Path(folder, "after.onnx"))
        load_in_session(model.SerializeToString(), settings, subject.left_out)
        return onnx.load(settings.optimized_model_filepath)


def _onnxruntime_fusions(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        source = Path(folder, "before.onnx")
        onnx.save(model, source)
        return call_optimizer(str(source), **OnnxRuntimeFusions(left_out=tuple(subject.left_out)).build_arguments())


def _onnxscript(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return _on_ir(optimize, model, OnnxScriptOptimizer(left_out=tuple(subject.left_out)).build_arguments())


def _onnxscript_rewrites(subject: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return _on_ir(rewrite, model, OnnxScriptRewrites(left_out=tuple(subject.left_out)).build_arguments())


def _on_ir(
    function: Callable[[Any, Mapping[str, Any]], None], model: onnx.ModelProto, options: Mapping[str, Any]
) -> onnx.ModelProto:
    """Call onnxscript on a model in its own form."""
    import onnx_ir as ir

    edited = ir.from_proto(model)
    function(edited, options)
    return ir.to_proto(edited)


def _infer_shapes(_: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    return call_inference(model, InferShapes().data_prop)


def _fold_constants(_: AuditTarget, model: onnx.ModelProto) -> onnx.ModelProto:
    """Our own pass. It asks for a worker; this process already is one."""
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        return attach(FoldConstants().apply(detach(model), PassContext(_InThisProcess(), Path(folder))).model)


def _split(_: AuditTarget, model: onnx.ModelProto, *, split: Callable[[DetachedModel], SplitModel]) -> onnx.ModelProto:
    return attach(split(detach(model)).model)


class _InThisProcess(Worker):
    """A worker that makes each call in this process."""

    def call(self, function: Callable[..., Any], /, *, within_s: float | None = None, **arguments: Any) -> Any:
        return function(**arguments)


SILENT: Final = 4
"""The severity of onnxruntime's log at which it writes none."""

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
