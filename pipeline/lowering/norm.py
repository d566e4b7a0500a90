"""Normalisations over some axes of input 0, and the softmaxes."""

from __future__ import annotations

from pipeline.ir.builder import Emitter
from pipeline.lowering.emitter import axis_in_range, emitter, floating, same_dtype
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]

EMITTERS: dict[str, Emitter] = {
    "LayerNormalization": emitter(
        Kind.LayerNormalization, "axis=i,epsilon=f", same_dtype, floating, axis_in_range(), inputs=(2, 3)
    ),
    "RMSNormalization": emitter(
        Kind.RMSNormalization, "axis=i,epsilon=f", same_dtype, floating, axis_in_range(), inputs=2
    ),
    "BatchNormalization": emitter(Kind.BatchNormalization, "epsilon=f", floating, inputs=5),
    "InstanceNormalization": emitter(Kind.InstanceNormalization, "epsilon=f", same_dtype, floating, inputs=3),
    "GroupNormalization": emitter(Kind.GroupNormalization, "groups=i,epsilon=f", same_dtype, floating, inputs=3),
    "Softmax": emitter(Kind.Softmax, "axis=i", same_dtype, floating, axis_in_range()),
    "LogSoftmax": emitter(Kind.LogSoftmax, "axis=i", same_dtype, floating, axis_in_range()),
}

# Torch has no out= form of these, so their kernels compute into scratch and write the output last. Softmax writes its
# output while it still reads its input, and is left out.
INPLACE: dict[str, tuple[int, ...]] = dict.fromkeys(
    ("LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization"),
    (0,),
)

VIEWS: dict[str, ViewRule] = {}
