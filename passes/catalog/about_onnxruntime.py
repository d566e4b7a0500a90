"""onnxruntime's graph transformers and rewrite rules, and the switches of its fusions for transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["ONNXRUNTIME", "ONNXRUNTIME_FUSIONS"]

ONNXRUNTIME: Final[Mapping[str, About]] = {
    # Rules. Each works only while the group that applies it is not left out.
    "CastChainElimination": structure("Drop a Cast whose result is cast again"),
    "CastElimination": structure("Drop a Cast to the dtype that the value has already"),
    "ClipQuantRewrite": values("Drop a Clip in front of QuantizeLinear, which clips anyway"),
    "ConvAddFusion": values("Make the Add behind a Conv its bias"),
    "ConvBNFusion": values("Compute a weight and a bias for the Conv in front of a BatchNormalization, and drop that"),
    "ConvMulFusion": values("Put a constant factor behind a Conv into its weight and bias"),
    "DivMulFusion": structure("Make a division of a product with one divided by a value"),
    "EliminateDropout": structure("Drop a Dropout that is not in training"),
    "EliminateIdentity": structure("Drop Identity"),
    "EliminateSlice": structure("Drop a Slice of everything"),
    "ExpandElimination": structure("Drop an Expand to the shape that the value has already"),
    "FuseReluClip": structure("Make one Clip of Relu and Clip"),
    "GemmSumFusion": structure("Make the Sum behind a Gemm its bias"),
    "GemmTransposeFusion": structure("Put Transposes around a Gemm into transA and transB"),
    "LabelEncoderFusion": structure("Make one LabelEncoder of two in a row"),
    "MatMul_BatchNormalization_Fusion": values("Make Gemm of a MatMul and the BatchNormalization behind it"),
    "NoopElimination": values("Drop + 0, − 0, × 1 and ÷ 1"),
    "NotWhereFusion": structure("Drop a Not in front of Where by exchanging its two values"),
    "Pad_Fusion": structure("Put a Pad by 0 into the pads of the Conv or pool behind it"),
    "PreShapeNodeElimination": structure("Drop a Cast in front of Shape"),
    "ReluQuantRewrite": values("Drop a Relu in front of QuantizeLinear, which clips anyway"),
    "UnsqueezeElimination": structure("Unsqueeze a constant once and for all"),
    # The groups that apply them.
    "Level1_RuleBasedTransformer": values("Apply the rules of level 1, which are listed one by one"),
    "Level2_RuleBasedTransformer": values("Apply the rules of level 2, which are listed one by one"),
    # Transformers.
    "AttentionFusion": values("Make com.microsoft::Attention of attention, with Q, K and V merged into one weight"),
    "BiasDropoutFusion": structure("Make BiasDropout of Add and Dropout"),
    "BiasGeluFusion": structure("Make BiasGelu of Add and Gelu"),
    "BiasSkipLayerNormFusion": structure("Put the bias of a residual into SkipLayerNormalization"),
    "BiasSoftmaxFusion": structure("Make BiasSoftmax of Add and Softmax"),
    "CommonSubexpressionElimination": structure("Compute what is computed several times only once"),
    "ConstantFolding": values("Compute what depends on constants alone"),
    "ConstantSharing": values("Keep one of several scalar constants that hold the same number"),
    "ConvActivationFusion": structure("Make FusedConv of a Conv and the activation behind it"),
    "DoubleQDQPairsRemover": values("Make one pair of QuantizeLinear and DequantizeLinear of two in a row"),
    "DynamicQuantizeMatMulFusion": values("Make DynamicQuantizeMatMul of a product that is quantized at run time"),
    "EmbedLayerNormFusion": structure("Make EmbedLayerNormalization of embeddings and the LayerNormalization behind"),
    "FastGeluFusion": structure("Make FastGelu of its formula with Tanh"),
    "FreeDimensionOverrideTransformer": structure("Put sizes in place of named dims, where a session was given any"),
    "GatherSliceToSplitFusion": structure("Make Split of Gathers and Slices that together read one value"),
    "GatherToSliceFusion": structure("Make Slice of a Gather with a Range"),
    "GeluFusionL1": structure("Make Gelu of its formula with Erf, from opset 20 on"),
    "GeluFusionL2": structure("Make com.microsoft::Gelu of its formula with Erf"),
    "GemmActivationFusion": structure("Make FusedGemm of a Gemm and the activation behind it"),
    "GroupQueryAttentionFusion": values("Put rotary embedding and a merged Q, K and V into GroupQueryAttention"),
    "GroupQueryAttentionPreNormFusion": structure("Put the norms of Q and K into GroupQueryAttention"),
    "LayerNormFusionL1": structure("Make LayerNormalization of its formula, from opset 17 on"),
    "LayerNormFusionL2": structure("Make LayerNormalization of its formula"),
    "MatMulActivationFusion": structure("Make a fused product of MatMul and the activation behind it"),
    "MatMulAddFusion": structure("Make Gemm of a MatMul and the Add of a bias"),
    "MatMulIntegerToFloatFusion": values("Make MatMulIntegerToFloat of MatMulInteger, Cast and Mul"),
    "MatMulNBitsFusion": values("Put what is around MatMulNBits into it"),
    "MatMulScaleFusion": structure("Put scalar factors around a MatMul into FusedMatMul"),
    "MatmulTransposeFusion": structure("Put Transposes around a MatMul into FusedMatMul"),
    "QDQFinalCleanupTransformer": values("Drop QuantizeLinear and DequantizeLinear pairs that remain"),
    "QDQPropagationTransformer": values("Move QuantizeLinear up and DequantizeLinear down past what only moves data"),
    "QDQS8ToU8Transformer": values("Make uint8 of int8 in QuantizeLinear and DequantizeLinear"),
    "QDQSelectorActionTransformer": values("Make integer operators of operators between Dequantize and Quantize"),
    "QuickGeluFusion": structure("Make QuickGelu of its formula with Sigmoid"),
    "ReshapeFusion": structure("Make a constant of a target shape put together by Concat"),
    "SimplifiedLayerNormFusion": structure("Make SimplifiedLayerNormalization (RMS norm) of its formula"),
    "SkipLayerNormFusion": structure("Make SkipLayerNormalization of a residual and the norm behind it"),
    "SliceConcatToSpaceToDepthFusion": structure("Make SpaceToDepth of Slices and a Concat"),
    "TransposeOptimizer": values("Move Transposes through the model until they cancel"),
    "TransposeOptimizer_CPUExecutionProvider": values("The same for the CPU provider, whose layouts it knows"),
    "WeightBiasQuantization": values(
        "Quantize weights and biases of operators that are between Dequantize and Quantize"
    ),
    "WhereDummyDq": values("Add a DequantizeLinear to a Where that has one on one side only"),
}

ONNXRUNTIME_FUSIONS: Final[Mapping[str, About]] = {
    "enable_attention": values("Make com.microsoft::Attention or MultiHeadAttention of attention"),
    "enable_bias_gelu": structure("Make BiasGelu of Add and Gelu"),
    "enable_bias_skip_layer_norm": structure("Put the bias of a residual into SkipLayerNormalization"),
    "enable_embed_layer_norm": structure("Make EmbedLayerNormalization of embeddings and the norm behind them"),
    "enable_gelu": structure("Make Gelu or FastGelu of its formulas"),
    "enable_layer_norm": structure("Make LayerNormalization of its formula"),
    "enable_qordered_matmul": values("Make QOrderedMatMul of quantized products"),
    "enable_rotary_embeddings": structure("Make com.microsoft::RotaryEmbedding of its formula"),
    "enable_shape_inference": structure("Infer symbolic shapes, which other fusions read"),
    "enable_skip_layer_norm": structure("Make SkipLayerNormalization of a residual and the norm behind it"),
}
