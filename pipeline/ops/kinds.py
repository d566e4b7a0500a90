"""The number of every kernel: part of the ABI between a plan and a runtime.

A number is never changed and never given to another kernel: a plan written by an older release names kernels by it.
New kinds take the next free number of their family. `tests/pipeline/ops/kind_ids.txt` holds what was released.
"""

from __future__ import annotations

from enum import IntEnum


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
    FeedForward = 1901
    ReluProduct = 1971

    # aten
    Aten = 901
    HigherOrder = 902

    # operators of torch, with typed arguments
    AtenLinear = 1801
    AtenMatMul = 1802
    AtenMm = 1803
    AtenBmm = 1804
    AtenAddmm = 1805
    AtenBaddbmm = 1806
    AtenEinsum = 1807
    AtenScaledDotProductAttention = 1808
    AtenConv1d = 1809
    AtenConv2d = 1810
    AtenConv2dPadding = 1811
    AtenConvTranspose2d = 1812
    AtenMaxPool2d = 1813
    AtenAvgPool2d = 1814
    AtenAdaptiveAvgPool1d = 1815
    AtenAdaptiveAvgPool2d = 1816
    AtenUpsampleBilinear2d = 1817
    AtenUpsampleLinear1d = 1818
    AtenGridSampler = 1819
    AtenIm2col = 1820
    AtenLayerNorm = 1821
    AtenGroupNorm = 1822
    AtenBatchNorm = 1823
    AtenRmsNorm = 1824
    AtenSoftmax = 1825
    AtenLogSoftmax = 1826
    AtenAdd = 1827
    AtenSub = 1828
    AtenMul = 1829
    AtenDiv = 1830
    AtenPow = 1831
    AtenMaximum = 1832
    AtenMinimum = 1833
    AtenRsub = 1834
    AtenRemainder = 1835
    AtenAnd = 1836
    AtenOr = 1837
    AtenLogicalAnd = 1838
    AtenEq = 1839
    AtenNe = 1840
    AtenLt = 1841
    AtenLe = 1842
    AtenGt = 1843
    AtenGe = 1844
    AtenWhere = 1845
    AtenMaskedFill = 1846
    AtenNeg = 1847
    AtenAbs = 1848
    AtenSqrt = 1849
    AtenRsqrt = 1850
    AtenReciprocal = 1851
    AtenSquare = 1852
    AtenExp = 1853
    AtenLog = 1854
    AtenSin = 1855
    AtenCos = 1856
    AtenErf = 1857
    AtenTanh = 1858
    AtenSigmoid = 1859
    AtenRelu = 1860
    AtenSilu = 1861
    AtenHardswish = 1862
    AtenFloor = 1863
    AtenLogicalNot = 1864
    AtenBitwiseNot = 1865
    AtenGelu = 1866
    AtenSoftplus = 1867
    AtenLeakyRelu = 1868
    AtenHardtanh = 1869
    AtenClamp = 1870
    AtenClampMin = 1871
    AtenTypeAs = 1872
    AtenGlu = 1873
    AtenSum = 1874
    AtenMean = 1875
    AtenAmax = 1876
    AtenMaxDim = 1877
    AtenArgmax = 1878
    AtenCumsum = 1879
    AtenVectorNorm = 1880
    AtenTopk = 1881
    AtenCat = 1882
    AtenStack = 1883
    AtenPad = 1884
    AtenRepeat = 1885
    AtenRepeatInterleave = 1886
    AtenRoll = 1887
    AtenEmbedding = 1888
    AtenIndex = 1889
    AtenIndexSelect = 1890
    AtenGather = 1891
    AtenIndexCopy = 1892
    AtenScatter = 1893
    AtenScatterValue = 1894
    AtenCopy = 1895
    AtenSliceScatter = 1896
    AtenSelectScatter = 1897
    AtenZerosLike = 1898
    AtenOnesLike = 1899
