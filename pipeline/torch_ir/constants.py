"""The values of constants in JSON, exact to the bit, and large ones in a safetensors file next to it.

    {"data": [[1.0, 0.0]], "dtype": "float32"}                            as pytorch-ir writes it
    {"data": [1.0, "nan"], "dtype": "float32", "bytes": "0000803f…"}      the bytes count: JSON has no such number
    {"file": "m.constants.ab12.safetensors", "key": "mask", "dtype": "float32", "shape": [512, 512]}

`shape` is written where the nested list does not show it (an empty tensor), `strides` where it is not contiguous. Of a
tensor whose elements overlap or leave gaps, the whole memory is written, and `view` is the shape of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field, StrictInt, StrictStr

from pipeline.importers.from_torch.tensors import holds_values, is_dense
from pipeline.ir.graph import DTYPE_BITS
from pipeline.runtime.tensors import dtype_name, materialize_on_cpu, raw_bytes, with_strides
from pipeline.torch_ir.errors import SerializationError, Unexpected, a_type, explain_as, parse

THRESHOLD = 4096
"""Bytes: larger constants go to a file of their own."""

Shape: TypeAlias = Annotated[
    tuple[Annotated[StrictInt, Field(ge=0, lt=2**63)], ...], explain_as("a list of sizes, each an integer of 0 or more")
]


@dataclass(frozen=True)
class _ConstantData:
    dtype: StrictStr
    data: Any = None
    bytes: Annotated[StrictStr, explain_as("a string of hexadecimal digits")] | None = None
    file: StrictStr | None = None
    key: StrictStr | None = None
    shape: Shape | None = None
    strides: Shape | None = None
    view: Shape | None = None

    @property
    def required_shape(self) -> Sequence[int]:
        if self.shape is None:
            raise KeyError("shape")
        return self.shape


def write_constant(
    key: str, tensor: torch.Tensor, apart: dict[str, torch.Tensor] | None = None, threshold: float = THRESHOLD
) -> dict[str, Any]:
    """One constant. With `apart`, the bytes of one over `threshold` are put there; the caller names the `file`.

    Raises:
        SerializationError: it holds no values, as on meta, or is no tensor.
    """
    tensor = materialize_on_cpu(with_values(key, tensor))
    facts: dict[str, Any] = {"dtype": dtype_name(tensor.dtype)}
    if not tensor.is_contiguous():
        facts["strides"] = list(tensor.stride())
    if not is_dense(tensor):
        facts["view"] = list(tensor.shape)
        tensor = _span_memory(tensor)
    if apart is not None and tensor.nbytes > threshold:
        apart[key] = raw_bytes(tensor)
        return {"key": key, "shape": list(tensor.shape), **facts}
    if not tensor.numel():
        facts["shape"] = list(tensor.shape)
    if not _is_exact_in_json(tensor):
        facts |= {"bytes": bytes(raw_bytes(tensor).tolist()).hex(), "shape": list(tensor.shape)}
    return {"data": _to_list(tensor), **facts}


def with_values(key: str, tensor: Any) -> torch.Tensor:
    """
    Raises:
        SerializationError: the constant holds no values, as on meta, or is no tensor.
    """
    if isinstance(tensor, torch.Tensor) and holds_values(tensor):
        return tensor
    found = "a tensor on meta" if getattr(tensor, "is_meta", False) else a_type(tensor)
    raise SerializationError(f"constant {key!r}: found {found}, expected one with values; give one, or remove it")


def read_constant(key: str, data: Mapping[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """The tensor that `write_constant` wrote; `files` holds what the files next to the JSON contain.

    Raises:
        Unexpected: a dtype that torch has not, a file that lacks the constant, or data of another size.
    """
    try:
        constant = parse(_ConstantData, data)
        name = constant.dtype.removeprefix("torch.")
        if name not in DTYPE_BITS:
            raise Unexpected(f"unknown dtype {name!r}; known: {', '.join(DTYPE_BITS)}")
        tensor = _values(constant, getattr(torch, name), files)
        if constant.view is not None:
            return tensor.as_strided(constant.view, constant.strides or ())
        return with_strides(tensor, constant.strides)
    except (KeyError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise Unexpected(f"constant {key!r} cannot be read: {what}") from error


def _values(
    constant: _ConstantData, dtype: torch.dtype, files: Mapping[str, Mapping[str, torch.Tensor]]
) -> torch.Tensor:
    if constant.file is not None:
        return _of_bytes(files[constant.file][constant.key or ""], dtype, constant)
    if constant.bytes is not None:
        content = bytearray.fromhex(constant.bytes)
        raw = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return _of_bytes(raw, dtype, constant)
    tensor = torch.tensor(constant.data, dtype=dtype)
    return tensor if constant.shape is None else tensor.view(constant.shape)


def _of_bytes(raw: torch.Tensor, dtype: torch.dtype, constant: _ConstantData) -> torch.Tensor:
    """
    Raises:
        Unexpected: there are more or fewer bytes than the shape says.
    """
    shape = constant.required_shape
    expected = math.prod(shape) * dtype.itemsize
    if raw.nbytes != expected:
        raise Unexpected(f"found {raw.nbytes} bytes, expected {expected} of {constant.dtype}{list(shape)}")
    return raw.view(dtype).view(tuple(shape))


def _span_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first element to the last, as a vector."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))


def _is_exact_in_json(tensor: torch.Tensor) -> bool:
    """Whether JSON's numbers reproduce the elements to the bit."""
    if tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return bool(torch.isfinite(tensor).all())
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _to_list(tensor: torch.Tensor) -> Any:
    """A nested list of numbers; what JSON has not is a string, a complex number a pair."""
    if tensor.dtype.is_complex:
        return _spell_nonfinite(torch.view_as_real(tensor).tolist())
    wide = tensor.float() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
    return wide.tolist() if _is_exact_in_json(tensor) else _spell_nonfinite(wide.tolist())


def _spell_nonfinite(item: Any) -> Any:
    if isinstance(item, list):
        return [_spell_nonfinite(part) for part in item]
    return repr(item) if isinstance(item, float) and not math.isfinite(item) else item
