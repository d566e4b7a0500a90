"""Where a model comes from: read it without its external data, and inline its functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import inliner

from passes.errors import ModelMistake
from passes.load import load_model
from pipeline.errors import SourceMistake, Unsupported

__all__ = ["OLDEST_OPSET", "Source", "op_key", "read_source"]

OLDEST_OPSET = 7
"""The first opset with numpy's broadcasting; before it, Add and Mul mean something else."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model without local functions, the opset of the default domain, and the folder of its external data."""

    model: onnx.ModelProto
    opset: int
    folder: Path | None


def read_source(model: onnx.ModelProto | str | Path, base_dir: str | Path | None) -> Source:
    """Read `model` if it is a path; external data stays on disk, in `base_dir` or else in the folder of the path.

    Raises:
        SourceMistake: no such file, or a broken model.
        Unsupported: an opset before `OLDEST_OPSET`, or sparse initializers.
    """
    folder = Path(base_dir) if base_dir is not None else None
    if not isinstance(model, onnx.ModelProto):
        path = Path(model)
        # A link to a model stands for the model, beside which its data lies.
        folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
        model = path
    try:
        model = load_model(model, folder, may_be_empty=True)
    except ModelMistake as mistake:
        raise SourceMistake(str(mistake)) from mistake
    opset = next((entry.version for entry in model.opset_import if op_key(entry.domain, "") == ""), None)
    if opset is None:
        raise SourceMistake(f"the model {model.graph.name!r} imports no opset of the ONNX domain; is it a whole model?")
    if opset < OLDEST_OPSET:
        raise Unsupported(
            f"the model {model.graph.name!r} has opset {opset}, expected {OLDEST_OPSET} or later; "
            "convert it with onnx.version_converter.convert_version"
        )
    if model.graph.sparse_initializer:
        names = ", ".join(repr(tensor.values.name) for tensor in model.graph.sparse_initializer[:5])
        raise Unsupported(f"found sparse initializers ({names}), expected dense ones; make them dense first")
    if model.functions:
        model = inliner.inline_local_functions(model)
    return Source(model, opset, folder)


def op_key(domain: str, op_type: str) -> str:
    """How tables and messages name an op: "Conv", "com.microsoft::Attention"."""
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"
