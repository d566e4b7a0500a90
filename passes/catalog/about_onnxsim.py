"""onnxsim's passes that run by default, where they are not onnxoptimizer's, or do their work in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["NEVER_RUN", "ONNXSIM"]

ONNXSIM: Final[Mapping[str, About]] = {
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

NEVER_RUN: Final[Mapping[str, str]] = {
    "eliminate_shape_gather": "it is listed, but never run: onnxsim folds shapes in another way",
    "extract_constant_to_initializer": "it is listed, but never run: onnxsim keeps constants apart from weights",
}
"""What `onnxsim.simplify` takes out of its list each time, by its sources and by running it."""
