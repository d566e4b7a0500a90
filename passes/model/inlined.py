"""A model without functions of its own: their bodies stand in the place of their calls."""

from __future__ import annotations

from onnx import inliner

from passes.model.weights import DetachedModel

__all__ = ["with_functions_inlined"]


def with_functions_inlined(model: DetachedModel) -> DetachedModel:
    """`model` itself where it has no functions. The values of its own graph keep their names."""
    if not model.proto.functions:
        return model
    return model.with_proto(inliner.inline_local_functions(model.proto))
