"""Descriptions of passes: those of onnxoptimizer, and those that onnxsim runs by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "DESCRIBED",
    "ONNXOPTIMIZER",
    "ONNXSIM",
    "STEPS",
    "UNDESCRIBED",
    "Description",
    "Reads",
    "describe",
    "structure",
    "values",
]


Reads = Literal["structure", "values"]

UNDESCRIBED: Final = "not described by this release of onnxline"
"""The description of a pass that the installed library has and our tables lack."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a pass does and reads. `does` is one sentence without a full stop.

    A pass reads `values` if its effect depends on the numbers in weights, or if it computes new weights. All
    others read the `structure` only: operators, attributes, shapes, and constants that are as good as attributes (a
    scalar such as an epsilon; axes, pads, shapes, indices). They may rewire weights, but never look at their numbers.
    """

    does: str
    reads: Reads


def structure(does: str) -> Description:
    return Description(does, "structure")


def values(does: str) -> Description:
    return Description(does, "values")


ONNXOPTIMIZER: Final[Mapping[str, Description]] = {
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


ONNXSIM: Final[Mapping[str, Description]] = {
    "constant_folding": values("Compute what depends on constants alone; a stage of its own beside the listed passes"),
    "eliminate_loop_with_const_trip_count": structure(
        "Write out the body of a Loop of a known number of rounds, up to 1024"
    ),
    "eliminate_nop_dropout": structure("Drop a Dropout of ratio 0, also where ratio and mode are constant inputs"),
    "eliminate_nop_reduce": structure("Drop a reduction of axes that have one element, or make it a Squeeze"),
    "eliminate_nop_softmax": structure("Put ones in place of Softmax, zeros of LogSoftmax, over a single element"),
    "eliminate_optional_get_element": structure("Read the value itself instead of an Optional that holds it"),
    "eliminate_optional_has_element": structure("Put a constant in place of the question whether an Optional is empty"),
    "eliminate_reshape_around_elementwise": structure(
        "Run elementwise operators on the flat value between two Reshapes that cancel, and drop those"
    ),
    "eliminate_reshape_family_on_constant": structure(
        "Give a constant the shape that a Reshape, Squeeze, Unsqueeze or Flatten makes of it"
    ),
    "eliminate_sequence_at_construct": structure("Read the value itself instead of a list that was made of it"),
    "eliminate_sequence_length_construct": structure("Put a constant in place of the length of a list"),
    "fuse_add_bias_into_conv": structure("Make the Add behind a Conv or ConvTranspose its bias"),
    "fuse_attention": values(
        "Make com.microsoft::Attention of unmasked self-attention, with Q, K and V merged into one weight"
    ),
    "fuse_bn_into_conv": values(
        "Compute a weight and a bias for the Conv or ConvTranspose in front of a BatchNormalization, and drop that"
    ),
    "fuse_consecutive_mul": values("Make one constant factor of two"),
    "fuse_consecutive_reduce": structure("Make one reduction of two over different axes"),
    "fuse_consecutive_reshapes": structure("Of two Reshapes in a row, drop the first"),
    "fuse_consecutive_squeeze_unsqueeze": structure("Make one operator, or none, of Squeeze and Unsqueeze in a row"),
    "fuse_gelu": structure("Make Gelu of its formula with Erf; from opset 20 on"),
    "fuse_gqa": values("Make com.microsoft::GroupQueryAttention of causal attention whose K and V heads are repeated"),
    "fuse_layer_norm": structure("Make LayerNormalization of its formula; in opset 17, where axes are attributes"),
    "fuse_lp_normalization": structure("Make LpNormalization of a division by the L1 or L2 norm"),
    "fuse_matmul_add_bias_into_gemm_batched": structure(
        "Make Gemm, between two Reshapes, of a linear layer on a value of rank 3 or more"
    ),
    "fuse_mul_into_conv": structure("Put a channelwise factor behind a Conv into its weight and bias"),
    "fuse_preceding_mul_into_conv": structure("Put a channelwise factor in front of a Conv into its weight"),
    "fuse_reshape_family": structure("Make one Reshape of two of Reshape, Squeeze, Unsqueeze and Flatten"),
    "fuse_rms_norm": structure("Make RMSNormalization of its formula; from opset 23 on"),
    "fuse_rope": structure("Make RotaryEmbedding of its formula; from opset 23 on"),
    "fuse_split_gather_concat": structure("Make one Gather of lookups with the pieces of a Split, joined again"),
    "rewrite_arg_reduce_select_last_index": structure(
        "Find the last extremum as the first one of the reversed value, for runtimes without select_last_index"
    ),
    "rewrite_bool_where": structure("Select among bools as among int32, for runtimes without Where on bool"),
    "shape_inference": structure("Write the inferred type and shape of every value into the model; a stage of its own"),
}

STEPS: Final[Mapping[str, Description]] = {
    "clamp-mask": values("Raise the constants that mask attention to a finite bound, which quantization can represent"),
    "fold_constants": values("Compute what depends on constants alone, where that does not make the model larger"),
    "fold-batchnorm": values("Put BatchNormalization into the weight and bias of the product in front of it"),
    "infer_shapes": structure("Write the inferred type and shape of every value into the model"),
    "decompose-attention": structure("Take attention operators apart into MatMul, scale, mask, Softmax and MatMul"),
    "convert-opset": structure("Convert the model to another opset of ONNX, up or down"),
    "onnxruntime": values("Save what onnxruntime's own graph optimization makes of the model"),
    "onnxruntime_fusions": values("Run onnxruntime's fusions for transformers"),
    "onnxscript": values("Fold constants, inline functions and drop dead code by onnxscript's optimizer"),
    "onnxscript_rewrites": values("Run onnxscript's rewrite rules, or its fusions"),
    "onnxsim": values("Run onnxsim.simplify: its passes, constant folding and shape inference until nothing changes"),
    "onnxslim": values("Run onnxslim.slim: its fusion patterns and optimizations"),
    "rotate": values("Rotate the residual stream and the heads of a decoder by AIMET's SpinQuant"),
    "smooth-quant": values("Move outlier channels of activations into the weights behind them (SmoothQuant)"),
    "split-gate-up": values("Take merged projections of the gate and the value of a gated MLP apart"),
    "split-qkv": values("Take merged projections of Q, K and V apart"),
    "untie": structure("Give each module that reads a tied weight a copy of its own"),
}


def describe(name: str) -> Description:
    """The description of a pass by its full name; an undescribed pass counts as one that reads values."""
    step, _, bare = name.rpartition("/")
    return DESCRIBED.get(step, {}).get(bare, values(UNDESCRIBED))


DESCRIBED: Final[Mapping[str, Mapping[str, Description]]] = {
    "": {**ONNXOPTIMIZER, **STEPS},
    "onnxsim": {**ONNXOPTIMIZER, **ONNXSIM},
}
"""Step → bare name → words; the step is empty for what a recipe names by itself. onnxsim has most of onnxoptimizer's
passes inside, some in versions of its own. Other libraries' passes are listed without words, and so are those that
onnxsim runs only where they are named."""
