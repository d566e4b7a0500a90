"""Read a model without its external data, and inline its functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import onnx
from onnx import TensorProto, inliner

from passes.errors import ModelError
from passes.load import load_model
from passes.weights.detached import inner_tensors
from passes.weights.mapped import ExternalFiles
from passes.weights.stand_ins import inline
from pipeline.errors import SourceError, Unsupported
from pipeline.importers.from_onnx.attributes import op_key, schema_of

__all__ = ["OLDEST_OPSET", "ReadModel", "read_source"]

OLDEST_OPSET = 7
"""The first opset with numpy's broadcasting; before it, Add and Mul mean something else."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model without local functions, the opset of the default domain, and the folder of its external data."""

    model: onnx.ModelProto
    opset: int
    folder: Path | None


def read_source(
    model: onnx.ModelProto | str | Path, base_dir: str | Path | None, known: Collection[str] = ()
) -> ReadModel:
    """Read `model` if it is a path; external data stays on disk, in `base_dir` or else in the folder of the path.

    An operator that is not `known` is replaced by its function body, where ONNX defines one.

    Raises:
        SourceError: no such file, or a broken model.
        Unsupported: an opset before `OLDEST_OPSET`, or sparse initializers.
    """
    folder = Path(base_dir) if base_dir is not None else None
    if not isinstance(model, onnx.ModelProto):
        if not isinstance(model, str | PathLike):
            found = type(model).__name__
            raise SourceError(f"found {found}, expected an onnx.ModelProto or the path of an ONNX file")
        path = Path(model)
        # The data file is beside the model that a symbolic link points to.
        folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
        model = path
    try:
        model = load_model(model, folder, may_be_empty=True)
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    opset = next((entry.version for entry in model.opset_import if op_key(entry.domain, "") == ""), None)
    if opset is None and any(op_key(node.domain, "") for node in model.graph.node):
        domains = ", ".join(sorted({node.domain for node in model.graph.node if node.domain}))
        raise Unsupported(
            f"the model {model.graph.name!r} imports no opset of the ONNX domain, and has operators of {domains}; "
            "onnxline runs operators of the ONNX domain"
        )
    if opset is None:
        raise SourceError(f"the model {model.graph.name!r} imports no opset of the ONNX domain; is it a whole model?")
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
    model = _with_inner_data(model, folder)
    for name in sorted({node.op_type for node in model.graph.node if _is_function(node, opset, known)}):
        model = _without_function(model, name, opset)
    return ReadModel(model, opset, folder)


def _with_inner_data(model: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """`model` with the external data of Constants and of bodies of If, Loop and Scan inside of it.

    Raises:
        SourceError: it is missing, or outside of `folder`.
    """
    if all(tensor.data_location != TensorProto.EXTERNAL for tensor in inner_tensors(model.graph)):
        return model
    whole, files = onnx.ModelProto(), ExternalFiles(folder)
    whole.CopyFrom(model)
    try:
        for tensor in inner_tensors(whole.graph):
            if tensor.data_location == TensorProto.EXTERNAL:
                inline(tensor, files.bytes_of(tensor))
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    return whole


def _is_function(node: onnx.NodeProto, opset: int, known: Collection[str]) -> bool:
    kind = op_key(node.domain, node.op_type)
    if kind in known or kind in KEPT or op_key(node.domain, ""):
        return False
    schema = schema_of(node.op_type, node.domain, opset)
    # The stubs of onnx 1.23 lack both.
    return any(getattr(schema, name, False) for name in ("has_function", "has_context_dependent_function"))


def _without_function(model: onnx.ModelProto, name: str, opset: int) -> onnx.ModelProto:
    """`model` with calls of the function `name` inlined; the same model where ONNX cannot do so."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    schema = schema_of(name, "", opset)
    for node in copy.graph.node:
        if schema is not None and op_key(node.domain, node.op_type) == name:
            # The inliner drops an attribute that the node does not have, even if it has a default (onnx 1.23).
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(
                attribute.default_value
                for attribute in schema.attributes.values()
                if attribute.name not in given and attribute.default_value.type
            )
    try:
        return inliner.inline_selected_functions(copy, [("", name)], False, True)
    # The inliner needs types, which omitted optional inputs and results of unknown operators lack. Its native code
    # raises errors of any type then; the operator is refused where it is imported.
    except Exception:
        return model


KEPT = frozenset({"Range"})
"""Functions that are folded, and whose body is a loop."""
