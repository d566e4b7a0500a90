"""IR ↔ JSON."""

from __future__ import annotations

from pipeline.torch_ir import (
    IR,
    SerializationError,
    TensorMeta,
    deserialize_ir,
    load_ir,
    save_ir,
    serialize_ir,
    validate_ir,
)

__all__ = [
    "IRSerializer",
    "SerializationError",
    "TensorMeta",
    "deserialize_ir",
    "load_ir",
    "save_ir",
    "serialize_ir",
    "validate_ir",
]


class IRSerializer:
    """The functions of this module, as methods."""

    def serialize(self, ir: IR) -> str:
        return serialize_ir(ir)

    def deserialize(self, json_str: str) -> IR:
        return deserialize_ir(json_str)
