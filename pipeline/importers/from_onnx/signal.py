"""Fourier transforms. They are computed in float64: errors of float32 would add up to more than a rounding."""

from __future__ import annotations

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.shape import by_places, move, reshape, with_constant
from pipeline.ir.graph import Attr, InputRef, TensorSpec

BY_LENGTH = 2
"""torch's number for a transform that is divided by its length."""


def dft(node: Node, *, inverse: bool = False, onesided: bool = False) -> None:
    """The last axis holds real and imaginary part, or the real part alone."""
    rank = node.spec(0).rank
    default = -2 if node.opset >= 20 else 1
    axis = node.attributes.integer("axis", default)
    if node.opset >= 20 and node.has(2):
        axis = int(node.need_constant(2, "the axis").item())
    axis %= rank
    whole = node.spec(0).sizes[axis]
    if inverse and onesided:
        whole = 2 * (whole - 1)
    length = int(node.need_constant(1, "the length").item()) if node.has(1) else whole
    transform(node, node.operand(0), axis, length, inverse=inverse, onesided=onesided)


def transform(node: Node, vid: int, axis: int, length: int, *, inverse: bool, onesided: bool) -> None:
    """The transform of `vid` along `axis`, which is cut or filled with zeros to `length`."""
    spec = node.vid_spec(vid)
    vid = node.convert(vid, "float64")
    taken = length // 2 + 1 if inverse and onesided else length
    if taken != spec.sizes[axis]:
        pads = [0] * (2 * spec.rank)
        pads[spec.rank + axis] = taken - spec.sizes[axis]
        vid = move(node, vid, with_constant(spec.sizes, pads, 0.0))
    numbers = node.vid_spec(vid).sizes[:-1]
    ends = (*numbers[:axis], length // 2 + 1 if onesided and not inverse else length, *numbers[axis + 1 :])
    call: dict[str, Attr] = {"self": InputRef(0), "dim": (axis,)}
    call["normalization"] = BY_LENGTH if inverse else 0
    if inverse and onesided:
        vid = as_complex(node, vid, numbers)
        real = node.step("aten._fft_c2r.default", [vid], TensorSpec(ends, "float64"), {**call, "last_dim_size": length})
        vid = reshape(node, real, (*ends, 1))
    elif spec.sizes[-1] == 1 and not inverse:
        vid = reshape(node, vid, numbers)
        call["onesided"] = onesided
        vid = node.step("aten._fft_r2c.default", [vid], TensorSpec(ends, "complex128"), call)
        vid = node.step("aten.view_as_real.default", [vid], TensorSpec((*ends, 2), "float64"), {"self": InputRef(0)})
    else:
        if onesided:
            raise node.refusal("it gives half of the transform of complex numbers, expected real numbers")
        vid = as_complex(node, vid, numbers)
        call["forward"] = not inverse
        vid = node.step("aten._fft_c2c.default", [vid], TensorSpec(ends, "complex128"), call)
        vid = node.step("aten.view_as_real.default", [vid], TensorSpec((*ends, 2), "float64"), {"self": InputRef(0)})
    node.emit_conversion(vid)


def as_complex(node: Node, vid: int, numbers: tuple[int, ...]) -> int:
    """Pairs as complex numbers; a real part alone gets an imaginary part of 0."""
    spec = node.vid_spec(vid)
    if spec.sizes[-1] == 1:
        pads = (0,) * (2 * spec.rank - 1) + (1,)
        vid = move(node, vid, with_constant(spec.sizes, pads, 0.0))
    return node.step("aten.view_as_complex.default", [vid], TensorSpec(numbers, "complex128"), {"self": InputRef(0)})


def stft(node: Node, *, onesided: bool = True) -> None:
    """Frames are gathered, weighted by the window and transformed."""
    signal, hop = node.spec(0), int(node.need_constant(1, "the step").item())
    length = int(node.need_constant(3, "the length of a frame").item()) if node.has(3) else node.spec(2).sizes[0]
    frames = (signal.sizes[1] - length) // hop + 1
    places = np.arange(frames)[:, None] * hop + np.arange(length)
    parts = signal.sizes[2] if signal.rank == 3 else 1
    framed = TensorSpec((signal.sizes[0], frames, length, parts), signal.dtype)
    columns = (*signal.sizes[:2], parts)
    vid = node.operand(0) if signal.rank == 3 else reshape(node, node.operand(0), columns)
    vid = move(node, vid, by_places(node, columns, 1, places))
    if node.has(2):
        vid = node.step("aten.mul.Tensor", [vid, reshape(node, node.operand(2), (length, 1))], framed)
    transform(node, vid, 2, length, inverse=False, onesided=onesided)


IMPORTERS: dict[str, Importer] = {"DFT": dft, "STFT": stft}
