"""The stages of onnxscript's optimizer, and its default rewrite rules by the names that they are exported under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["ONNXSCRIPT", "ONNXSCRIPT_REWRITES"]

ONNXSCRIPT: Final[Mapping[str, About]] = {
    "common_subexpression_elimination": values("Compute what is computed several times only once"),
    "constant_folding": values("Compute what depends on constants alone, up to a limit of size"),
    "inline": structure("Put the bodies of functions in place of their calls"),
    "rewrite_rules": values("Apply the default rewrite rules, which onnxscript_rewrites lists one by one"),
    "shape_inference": structure("Infer shapes from node to node while folding constants"),
}

ONNXSCRIPT_REWRITES: Final[Mapping[str, About]] = {
    "add_0_rule": structure("Drop + 0"),
    "cast_cast_rule": structure("Drop a Cast whose result is cast again, where that loses nothing"),
    "cast_constant_of_shape_rule": structure("Make ConstantOfShape of the dtype that a Cast behind it makes"),
    "cast_constant_of_shape_without_value_rule": structure("The same where ConstantOfShape names no value"),
    "collapse_slice_rule": structure("Drop a Slice of everything, by its constants"),
    "collapse_slice2_rule": structure("Drop a Slice of everything, by the shapes before and after it"),
    "div_by_1_rule": structure("Drop ÷ 1"),
    "dropout_inference_rule": structure("Drop a Dropout that is not in training"),
    "dropout_zero_rule": structure("Drop a Dropout of ratio 0"),
    "flatten_to_reshape_rule": structure("Make Reshape of Flatten"),
    "fuse_batchnorm_into_conv_rule": values(
        "Compute a weight and a bias for the Conv in front of a BatchNormalization, and drop that"
    ),
    "fuse_batchnorm_into_conv_transpose_rule": values(
        "Compute a weight and a bias for the ConvTranspose in front of a BatchNormalization, and drop that"
    ),
    "fuse_batchnorm_into_gemm_rule": values(
        "Compute a weight and a bias for the Gemm in front of a BatchNormalization, and drop that"
    ),
    "fuse_pad_into_conv_integer_rule": structure("Put a Pad by 0 into the pads of the ConvInteger behind it"),
    "fuse_pad_into_conv_rule": structure("Put a Pad by 0 into the pads of the Conv behind it"),
    "materialize_reshape_shape_rule": structure("Make a constant of a computed target shape that is known"),
    "max_max_rule": values("Make one Max of two with constants"),
    "max_min_rule": values("Make Clip of Max and Min with constants"),
    "min_max_rule": values("Make Clip of Min and Max with constants"),
    "min_min_rule": values("Make one Min of two with constants"),
    "mul_by_1_rule": structure("Drop × 1"),
    "no_op_cast_rule": structure("Drop a Cast to the dtype that the value has already"),
    "no_op_dynamic_scatter_nd_rule": structure("Drop a ScatterND that writes everything, by a computed index"),
    "no_op_expand_rule": structure("Drop an Expand to the shape that the value has already"),
    "no_op_static_scatter_nd_rule": structure("Drop a ScatterND that writes everything, by a constant index"),
    "no_op_transpose_rule": structure("Drop a Transpose that moves no axis"),
    "normalize_pad_format_conv_integer_rule": structure("Write auto_pad of ConvInteger as pads"),
    "normalize_pad_format_conv_rule": structure("Write auto_pad of Conv as pads"),
    "one_reshape_matmul_reshape_rule": structure("Drop Reshapes of one operand around a MatMul that broadcasts anyway"),
    "remove_optional_bias_from_conv_rule": values("Drop the bias of a Conv where it is 0"),
    "remove_optional_bias_from_conv_transpose_rule": values("Drop the bias of a ConvTranspose where it is 0"),
    "remove_optional_bias_from_gemm_rule": values("Drop the bias of a Gemm where it is 0"),
    "remove_optional_bias_from_qlinear_conv_rule": values("Drop the bias of a QLinearConv where it is 0"),
    "reshape_reshape_rule": structure("Of two Reshapes in a row, drop the first"),
    "slice_split_rule": structure("Make Split of two Slices that are the halves of a value"),
    "squeeze_reshape_1d_rule": structure("Drop Squeeze and Reshape in a row that leave a vector as it is"),
    "sub_0_rule": structure("Drop − 0"),
    "successive_clip_relu_rule": values("Make one Clip of Clip and Relu"),
    "successive_clip_rule": values("Make one Clip of two in a row"),
    "successive_relu_clip_rule": values("Make one Clip of Relu and Clip"),
    "successive_relu_rule": structure("Of two Relus in a row, drop one"),
    "transpose_transpose_rule": structure("Make one Transpose of two in a row, or none if they cancel"),
    "two_reshapes_matmul_reshape_rule": structure(
        "Drop Reshapes of both operands around a MatMul that broadcasts anyway"
    ),
    "unsqueeze_unsqueeze_rule": structure("Make one Unsqueeze of two in a row"),
}
