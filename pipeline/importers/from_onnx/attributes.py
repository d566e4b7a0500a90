"""Read one ONNX node: its attributes by type, its kind, its torch module."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.provenance.annotations import module_path_of


class Attributes:
    """Reads attributes of one NodeProto; an absent one is its default. It remembers which were read."""

    def __init__(self, proto: onnx.NodeProto) -> None:
        self._protos = {attribute.name: attribute for attribute in proto.attribute}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self._protos

    def settle(self, *names: str) -> None:
        """Mark attributes as read: static shapes say the same, or they have no effect on the result."""
        self._read.update(names)

    def unread(self, schema: onnx.defs.OpSchema | None) -> list[str]:
        """Attributes that were not read and do not have the default of `schema`."""
        return [
            name for name, proto in self._protos.items() if name not in self._read and not _is_default(proto, schema)
        ]

    def integer(self, name: str, default: int = 0) -> int:
        return self._protos[name].i if name in self else default

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.integer(name, default))

    def number(self, name: str, default: float = 0.0) -> float:
        """A float32 attribute as its shortest decimal: 1e-05, as the author wrote it, not 9.999999747378752e-06."""
        return float(str(np.float32(self._protos[name].f))) if name in self else default

    def text(self, name: str, default: str = "") -> str:
        return self._protos[name].s.decode() if name in self else default

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(text.decode() for text in self._protos[name].strings) if name in self else ()

    def numbers(self, name: str) -> tuple[float, ...]:
        return tuple(float(str(np.float32(number))) for number in self._protos[name].floats) if name in self else ()

    def integers(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._protos[name].ints) if name in self else None

    def constant(self) -> np.ndarray | None:
        """The value of a Constant node, in any of its spellings; None for strings and sparse tensors."""
        for name, proto in self._protos.items():
            self._read.add(name)
            match name:
                case "value":
                    return numpy_helper.to_array(proto.t)
                case "value_float":
                    return np.array(proto.f, np.float32)
                case "value_floats":
                    return np.array(proto.floats, np.float32)
                case "value_int":
                    return np.array(proto.i, np.int64)
                case "value_ints":
                    return np.array(proto.ints, np.int64)
        return None


def _is_default(proto: onnx.AttributeProto, schema: onnx.defs.OpSchema | None) -> bool:
    known = schema.attributes.get(proto.name) if schema is not None else None
    if known is None or not known.default_value.type:
        return False
    return helper.get_attribute_value(proto) == helper.get_attribute_value(known.default_value)


def schema_of(kind: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """ONNX's schema of an operator; None where ONNX has none, as for other domains."""
    try:
        return onnx.defs.get_schema(kind, opset, domain)
    except onnx.defs.SchemaError:
        return None


def op_key(domain: str, op_type: str) -> str:
    """How tables and messages name an op: "Conv", "com.microsoft::Attention"."""
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"


def module_path(node: onnx.NodeProto) -> str:
    """The torch module that `node` was exported from, e.g. "layers.0.attention.q_proj"; "" where it is not written.

    torch's exporter writes the scopes from the root inwards, and after the innermost module the name of the FX node.
    """
    place = module_path_of(node)
    return place.paths[-1] if place and place.paths else ""
