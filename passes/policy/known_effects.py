"""Which passes are known to destroy which structures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

__all__ = ["DESTROYS", "OF_EQUALS", "merging"]


def merging(kinds: Collection[str]) -> frozenset[str]:
    """The passes that destroy structures of `kinds` wherever they find them."""
    return frozenset(name for name, broken in DESTROYS.items() if not set(broken).isdisjoint(kinds)) - OF_EQUALS


DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    # onnxoptimizer and onnxsim
    "fuse_qkv": ("qkv",),
    "fuse_attention": ("qkv", "attention"),
    "fuse_gqa": ("qkv", "attention"),
    "fuse_bn_into_conv": ("batchnorm",),
    "fuse_gelu": ("gelu",),
    "fuse_layer_norm": ("layernorm",),
    "fuse_rms_norm": ("rmsnorm",),
    "fuse_rope": ("rope",),
    "fuse_matmul_add_bias_into_gemm": ("residual",),
    "fuse_consecutive_mul": ("rmsnorm",),
    "fuse_split_gather_concat": ("embedding",),
    "eliminate_common_subexpression": ("qkv",),
    "replace_einsum_with_matmul": ("attention",),
    "pow2_to_mul": ("layernorm", "rmsnorm"),
    "neg_to_mul": ("rope",),
    # onnxslim
    "FusionConvBN": ("batchnorm",),
    "FusionConvTransposeBN": ("batchnorm",),
    "FusionGelu": ("gelu",),
    "FusionGemmMul": ("qkv",),
    "subexpression_elimination": ("qkv",),
    # onnxruntime
    "AttentionFusion": ("qkv", "attention"),
    "GroupQueryAttentionFusion": ("qkv", "attention", "rope"),
    "GroupQueryAttentionPreNormFusion": ("rmsnorm",),
    "CommonSubexpressionElimination": ("qkv",),
    "MatMulScaleFusion": ("attention", "qkv"),
    "MatmulTransposeFusion": ("attention",),
    "SkipLayerNormFusion": ("residual", "layernorm"),
    "EmbedLayerNormFusion": ("embedding", "layernorm"),
    "LayerNormFusionL1": ("layernorm",),
    "LayerNormFusionL2": ("layernorm",),
    "SimplifiedLayerNormFusion": ("rmsnorm", "layernorm"),
    "GeluFusionL1": ("gelu",),
    "GeluFusionL2": ("gelu",),
    "BiasGeluFusion": ("gelu",),
    "FastGeluFusion": ("gelu",),
    "QuickGeluFusion": ("gelu", "swiglu"),
    "FuseFp16InitializerToFp32NodeTransformer": ("qkv",),
    "ConvBNFusion": ("batchnorm",),
    "MatMul_BatchNormalization_Fusion": ("batchnorm",),
    # onnxruntime_fusions
    "enable_attention": ("qkv", "attention"),
    "enable_packed_qkv": ("qkv",),
    "enable_packed_kv": ("qkv",),
    "enable_rotary_embeddings": ("rope",),
    "enable_skip_layer_norm": ("residual", "layernorm", "rmsnorm"),
    "enable_embed_layer_norm": ("embedding", "layernorm"),
    "enable_layer_norm": ("layernorm", "rmsnorm"),
    "enable_gelu": ("gelu",),
    "enable_bias_gelu": ("gelu",),
    "enable_gelu_approximation": ("gelu",),
    "enable_gemm_fast_gelu": ("gelu",),
    # onnxscript
    "common_subexpression_elimination": ("qkv",),
    # onnxscript_rewrites; fuse_attention, fuse_gqa and fuse_gelu are called as in onnxsim
    "fuse_sdpa": ("attention",),
    "replace_sdpa_by_mha": ("attention",),
    "fuse_mha1": ("attention",),
    "fuse_mha2": ("attention",),
    "fuse_qkv_gqa": ("qkv",),
    "fuse_skip_layer_normalization": ("residual", "layernorm"),
    "fuse_skip_rms_normalization": ("residual", "rmsnorm"),
    "fuse_rms_normalization": ("rmsnorm",),
    "fuse_erfgelu": ("gelu",),
    "fuse_bias_gelu": ("gelu",),
    "fuse_rotary_embedding": ("rope",),
    "fuse_partial_rotary_embedding": ("rope",),
    "fuse_cos_sin_cache": ("rope",),
    "fuse_batchnorm_into_conv_rule": ("batchnorm",),
    "fuse_batchnorm_into_conv_transpose_rule": ("batchnorm",),
    "fuse_batchnorm_into_gemm_rule": ("batchnorm",),
}
"""Pass → kinds. Skipping one of them watches the structure, whatever destroys it under another name; and these are
suspected first when a composite step has broken one."""

OF_EQUALS: Final = frozenset(
    {
        *("eliminate_common_subexpression", "subexpression_elimination"),
        *("CommonSubexpressionElimination", "common_subexpression_elimination"),
    }
)
"""Those that destroy a structure only where it has two equal parts, and are much missed everywhere else."""
