"""Inputs whose numbers decide a shape or an attribute, so that they must be known when the operator is imported."""

from __future__ import annotations

from collections.abc import Mapping

import onnx


def value_arguments(key: str, node: onnx.NodeProto) -> list[str]:
    """The names of the inputs of `node` that have to be known numbers; `key` as `op_key` gives it."""
    places = range(len(node.input)) if key in EVERY else PLACES.get(key, ())
    return [node.input[place] for place in places if place < len(node.input) and node.input[place]]


REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip

EVERY = frozenset({"Range", "ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"})

PLACES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS, (1,)),
    "AffineGrid": (1,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "If": (0,),
    "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "SequenceAt": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    "com.microsoft::Range": (0, 1, 2),
}
