"""Matrix products in C++: of stored weights, of small matrices, and of any other matrix.

A stored weight is packed into panels of columns once (`pack_panels`). A small matrix fits into a near cache and is read
as it is (`launch_small`); its kernel also adds a bias, and applies ReLU or the gradient of ReLU. Any other matrix is
packed at each call (`launch_any`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pipeline.ops import Kind
from pipeline.ops.fused import PLAIN, Activation
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs, planned_threads
from pipeline.runtime.kernels.native.kernel_library import NativeKernel, NativeLibrary, are_floats
from pipeline.runtime.kernels.native.rows import settings_of
from pipeline.runtime.kernels.weight_forms import FusedOperands, PackedMemory, activation_of

LARGEST = 2**19
"""The most elements of the matrix in `launch_small`. At 2 MiB panels are as fast."""


def launch_small(
    library: NativeLibrary,
    x: torch.Tensor,
    matrix: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    gate: torch.Tensor | None = None,
) -> Launch | None:
    """`x` times a small matrix plus `bias`; then ReLU, or the gradient of ReLU: 0 where `gate` is 0.

    Args:
        library: the compiled kernels.
        x: (rows, inner), float32, of any strides.
        matrix: (inner, columns), float32, row-major or transposed.
        out: (rows, columns), float32, contiguous.
        bias: (columns,), float32, contiguous.
        relu: apply ReLU to the sum.
        gate: the result of a ReLU, of the shape of `out`, contiguous.

    Returns:
        The launch; None if the kernel does not take these operands, or torch has several threads.
    """
    added = [tensor for tensor in (bias, gate) if tensor is not None]
    if planned_threads() > 1 or not are_floats(x, matrix, out, *added) or matrix.numel() > LARGEST:
        return None
    if x.dim() != 2 or matrix.dim() != 2 or 1 not in matrix.stride():
        return None
    if not all(tensor.is_contiguous() for tensor in (out, *added)):
        return None
    if (bias is not None and bias.shape != matrix.shape[1:]) or (gate is not None and gate.shape != out.shape):
        return None
    columns = matrix.shape[1]
    if x.shape[1] != len(matrix) or out.shape != (len(x), columns):
        return None
    step, column = (columns, 1) if matrix.is_contiguous() else matrix.stride()
    settings = (len(x), columns, len(matrix), *x.stride(), step, column, int(bias is not None), int(gate is not None))
    floor = 0.0 if relu else -math.inf
    return library.launch("multiply_near_matrices", [out], [x, matrix, *added], (*settings, floor))


def relu_product(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    """The launch of a `Kind.ReluProduct`, whose operands are x, matrix, and a bias and a gate if it has them."""
    (x, matrix, *more), gated = ins, bool(attrs["gate"])
    bias, gate = more[0] if attrs["bias"] else None, more[-1] if gated else None
    return launch_small(library, x, matrix, outs[0], bias=bias, relu=not gated, gate=gate)


SHARED = 2**22
"""Multiplications of a product; with this many or more, torch's threads are faster than our single thread."""


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A stored matrix in panels of columns, as the kernel reads them.

    native: the library with the kernel.
    panels: float32, `columns` padded to whole panels, times `inner`.
    columns: of the matrix, and so of the result.
    inner: the length of the rows that are multiplied with it.
    """

    native: NativeLibrary
    panels: torch.Tensor
    columns: int
    inner: int

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def in_memory(self, memory: PackedMemory) -> NativeWeight:
        """See `ProductWeight`."""
        return replace(self, panels=memory.share(self.panels))

    def launch(self, of: FusedOperands) -> Launch | None:
        """See `ProductWeight`; `other` may be the memory of `out`."""
        product = RowProduct.find(of, (self.inner, self.columns))
        return product and self.native.launch(
            "multiply_packed", [of.out], [product.rows, self.panels, *product.added], product.settings
        )


def pack_panels(library: NativeLibrary, rows: int, weight: torch.Tensor) -> NativeWeight | None:
    """The float32 matrix `weight` (columns, inner) in panels; None where torch is faster, with more threads."""
    columns, inner = weight.shape
    if not weight.numel() or not is_faster_alone(rows * weight.numel()):
        return None
    panels = torch.empty(-(-columns // library.panel) * library.panel * inner)
    library.launch("pack_panels", [panels], [weight], [inner, columns, weight.stride(1), weight.stride(0)])()
    return NativeWeight(library, panels, columns, inner)


@dataclass(frozen=True, slots=True)
class RowProduct:
    """The operands of a product as its kernel takes them.

    rows: x as a matrix (rows, inner).
    added: the bias and the other summand, those that are there.
    settings: sizes, strides, flags of the two summands, and the activation, in the kernel's order.
    """

    rows: torch.Tensor
    added: tuple[torch.Tensor, ...]
    settings: tuple[float, ...]

    @classmethod
    def find(cls, of: FusedOperands, sizes: tuple[int, int]) -> RowProduct | None:
        """The product with a matrix of `sizes` (inner, columns); None if the kernel does not take the operands."""
        (x, out, bias, other, after), (inner, columns) = of, sizes
        summands = [tensor for tensor in (bias, other) if tensor is not None]
        if not are_floats(x, out, *summands) or x.dim() < 2 or x.shape[-1] != inner:
            return None
        if out.shape != (*x.shape[:-1], columns) or (other is not None and other.shape != out.shape):
            return None
        try:
            rows = x.view(-1, x.shape[-1])
            added = None if other is None else other.view(-1, columns)
            bias = None if bias is None else bias.view(columns)
        except RuntimeError:
            return None
        if not out.is_contiguous():
            return None
        if (bias is not None and bias.stride(0) != 1 and columns > 1) or (added is not None and added.stride(1) != 1):
            return None
        dims = (len(rows), columns, inner, rows.stride(0), rows.stride(1), columns)
        more = (int(bias is not None), int(added is not None), 0 if added is None else added.stride(0))
        kept = tuple(tensor for tensor in (bias, added) if tensor is not None)
        return cls(rows, kept, (*dims, *more, *settings_of(after)))


def launch_any(
    library: NativeLibrary,
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    after: Activation = PLAIN,
) -> Launch | None:
    """`x` (…, inner) times a matrix (inner, columns) that may change from run to run, plus `bias`, then `after`.

    Returns:
        The launch; None if the kernel does not take these operands, or torch is faster.
    """
    if matrix.dim() != 2 or not are_floats(matrix) or not is_faster_alone(x.numel() * matrix.shape[1]):
        return None
    product = RowProduct.find(FusedOperands(x, out, bias, after=after), (matrix.shape[0], matrix.shape[1]))
    return product and library.launch(
        "multiply_any", [out], [product.rows, matrix, *product.added], (*matrix.stride(), *product.settings)
    )


def is_faster_alone(multiplications: int) -> bool:
    """Whether our single thread computes a product of this many multiplications faster than torch's threads."""
    return planned_threads() == 1 or multiplications < SHARED


def linear(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    """The launch of a `Kind.LinearPointwise` whose weight is not stored in panels and that adds no other tensor."""
    if "packed" in attrs or attrs["add"]:
        return None
    weight = ins[1].t() if attrs["trans"] else ins[1]
    return launch_any(library, ins[0], weight, ins[2] if attrs["bias"] else None, outs[0], activation_of(attrs))


KERNELS: dict[Kind, NativeKernel] = {Kind.LinearPointwise: linear, Kind.ReluProduct: relu_product}
