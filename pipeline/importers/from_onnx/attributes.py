"""The attributes of an ONNX node, by the type that the reader expects."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

__all__ = ["Attributes"]


class Attributes:
    """Reads attributes of one NodeProto; an absent one is its default."""

    def __init__(self, proto: onnx.NodeProto) -> None:
        self._protos = {attribute.name: attribute for attribute in proto.attribute}

    def __contains__(self, name: str) -> bool:
        return name in self._protos

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

    def integers(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._protos[name].ints) if name in self else None

    def constant(self) -> np.ndarray | None:
        """The value of a Constant node, in any of its spellings; None for strings and sparse tensors."""
        for name, proto in self._protos.items():
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
