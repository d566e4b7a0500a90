"""onnxsim's passes that run only when its option `extra_optimizers` names them. Most of them quantize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["ONNXSIM_EXTRA"]

ONNXSIM_EXTRA: Final[Mapping[str, About]] = {
    # Other forms of the same, for runtimes that lack an operator or an attribute.
    "dilated_conv_to_taps": values("Make one 1×1 Conv for each tap of a widely dilated 1-D Conv, and sum them"),
    "explicit_auto_pad": structure("Write auto_pad of Conv and pools as pads"),
    "explicit_conv_padding": structure("Put uneven pads of a Conv into a Pad in front of it"),
    "fuse_matmul_into_conv": structure("Make a 1×1 Conv of a product with a constant matrix"),
    "fuse_reduce_sum_into_conv": structure("Make a depthwise Conv with ones of a sum over all pixels"),
    "gemm_transA_to_transpose": structure("Make a Transpose of transA of Gemm"),
    "maxpool_rowmajor_when_indices_unused": structure("Drop storage_order of a MaxPool whose indices nothing reads"),
    "neg_to_mul": structure("Make a product with −1 of Neg"),
    "pow2_to_mul": structure("Make a product with itself of a square"),
    "rank0_to_rank1": structure("Give an axis to outputs of the model that are scalars"),
    "rewrite_bev_pool_to_scatter": structure("Write bev_pool_v2 of BEVDet with ScatterND"),
    "rewrite_deform_conv_to_gather": structure("Write the deformable convolutions of mmcv with gathers and arithmetic"),
    "rewrite_gather_over_concat": structure("Look up in the one part of a Concat that all indices point into"),
    "rewrite_gatherelements_to_gather": structure("Make Gather of a GatherElements that looks up whole rows"),
    "rewrite_gathernd_to_gather": structure("Make Gather of a GatherND, with flat indices"),
    "rewrite_gridsample_to_gather": structure("Write GridSample with gathers and arithmetic"),
    "rewrite_implicit_broadcast": structure("Write broadcasting of elementwise operators with Expand"),
    "rewrite_msdeformattn_to_gridsample": structure("Write the deformable attention of mmcv with GridSample"),
    "rewrite_scatterelements_to_scatternd": structure("Make ScatterND of a ScatterElements that writes whole rows"),
    "rewrite_tensor_scatter_to_scatter_elements": structure("Make ScatterElements of TensorScatter of opset 24"),
    "rewrite_trt_batched_nms": structure("Write TRTBatchedNMS of mmdeploy with NonMaxSuppression"),
    "rewrite_trt_batched_rotated_nms": structure("Write TRTBatchedRotatedNMS of mmdeploy with standard operators"),
    "split_large_gather": structure("Split the indices of a Gather that has too many of them for some accelerators"),
    # Dtypes of the whole model.
    "float16_to_float32": values("Make a float32 model of a float16 model"),
    "quantize_bf16": values("Convert weights and values to bfloat16"),
    "quantize_fp16": values("Convert weights and values to float16"),
    "quantize_fp8": values("Convert weights and values to an 8-bit float format"),
    # Integer arithmetic: weights and activations.
    "attention_quantization": values("Quantize the products of attention and its probabilities, not its weights"),
    "defuse_matmul_integer_to_float": values("Take back dynamic_quantize_matmul: one float product again"),
    "dynamic_quantize_attention": values(
        "Make QAttention of com.microsoft::Attention, activations quantized at run time"
    ),
    "dynamic_quantize_matmul": values("Quantize MatMul and Gemm to int8, activations at run time"),
    "dynamic_quantize_matmul_integer_to_float": values(
        "The same as dynamic_quantize_matmul, with MatMulIntegerToFloat of com.microsoft"
    ),
    "dynamic_quantize_ternary_matmul": values(
        "Quantize products with ternary weights (BitNet), activations at run time"
    ),
    "qoperator_quantize_activation": values("Make QLinear operators of Sigmoid and LeakyRelu, by calibrated ranges"),
    "qoperator_quantize_concat": values("Make QLinearConcat of Concat, by calibrated ranges"),
    "qoperator_quantize_conv": values("Make QLinearConv of Conv, by calibrated ranges"),
    "qoperator_quantize_elementwise": values("Make QLinearAdd and QLinearMul of Add and Mul, by calibrated ranges"),
    "qoperator_quantize_gemm": values("Make QGemm of Gemm, by calibrated ranges"),
    "qoperator_quantize_matmul": values("Make QLinearMatMul of MatMul and Gemm, by calibrated ranges"),
    "qoperator_quantize_pool": values("Make QLinear operators of average pools, by calibrated ranges"),
    "qoperator_quantize_softmax": values("Make QLinearSoftmax of Softmax, by calibrated ranges"),
    "qoperator_quantize_where": values("Make QLinearWhere of Where, by calibrated ranges"),
    "quarot": values("Rotate activations and weights of products (QuaRot), then quantize both to 4 bits"),
    "static_quantize_conv": values("Put int8 QuantizeLinear and DequantizeLinear around Conv, by calibrated ranges"),
    "static_quantize_int16_conv": values("Put int16 QuantizeLinear and DequantizeLinear around Conv, weights in int8"),
    "static_quantize_int16_matmul": values(
        "Put int16 QuantizeLinear and DequantizeLinear around MatMul and Gemm, weights in int8"
    ),
    "static_quantize_matmul": values("Put int8 QuantizeLinear and DequantizeLinear around MatMul and Gemm"),
    "zeroquant": values("Quantize products to int8, weights by group and activations by token (ZeroQuant)"),
    # Weights alone, in standard operators.
    "weight_only_quantize_conv": values("Store weights of Conv in int8, one scale a channel"),
    "weight_only_quantize_int16_conv": values("Store weights of Conv in int16, one scale a channel"),
    "weight_only_quantize_int16_matmul": values("Store weights of MatMul and Gemm in int16, one scale a channel"),
    "weight_only_quantize_int4_conv": values("Store weights of Conv in int4, one scale a block"),
    "weight_only_quantize_int4_matmul": values("Store weights of MatMul and Gemm in int4, one scale a block"),
    "weight_only_quantize_int8_block_conv": values("Store weights of Conv in int8, one scale a block"),
    "weight_only_quantize_int8_block_matmul": values("Store weights of MatMul and Gemm in int8, one scale a block"),
    "weight_only_quantize_matmul": values("Store weights of MatMul and Gemm in int8, one scale a channel"),
    "weight_only_quantize_matmul_nbits": values("Make MatMulNBits of com.microsoft, with weights of 4 bits"),
    "weight_only_quantize_mxfp4_matmul": values("Store weights of MatMul and Gemm in MXFP4"),
    "double_quantization": values("Quantize the scales of weights that are quantized already (QLoRA)"),
    # Weights alone, by methods that have a name.
    "adpq": values("Quantize weights of products by AdpQ: outliers apart, no calibration"),
    "any_precision_llm": values("Quantize weights of products by Any-Precision LLM: nested bit planes"),
    "aqlm": values("Quantize weights of products by AQLM: sums of entries of several codebooks"),
    "d2quant_dsq": values("Quantize the down-projection of gated MLPs by D2Quant's two scales"),
    "deepseek_fp8": values("Quantize weights of products to float8 in blocks of 128×128, as DeepSeek-V3 does"),
    "drop_by_drop": values("Quantize weights of products by Drop-by-Drop: codebooks that may be left away one by one"),
    "fp6_llm": values("Quantize weights of products to 6-bit floats, as FP6-LLM does"),
    "gguf_q2_k": values("Quantize weights of products as GGUF's Q2_K"),
    "gguf_q3_k": values("Quantize weights of products as GGUF's Q3_K"),
    "gguf_q4_0": values("Quantize weights of products as GGUF's Q4_0"),
    "gguf_q4_1": values("Quantize weights of products as GGUF's Q4_1"),
    "gguf_q4_k": values("Quantize weights of products as GGUF's Q4_K"),
    "gguf_q5_0": values("Quantize weights of products as GGUF's Q5_0"),
    "gguf_q5_1": values("Quantize weights of products as GGUF's Q5_1"),
    "gguf_q5_k": values("Quantize weights of products as GGUF's Q5_K"),
    "gguf_q6_k": values("Quantize weights of products as GGUF's Q6_K"),
    "gguf_q8_0": values("Quantize weights of products as GGUF's Q8_0"),
    "gguf_ternary_quant": values("Quantize weights of products to −1, 0 and 1 by block, as GGUF's ternary types"),
    "hqq": values("Quantize weights of products to int4 by HQQ: zero points fitted against outliers"),
    "icquant": values("Quantize weights of products by ICQuant: outliers stay exact"),
    "if4": values("Quantize weights of products to int4 or FP4, whichever fits a block better"),
    "iq4_nl": values("Quantize weights of products as GGUF's IQ4_NL: a fixed codebook of 16 numbers"),
    "kbvq_moe": values("Quantize the expert weights of MoE by KBVQ-MoE: a shared basis and a codebook"),
    "kmeans_quantization": values("Quantize weights of products by a codebook that k-means finds for each layer"),
    "leptoquant": values("Quantize weights of products to float8 by block, with a clip range that is searched for"),
    "llm_fp4": values("Quantize weights of products to 4-bit floats by LLM-FP4"),
    "lo_bcq": values("Quantize weights of products by LO-BCQ: several codebooks, one for each cluster of blocks"),
    "nf4": values("Quantize weights of products to NF4 of QLoRA"),
    "nvfp4_quantization": values("Quantize weights of products to NVFP4"),
    "olive": values("Quantize weights of products by OliVe: an outlier takes the bits of its neighbour"),
    "qoq": values("Quantize weights of products by QoQ of QServe: 4 bits inside of 8"),
    "quip_sharp": values("Quantize weights of products by QuIP#: rotated, then by a lattice"),
    # Around quantization, and approximations.
    "cross_layer_equalization": values("Even out the ranges of weights of layers that follow each other (AIMET)"),
    "ibert_gelu": structure("Put I-BERT's polynomial in place of Gelu, which is an approximation"),
    "ibert_softmax": structure("Put I-BERT's polynomial in place of Softmax, which is an approximation"),
    "intactkv": structure("Split off the first tokens of a KV cache as inputs and outputs of their own (IntactKV)"),
    "magnitude_pruning_attention": values("Set the smallest weights of attention to 0"),
    "magnitude_pruning_conv": values("Set the smallest weights of Conv to 0"),
    "magnitude_pruning_global": values("Set the smallest weights of the whole model to 0"),
    "magnitude_pruning_matmul": values("Set the smallest weights of MatMul and Gemm to 0"),
}
