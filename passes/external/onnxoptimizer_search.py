"""Which pass of onnxoptimizer is the first to change a model? In the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import onnx

from passes.external.first_change import first_change
from passes.external.short_names import ShortNames

__all__ = ["ACTS_ON", "optimize_first"]


def optimize_first(desk: dict[str, Any], model: bytes, names: Sequence[str]) -> tuple[int, bytes | None]:
    """In the worker: run each of `names` alone on a serialized model, up to the first that changes it.

    Returns:
        How many passes changed nothing, and the model that the next one made; None if there is no next one.
    """
    if desk.get(GIVEN, (b"", None))[0] != model:
        desk[GIVEN] = (model, _Given(model))
    given: _Given = desk[GIVEN][1]
    index, made = first_change(names, given.made_by, given.unlikely(names))
    return index, None if made is None else given.restored(made)


class _Given:
    """A model as the library is given it: with short names, in bytes."""

    def __init__(self, model: bytes) -> None:
        proto = onnx.load_from_string(model)
        self._names = ShortNames(proto.graph)
        self._bytes = proto.SerializeToString()
        self._ops = set(_ops(proto.graph))

    @cached_property
    def _nothing(self) -> bytes:
        """What passes that change nothing make of it: what `nop` makes, byte for byte."""
        return _optimized(self._bytes, ["nop"])

    def unlikely(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that act on operators that the model has not, as far as we know the passes."""
        return [name for name in names if not self._ops.issuperset(ACTS_ON.get(name, ()))]

    def made_by(self, names: Sequence[str]) -> bytes | None:
        """What passes make, one after the other; None when that is the same model."""
        made = _optimized(self._bytes, names)
        # A model that the library has written before is nothing new to it, so `nop` is seldom needed.
        return None if made == self._bytes or made == self._nothing else made

    def restored(self, made: bytes) -> bytes:
        proto = onnx.load_from_string(made)
        self._names.restore(proto.graph)
        return proto.SerializeToString()


def _ops(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _ops(inner)


def _optimized(model: bytes, names: Sequence[str]) -> bytes:
    # What onnxoptimizer.optimize calls, which reads and writes the result once more: a third of a pass.
    from onnxoptimizer import onnx_opt_cpp2py_export as library  # type: ignore[attr-defined]

    return library.optimize(model, list(names))


GIVEN: Final = "onnxoptimizer, given"

ACTS_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "nop": ("",),
    "eliminate_if_with_const_cond": ("If",),
    "eliminate_nop_cast": ("Cast",),
    "eliminate_nop_concat": ("Concat",),
    "eliminate_nop_dropout": ("Dropout",),
    "eliminate_nop_expand": ("Expand",),
    "eliminate_nop_flatten": ("Flatten",),
    "eliminate_nop_monotone_argmax": ("ArgMax",),
    "eliminate_nop_pad": ("Pad",),
    "eliminate_nop_reshape": ("Reshape",),
    "eliminate_nop_split": ("Split",),
    "eliminate_nop_transpose": ("Transpose",),
    "eliminate_shape_gather": ("Shape", "Gather"),
    "eliminate_shape_op": ("Shape",),
    "eliminate_slice_after_shape": ("Shape", "Slice"),
    "extract_constant_to_initializer": ("Constant",),
    "fuse_add_bias_into_conv": ("Conv", "Add"),
    "fuse_bn_into_conv": ("Conv", "BatchNormalization"),
    "fuse_concat_into_reshape": ("Concat", "Reshape"),
    "fuse_consecutive_concats": ("Concat",),
    "fuse_consecutive_log_softmax": ("Softmax", "Log"),
    "fuse_consecutive_reduce_unsqueeze": ("Unsqueeze",),
    "fuse_consecutive_slices": ("Slice",),
    "fuse_consecutive_squeezes": ("Squeeze",),
    "fuse_consecutive_transposes": ("Transpose",),
    "fuse_consecutive_unsqueezes": ("Unsqueeze",),
    "fuse_matmul_add_bias_into_gemm": ("MatMul", "Add"),
    "fuse_pad_into_conv": ("Pad", "Conv"),
    "fuse_pad_into_pool": ("Pad",),
    "fuse_qkv": ("MatMul",),
    "fuse_transpose_into_gemm": ("Transpose", "Gemm"),
    "rewrite_where": ("Where",),
}
"""Pass → operators without which it is not expected to do anything. Only the order of work depends on it: what is
expected is looked at, and a pass that is not listed is tried alone."""
