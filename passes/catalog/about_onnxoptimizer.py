"""onnxoptimizer's passes. onnxsim has most of them too, some in versions of its own (`about_onnxsim.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["ONNXOPTIMIZER"]

ONNXOPTIMIZER: Final[Mapping[str, About]] = {
    "nop": structure("Do nothing; the library's own pass for tests"),
    "adjust_add": structure("Put the constant operand of an Add on the right, where other passes look for it"),
    "adjust_slice_and_matmul": structure(
        "Put a Slice of a constant behind the product with another constant, so that the product can be folded"
    ),
    "eliminate_common_subexpression": values("Compute what is computed several times only once"),
    "eliminate_consecutive_idempotent_ops": structure(
        "Of two Relu, Ceil, Floor, Round, Sign or Reshape in a row, drop the first"
    ),
    "eliminate_deadend": structure("Drop operators whose results nothing reads"),
    "eliminate_duplicate_initializer": values("Keep one of several initializers that hold the same numbers"),
    "eliminate_identity": structure("Drop Identity"),
    "eliminate_if_with_const_cond": structure("Put the branch in place of an If whose condition is a constant"),
    "eliminate_nop_cast": structure("Drop a Cast to the dtype that the value has already"),
    "eliminate_nop_concat": structure("Drop a Concat of a single value"),
    "eliminate_nop_dropout": structure("Drop a Dropout of ratio 0"),
    "eliminate_nop_expand": structure("Drop an Expand to the shape that the value has already"),
    "eliminate_nop_flatten": structure("Drop a Flatten that leaves the shape as it is"),
    "eliminate_nop_monotone_argmax": structure(
        "Drop Softmax, LogSoftmax, Exp, Log or Sqrt in front of an ArgMax, which sees the same order without it"
    ),
    "eliminate_nop_pad": structure("Drop a Pad by 0"),
    "eliminate_nop_reshape": structure("Drop a Reshape to the shape that the value has already"),
    "eliminate_nop_split": structure("Drop a Split into a single piece"),
    "eliminate_nop_transpose": structure("Drop a Transpose that moves no axis"),
    "eliminate_nop_with_unit": values("Drop + 0, − 0, × 1, ÷ 1, ** 1, and what else an operand makes void"),
    "eliminate_shape_gather": structure("Put a constant in place of a Gather of one known dim of a Shape"),
    "eliminate_shape_op": structure("Put a constant in place of a Shape that is known"),
    "eliminate_slice_after_shape": structure("Put a constant in place of a Slice of known dims of a Shape"),
    "eliminate_unused_initializer": structure("Drop initializers that nothing reads"),
    "extract_constant_to_initializer": structure("Make an initializer of each Constant"),
    "fuse_add_bias_into_conv": structure("Make the Add behind a Conv its bias"),
    "fuse_bn_into_conv": structure(
        "Put BatchNormalization into the weight and bias of the Conv before it, by operators on constants that are "
        "left to be folded"
    ),
    "fuse_concat_into_reshape": structure("Make a constant with −1 of a target shape put together by Concat"),
    "fuse_consecutive_concats": structure("Make one Concat of a Concat into a Concat over the same axis"),
    "fuse_consecutive_log_softmax": structure("Make LogSoftmax of Softmax and Log"),
    "fuse_consecutive_reduce_unsqueeze": structure("Make keepdims of an Unsqueeze behind a reduction of that axis"),
    "fuse_consecutive_slices": structure("Make one Slice of two Slices over different axes"),
    "fuse_consecutive_squeezes": structure("Make one Squeeze of two in a row"),
    "fuse_consecutive_transposes": structure("Make one Transpose of two in a row, or none if they cancel"),
    "fuse_consecutive_unsqueezes": structure("Make one Unsqueeze of two in a row"),
    "fuse_matmul_add_bias_into_gemm": structure("Make Gemm of a MatMul of matrices and the Add of a bias"),
    "fuse_pad_into_conv": structure("Put a Pad by 0 into the pads of the Conv behind it"),
    "fuse_pad_into_pool": structure("Put a Pad into the pads of the AveragePool or MaxPool behind it"),
    "fuse_qkv": structure("Merge three MatMuls that read the same value into one, with a Split behind it"),
    "fuse_transpose_into_gemm": structure("Put the Transpose of an operand of Gemm into transA or transB"),
    "lift_lexical_references": structure(
        "Write at each If and Loop, in an attribute __control_inputs that is not ONNX, what it reads from around it"
    ),
    "rename_input_output": structure("Give the model's inputs and outputs other names, by number"),
    "replace_einsum_with_matmul": structure("Make MatMul of an Einsum that is a product of matrices"),
    "rewrite_input_dtype": structure("Make int32 inputs of the model's int64 inputs, with a Cast behind each"),
    "rewrite_where": structure("Drop a Not in front of Where by exchanging its two values"),
    "set_unique_name_for_nodes": structure(
        "Give a name to every operator that has none; names alone are no change, so a run gives the old ones back"
    ),
    "split_init": structure("Keep the part that depends on constants alone, and drop the rest of the model"),
    "split_predict": structure("Keep the part that depends on inputs, and make inputs of what the other part computes"),
}
