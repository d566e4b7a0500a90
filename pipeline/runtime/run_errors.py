"""Classify errors of ops in a run. Shapes were checked before, so an index out of range comes from the feed, and a
result of another dtype or shape from the trace.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.errors import DataError
from pipeline.ir import Op, TensorSpec

Named = tuple[str, TensorSpec]


class ResultMismatch(RuntimeError):
    """An op made another dtype or shape than the graph says, as an op traced on another device may."""


def is_data_error(error: Exception) -> bool:
    """Whether torch complains about the data, such as `index 9 is out of bounds for dimension 0 with size 4`."""
    return isinstance(error, IndexError) or any(words in str(error) for words in OF_DATA)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch's allocator on the CPU, or numpy's, got no memory for what a kernel computes on the side."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def data_error(place: str, ins: Iterable[Named], error: Exception) -> DataError:
    """The DataError for `error` of the op at `place`, which reads `ins`."""
    indices = [f"{name}: {spec.dtype}{list(spec.shape)}" for name, spec in ins if "int" in spec.dtype]
    read = f"; the op reads it from {' or '.join(indices)}" if indices else ""
    return DataError(f"{place} failed: {error}; look for an index that is out of range in the feed{read}")


def place_of(op: Op) -> str:
    """How messages name an op: `op 'index_copy' (aten.index_copy.default, model.py:5)`; its number for no name."""
    return f"op {repr(op.name) if op.name else op.oid} ({', '.join(filter(None, (op.operator, op.line)))})"


OF_DATA = ("out of range", "out of bounds")
"""In messages of torch's RuntimeErrors (torch 2.13), where operators have no IndexError."""
