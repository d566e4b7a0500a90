"""Models as callers hand them over and want them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from passes.errors import ModelError
from passes.graph.traversal import sort_nodes
from passes.guard.calls.base import LetThrough
from passes.load import check_model
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, detach, read_model
from passes.weights.stand_ins import inline

__all__ = ["copied", "is_valid", "opened", "parsed", "whole", "write"]


def copied(model: onnx.ModelProto, instead: Callable[[], Any]) -> DetachedModel:
    """A model in memory, detached; the caller's stays as it is.

    Raises:
        LetThrough: it is broken, or its external data is not in it.
    """
    copy = onnx.ModelProto()
    try:
        check_model(model)
        copy.CopyFrom(model)
        sort_nodes(copy.graph)
        return detach(copy, checked=True)
    except ModelError as mistake:
        raise LetThrough(str(mistake), instead) from mistake


def parsed(data: bytes) -> onnx.ModelProto:
    """A model in bytes.

    Raises:
        LetThrough: they are none of a model.
    """
    try:
        return onnx.load_from_string(data)
    except Exception as error:  # of the protobuf library, by release
        raise LetThrough(f"the bytes are not a model: {error}") from error


def opened(path: str) -> DetachedModel:
    """A model in a file.

    Raises:
        LetThrough: it cannot be read.
    """
    try:
        return read_model(Path(path))
    except ModelError as mistake:
        raise LetThrough(str(mistake)) from mistake


def whole(model: DetachedModel) -> onnx.ModelProto:
    """With its data inline. In memory a message may be larger than any file."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in proto.graph.initializer:
        weight = model.weight(tensor)
        if weight is not None:
            inline(tensor, weight.data)
    return proto


def write(model: DetachedModel, path: str, external_from: int) -> None:
    """Write to `path`; above `external_from` bytes the weights go to `<name>.data` beside it, as optimizers do it."""
    proto, data = whole(model), Path(f"{path}.data")
    if model.nbytes() <= min(external_from, PROTOBUF_LIMIT):
        onnx.save(proto, path)
        return
    data.unlink(missing_ok=True)  # onnx appends to what is there
    onnx.save(proto, path, save_as_external_data=True, all_tensors_to_one_file=True, location=data.name)


def is_valid(model: DetachedModel) -> bool:
    """What ONNX's own checker says; of a model that is too large for it, yes."""
    if model.nbytes() > PROTOBUF_LIMIT:
        return True
    try:
        onnx.checker.check_model(whole(model))
    except onnx.checker.ValidationError:
        return False
    return True
