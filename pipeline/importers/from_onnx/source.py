"""Where a model comes from: read it without its external data, and inline its functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import inliner

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
        SourceMistake: no such file, or not an ONNX model.
        Unsupported: an opset before `OLDEST_OPSET`, or sparse initializers.
    """
    folder = Path(base_dir) if base_dir is not None else None
    if not isinstance(model, onnx.ModelProto):
        path = Path(model)
        model = load(path)
        folder = folder or path.parent
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


def load(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise SourceMistake(f"found no file {path}, expected an ONNX model; check the path")
    try:
        return onnx.load_model(path, load_external_data=False)
    except DecodeError as error:
        raise SourceMistake(f"{path} is not an ONNX model ({error}); export it again") from error


def op_key(domain: str, op_type: str) -> str:
    """How tables and messages name an op: "Conv", "com.microsoft::Attention"."""
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"
