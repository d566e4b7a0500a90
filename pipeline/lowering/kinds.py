"""The number of every kernel: part of the ABI between a plan and a runtime.

A number is never changed and never given to another kernel: a plan written by an older release names kernels by it.
New kinds take the next free number of their family. `tests/pipeline/lowering/kind_ids.txt` holds what was released.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Kind"]


class Kind(IntEnum):
    """`Kind["Gemm"]` by the op's kind, `Kind(202)` by the number."""

    # elementwise
    Add = 101
    Sub = 102
    Mul = 103
    Div = 104
    Pow = 105
    Min = 106
    Max = 107
    And = 108
    Or = 109
    Xor = 110
    Equal = 111
    Less = 112
    LessOrEqual = 113
    Greater = 114
    GreaterOrEqual = 115
    Not = 116
    Neg = 117
    Abs = 118
    Sqrt = 119
    Reciprocal = 120
    Exp = 121
    Log = 122
    Floor = 123
    Ceil = 124
    Round = 125
    Sign = 126
    Sin = 127
    Cos = 128
    Erf = 129
    Tanh = 130
    Sigmoid = 131
    Relu = 132
    Gelu = 133
    Silu = 134
    LeakyRelu = 135
    Elu = 136
    HardSigmoid = 137
    HardSwish = 138
    Softplus = 139
    IsNaN = 140
    IsInf = 141
    Clip = 142
    Where = 143
    Cast = 144
    Identity = 145
    Mod = 146
    PRelu = 147
    CastUnsaturated = 148

    # linear
    MatMul = 201
    Gemm = 202
    Einsum = 203

    # conv
    Conv = 301
    ConvTranspose = 302
    MaxPool = 303
    AveragePool = 304
    GlobalAveragePool = 305
    GlobalMaxPool = 306
    Resize = 307

    # norm
    LayerNormalization = 401
    BatchNormalization = 402
    Softmax = 403
    LogSoftmax = 404
    RMSNormalization = 405
    InstanceNormalization = 406
    GroupNormalization = 407

    # reduce
    ReduceSum = 501
    ReduceMean = 502
    ReduceMax = 503
    ReduceMin = 504
    ReduceProd = 505
    ReduceL2 = 506
    ArgMax = 507
    ArgMin = 508
    CumSum = 509
    ReduceLogSumExp = 510

    # shape
    Reshape = 601
    Transpose = 602
    Concat = 603
    Split = 604
    Slice = 605
    Expand = 606
    Tile = 607
    Pad = 608
    Select = 609
    Unbind = 610
    Diagonal = 611
    Unfold = 612
    Contiguous = 613

    # index
    Gather = 701
    GatherElements = 702
    GatherND = 703
    ScatterND = 704
    TopK = 705
    ScatterElements = 706
    GridSample = 707

    # recurrent
    LSTM = 801

    # random
    RandomNormal = 1001
    RandomUniform = 1002
    Bernoulli = 1003
    Multinomial = 1004
    Dropout = 1005

    # fallback
    OnnxNode = 1101

    # vision
    RoiAlign = 1201

    # recurrent
    Recurrent = 1301

    # optimizer
    SGD = 1401
    Adam = 1402
    NotFinite = 1403
    CountStep = 1404

    # fused
    LinearPointwise = 1501
    ConvPointwise = 1502
    ScaledDotProductAttention = 1503
    SmallAttention = 1601

    # aten
    Aten = 901
    HigherOrder = 902
