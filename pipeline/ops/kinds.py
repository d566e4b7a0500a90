"""The number of every kernel: part of the ABI between a plan and a runtime.

A number is never changed and never given to another kernel: a plan written by an older release names kernels by it.
New kinds take the next free number of their family. `tests/pipeline/ops/kind_ids.txt` holds what was released.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """`Kind["Dropout"]` by the op's kind, `Kind(2109)` by the number."""

    # what views and copies of torch become
    Identity = 101
    Cast = 102
    Reshape = 601
    Transpose = 602
    Split = 604
    Slice = 605
    Expand = 606
    Select = 609
    Unbind = 610
    Diagonal = 611
    Unfold = 612
    Contiguous = 613

    # fallback
    OnnxNode = 1101

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
    Linear = 1801
    MatMul = 1802
    Mm = 1803
    Bmm = 1804
    Addmm = 1805
    Baddbmm = 1806
    Einsum = 1807
    AtenScaledDotProductAttention = 1808
    Conv1d = 1809
    Conv2d = 1810
    Conv2dPadding = 1811
    ConvTranspose2d = 1812
    MaxPool2d = 1813
    AvgPool2d = 1814
    AdaptiveAvgPool1d = 1815
    AdaptiveAvgPool2d = 1816
    UpsampleBilinear2d = 1817
    UpsampleLinear1d = 1818
    GridSampler = 1819
    Im2col = 1820
    LayerNorm = 1821
    GroupNorm = 1822
    BatchNorm = 1823
    RmsNorm = 1824
    Softmax = 1825
    LogSoftmax = 1826
    Add = 1827
    Sub = 1828
    Mul = 1829
    Div = 1830
    Pow = 1831
    Maximum = 1832
    Minimum = 1833
    Rsub = 1834
    Remainder = 1835
    And = 1836
    Or = 1837
    LogicalAnd = 1838
    Eq = 1839
    Ne = 1840
    Lt = 1841
    Le = 1842
    Gt = 1843
    Ge = 1844
    Where = 1845
    MaskedFill = 1846
    Neg = 1847
    Abs = 1848
    Sqrt = 1849
    Rsqrt = 1850
    Reciprocal = 1851
    Square = 1852
    Exp = 1853
    Log = 1854
    Sin = 1855
    Cos = 1856
    Erf = 1857
    Tanh = 1858
    Sigmoid = 1859
    Relu = 1860
    Silu = 1861
    Hardswish = 1862
    Floor = 1863
    LogicalNot = 1864
    BitwiseNot = 1865
    Gelu = 1866
    Softplus = 1867
    LeakyRelu = 1868
    Hardtanh = 1869
    Clamp = 1870
    ClampMin = 1871
    TypeAs = 1872
    Glu = 1873
    Sum = 1874
    Mean = 1875
    Amax = 1876
    MaxDim = 1877
    Argmax = 1878
    Cumsum = 1879
    VectorNorm = 1880
    Topk = 1881
    Cat = 1882
    Stack = 1883
    Pad = 1884
    Repeat = 1885
    RepeatInterleave = 1886
    Roll = 1887
    Embedding = 1888
    Index = 1889
    IndexSelect = 1890
    Gather = 1891
    IndexCopy = 1892
    Scatter = 1893
    ScatterValue = 1894
    Copy = 1895
    SliceScatter = 1896
    SelectScatter = 1897
    ZerosLike = 1898
    OnesLike = 1899
    DivMode = 2001
    Fmod = 2002
    LogicalXor = 2003
    Sign = 2004
    Ceil = 2005
    Round = 2006
    Elu = 2007
    Amin = 2008
    Argmin = 2009
    Prod = 2010
    Logsumexp = 2011
    Flip = 2012
    Cumprod = 2013
    Conv3d = 2014
    ConvTranspose1d = 2015
    ConvTranspose3d = 2016
    ConstantPad = 2017
    IndexPut = 2018
    ScatterReduce = 2019
    Sort = 2020
    Inverse = 2021
    Cdist = 2022
    Triu = 2023
    Tril = 2024

    # operators of our own
    CastFloat8 = 2101
    Unsigned = 2102
    Recurrent = 2103
    RoiAlign = 2104
    RandomNormal = 2105
    RandomUniform = 2106
    Bernoulli = 2107
    Multinomial = 2108
    Dropout = 2109
    Quantize = 2110
    Dequantize = 2111
    StableTopk = 2112
