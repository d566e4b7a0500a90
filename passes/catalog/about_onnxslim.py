"""onnxslim's fusion patterns and optimizations, by the names in its own registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["ONNXSLIM"]

ONNXSLIM: Final[Mapping[str, About]] = {
    "EliminationConcat": structure("Make one Concat of a Concat into a Concat over the same axis"),
    "EliminationReshape": structure("Of two Reshapes in a row, drop the first"),
    "EliminationReshapeAs": structure("Drop a Reshape to a shape that is put together from the value's own"),
    "EliminationSlice": structure("Make one Slice of two in a row"),
    "EliminationTranspose": structure("Make one Transpose of two in a row, or none if they cancel"),
    "EliminationTransposeAsReshape": structure("Make a Reshape of a Transpose that moves only axes of one element"),
    "EliminationTransposeViewTranspose": structure("Drop two Transposes that cancel around a Reshape"),
    "EliminationUnsqueeze": structure("Make one Unsqueeze of two in a row"),
    "FusionConcatReshape": structure("Make a constant with −1 of a target shape put together by Concat"),
    "FusionConvAdd": values("Make the Add behind a Conv its bias"),
    "FusionConvBN": values("Compute a weight and a bias for the Conv in front of a BatchNormalization, and drop that"),
    "FusionConvMul": values("Put a constant factor behind a Conv into its weight and bias"),
    "FusionConvTransposeAdd": values("Make the Add behind a ConvTranspose its bias"),
    "FusionConvTransposeBN": values(
        "Compute a weight and a bias for the ConvTranspose in front of a BatchNormalization, and drop that"
    ),
    "FusionConvTransposeMul": values("Put a constant factor behind a ConvTranspose into its weight and bias"),
    "FusionGemm": structure("Make Gemm of a MatMul and the Add of a bias"),
    "FusionGemmAdd": values("Make the Add behind a Gemm part of its bias"),
    "FusionGemmMul": values("Put a constant factor behind a Gemm into its weight"),
    "FusionPadConv": structure("Put a Pad by 0 into the pads of the Conv behind it"),
    "FusionReduce": structure("Make keepdims of an Unsqueeze behind a reduction of that axis"),
    "constant_folding": values("Compute what depends on constants alone"),
    "dead_node_elimination": values("Drop operators that do nothing, and those that nothing reads"),
    "shape_inference": structure("Write the inferred type and shape of every value into the model"),
    "subexpression_elimination": values("Compute what is computed several times only once"),
    "weight_tying": values("Keep one of several initializers that hold the same numbers"),
}
