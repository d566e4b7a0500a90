"""Products of matrices, block by block, in the small kernels of numpy's BLAS.

OpenBLAS, which numpy's wheels bring, has kernels for products of up to a million multiplications that need no copies of
their operands. A weight in blocks of columns, and rows in groups, make a product many such small ones: on AVX-512 they
take two to four fifths less time than torch's BLAS, and less than oneDNN with its packed weights
(benchmarks/RESULTS.md). They use one thread.

Only a stored weight is kept in blocks (`BlockedWeight`): matrices that change from run to run were read in blocks too,
which made no train step 1.2 times as fast, and on a processor with AMX made it slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from pipeline.runtime.devices import TARGET
from pipeline.runtime.kernels.base import Launch, in_turn, planned_threads
from pipeline.runtime.kernels.weight_forms import FusedOperands, launch_in_place

SMALL = 10**6
"""Multiplications up to which OpenBLAS takes its kernels for small products."""

WIDTHS = (64, 32, 16)
"""Columns of a block; the first ones are faster."""

FEWEST_ROWS = 16
"""Rows of a group at which a block need not be narrower for a larger group."""

DEEPEST = 1024
"""Rows of the matrix, beyond which the groups that are left are too small."""

LEAST, MOST = 2**14, 2**27
"""Multiplications from which, and up to which, blocks are faster than what else there is."""


class BlockMemory(Protocol):
    """What keeps equal blocks of several programs once."""

    def share(self, packed: np.ndarray) -> np.ndarray:
        """`packed`, or an earlier one with the same bytes."""
        ...


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A matrix as (blocks, inner, columns of a block), and how many rows a product takes."""

    blocks: np.ndarray
    rows: int

    @property
    def nbytes(self) -> int:
        return int(self.blocks.nbytes)

    def in_memory(self, memory: BlockMemory) -> BlockedWeight:
        """See `ProductWeight`."""
        return BlockedWeight(memory.share(self.blocks), self.rows)

    def launch(self, of: FusedOperands) -> Launch | None:
        """See `ProductWeight`; bias, activation and sum follow in place."""
        count, inner, width = self.blocks.shape
        try:
            rows, result = of.x.view(-1, inner), of.out.view(-1, count * width)
        except RuntimeError:
            return None
        if rows.stride(1) != 1 or rows.stride(0) < inner or len(rows) % self.rows:
            return None
        groups, blocks = rows.view(1, -1, self.rows, inner), self.blocks[:, None]
        results = result.view(-1, self.rows, count, width).permute(2, 0, 1, 3)
        if len(rows) == self.rows:  # numpy takes longer for each further axis
            groups, blocks, results = groups[0, 0], self.blocks, results[:, 0]
        product = partial(_multiply, results, groups, blocks, HeldArrays())
        add_bias = None if of.bias is None else partial(torch.add, result, of.bias, out=result)
        add_other = None if of.other is None else partial(torch.add, of.out, of.other, out=of.out)
        return in_turn(product, add_bias, launch_in_place(of.after, result), add_other)


def pack_blocks(rows: int, weight: torch.Tensor) -> BlockedWeight | None:
    """The float32 matrix `weight` (columns, inner) in blocks, for products with `rows` rows; None where none fit.

    Several threads of torch share a product, which numpy's small kernels do not.
    """
    columns, inner = weight.shape
    if not HAS_SMALL_KERNELS or planned_threads() > 1 or not LEAST <= rows * weight.numel() <= MOST:
        return None
    if rows == 1:  # each number of the weight is read once, which is fastest in its own order
        return None
    fitting = list(_divisions(rows, columns, inner)) if inner <= DEEPEST else []
    if not fitting:
        return None
    width, group = next((division for division in fitting if division[1] >= min(rows, FEWEST_ROWS)), fitting[-1])
    return split_into_blocks(weight, width, group)


def split_into_blocks(weight: torch.Tensor, width: int, group: int) -> BlockedWeight:
    """`weight` (columns, inner) in blocks of `width` columns, for `group` rows at once."""
    return BlockedWeight(weight.reshape(-1, width, weight.shape[1]).transpose(1, 2).contiguous().numpy(), group)


def _divisions(rows: int, columns: int, inner: int) -> Iterator[tuple[int, int]]:
    """(columns of a block, rows of a group): the largest groups that divide the rows and are small products."""
    for width in WIDTHS:
        most = min(rows, SMALL // (width * inner))
        group = next((count for count in range(most, 0, -1) if rows % count == 0), 0)
        if columns % width == 0 and (group == rows or group >= FEWEST_ROWS // 2):
            yield width, group


class HeldArrays:
    """FusedOperands as arrays for numpy, made again when their tensors are pointed at other memory; of one launch."""

    def __init__(self) -> None:
        # Values may overflow, as in torch, whatever the caller's numpy does about that. `np.errstate` around each
        # product would cost as much as numpy's part of it.
        self._quiet = Context()
        self._quiet.run(np.seterr, all="ignore")
        self._places: list[int] = []
        self._arrays: list[np.ndarray] = []

    def arrays_of(self, *tensors: torch.Tensor) -> list[np.ndarray]:
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._arrays, self._places = [_array_at(tensor) for tensor in tensors], places
        return self._arrays

    def multiply(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        self._quiet.run(np.matmul, left, right, out)


def _array_at(tensor: torch.Tensor) -> np.ndarray:
    """An array on the memory of a float32 tensor. `tensor.numpy()` would forbid the caller to resize his tensor."""
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), np.float32)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory: Any = (ctypes.c_float * span).from_address(tensor.data_ptr())
    strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
    return np.ndarray(tuple(tensor.shape), np.float32, memory, strides=strides)


def launch_batch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
    """The products of two batches of small float32 matrices, into a result with any strides."""
    if not HAS_SMALL_KERNELS or not TARGET.get().is_host:
        return partial(torch.matmul, a, b, out=out)
    return partial(_multiply_batch, out, a, b, HeldArrays())


def _multiply_batch(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, held: HeldArrays) -> None:
    into, left, right = held.arrays_of(out, a, b)
    held.multiply(left, right, into)


def _multiply(out: torch.Tensor, rows: torch.Tensor, blocks: np.ndarray, held: HeldArrays) -> None:
    into, of_rows = held.arrays_of(out, rows)
    held.multiply(of_rows, blocks, into)


def _has_small_kernels() -> bool:
    """Whether numpy has OpenBLAS, and the processor what its small kernels are written for."""
    config: Mapping[str, Any] = np.show_config(mode="dicts") or {}
    blas = config.get("Build Dependencies", {}).get("blas", {}).get("name", "")
    return "openblas" in str(blas) and torch.backends.cpu.get_cpu_capability() == "AVX512"


HAS_SMALL_KERNELS = _has_small_kernels()
