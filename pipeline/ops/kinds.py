"""The table of operators: the number of every kernel, and the signature of each operator that has a kernel of its own.

A number is part of the ABI between a plan and a runtime. It is never changed and never given to another kernel: a plan
written by an older release names kernels by it. `tests/pipeline/ops/kind_ids.txt` holds what was released.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final, NamedTuple


class OperatorRow(NamedTuple):
    """An operator with a kind of kernel of its own: number and name of the kind, and the signature as torch writes it.

    `signatures.py` says how it is read.
    """

    number: int
    name: str
    signature: str


def read_rows(text: str) -> tuple[OperatorRow, ...]:
    """The rows of a table; an indented line goes on with the row above it."""
    lines = text.replace("\n    ", " ").splitlines()
    rows = (re.fullmatch(r"(\d+) (\w+): (.+)", line) for line in lines if line and not line.startswith("#"))
    return tuple(OperatorRow(int(row[1]), row[2], row[3]) for row in rows if row is not None)


OPERATORS: Final = read_rows("""
# products of matrices
1801 Linear: linear.default(T input, T weight, T? bias)
1802 MatMul: matmul.default(T self, T other)
1803 Mm: mm.default(T self, T mat2)
1804 Bmm: bmm.default(T self, T mat2)
1805 Addmm: addmm.default(T self, T mat1, T mat2, n beta=1, n alpha=1)
1806 Baddbmm: baddbmm.default(T self, T batch1, T batch2, n beta=1, n alpha=1)
1807 Einsum: einsum.default(s equation, T[] tensors)
1808 AtenScaledDotProductAttention: scaled_dot_product_attention.default(T query, T key, T value, T? attn_mask,
    = dropout_p=0.0, ? is_causal=False, f? scale=None, ? enable_gqa=False)
# convolutions, pools, grids
1809 Conv1d: conv1d.default(T input, T weight, T? bias, i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,),
    i groups=1)
1810 Conv2d: conv2d.default(T input, T weight, T? bias, i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,),
    i groups=1)
1811 Conv2dPadding: conv2d.padding(T input, T weight, T? bias, i[] stride=(1,), s padding='valid', i[] dilation=(1,),
    i groups=1)
1812 ConvTranspose2d: conv_transpose2d.input(T input, T weight, T? bias, i[] stride=(1,), i[] padding=(0,),
    i[] output_padding=(0,), i groups=1, i[] dilation=(1,))
2014 Conv3d: conv3d.default(T input, T weight, T? bias, i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,),
    i groups=1)
2015 ConvTranspose1d: conv_transpose1d.default(T input, T weight, T? bias, i[] stride=(1,), i[] padding=(0,),
    i[] output_padding=(0,), i groups=1, i[] dilation=(1,))
2016 ConvTranspose3d: conv_transpose3d.input(T input, T weight, T? bias, i[] stride=(1,), i[] padding=(0,),
    i[] output_padding=(0,), i groups=1, i[] dilation=(1,))
1813 MaxPool2d: max_pool2d.default(T self, i[] kernel_size, i[] stride=(), i[] padding=(0,), i[] dilation=(1,),
    ? ceil_mode=False)
1814 AvgPool2d: avg_pool2d.default(T self, i[] kernel_size, i[] stride=(), i[] padding=(0,), ? ceil_mode=False,
    ? count_include_pad=True, i? divisor_override=None)
1815 AdaptiveAvgPool1d: adaptive_avg_pool1d.default(T self, i[] output_size)
1816 AdaptiveAvgPool2d: adaptive_avg_pool2d.default(T self, i[] output_size)
1817 UpsampleBilinear2d: upsample_bilinear2d.vec(T input, i[]? output_size, ? align_corners, f[]? scale_factors)
1818 UpsampleLinear1d: upsample_linear1d.vec(T input, i[]? output_size, ? align_corners, f[]? scale_factors)
1819 GridSampler: grid_sampler.default(T input, T grid, i interpolation_mode, i padding_mode, ? align_corners)
1820 Im2col: im2col.default(T self, i[] kernel_size, i[] dilation, i[] padding, i[] stride)
# normalisations
1821 LayerNorm: layer_norm.default(T input, i[] normalized_shape, T? weight, T? bias, f eps=1e-05,
    - cudnn_enable=None)
1822 GroupNorm: group_norm.default(T input, i num_groups, T? weight, T? bias, f eps=1e-05, - cudnn_enabled=None)
1823 BatchNorm: batch_norm.default(T input, T weight, T bias, T running_mean, T running_var, = training=False,
    f momentum, f eps, - cudnn_enabled=False)
1824 RmsNorm: rms_norm.default(T input, i[] normalized_shape, T? weight, f? eps=None)
1825 Softmax: softmax.int(T self, i dim, dtype? dtype)
1826 LogSoftmax: log_softmax.int(T self, i dim, dtype? dtype)
# elementwise, of two
1827 Add: add.Tensor(T self, T|n other, n alpha=1)
1828 Sub: sub.Tensor(T self, T|n other, n alpha=1)
1829 Mul: mul.Tensor(T self, T|n other)
1830 Div: div.Tensor(T self, T|n other)
2001 DivMode: div.Tensor_mode(T self, T|n other, s rounding_mode)
1831 Pow: pow.Tensor_Tensor|Tensor_Scalar(T self, T|n exponent)
1832 Maximum: maximum.default(T self, T other)
1833 Minimum: minimum.default(T self, T other)
1834 Rsub: rsub.Scalar(T self, n other, n alpha=1)
2002 Fmod: fmod.Tensor|Scalar(T self, T|n other)
1835 Remainder: remainder.Tensor|Scalar(T self, T|n other)
1836 And: bitwise_and.Tensor|Scalar(T self, T|n other)
1837 Or: bitwise_or.Tensor|Scalar(T self, T|n other)
1838 LogicalAnd: logical_and.default(T self, T other)
2003 LogicalXor: logical_xor.default(T self, T other)
1839 Eq: eq.Tensor|Scalar(T self, T|n other)
1840 Ne: ne.Tensor|Scalar(T self, T|n other)
1841 Lt: lt.Tensor|Scalar(T self, T|n other)
1842 Le: le.Tensor|Scalar(T self, T|n other)
1843 Gt: gt.Tensor|Scalar(T self, T|n other)
1844 Ge: ge.Tensor|Scalar(T self, T|n other)
1845 Where: where.self|ScalarSelf|ScalarOther|Scalar(T condition, T|n self, T|n other)
1846 MaskedFill: masked_fill.Scalar(T self, T mask, n value)
# elementwise, of one
1847 Neg: neg.default(T self)
1848 Abs: abs.default(T self)
1849 Sqrt: sqrt.default(T self)
1850 Rsqrt: rsqrt.default(T self)
1851 Reciprocal: reciprocal.default(T self)
1852 Square: square.default(T self)
1853 Exp: exp.default(T self)
1854 Log: log.default(T self)
1855 Sin: sin.default(T self)
1856 Cos: cos.default(T self)
1857 Erf: erf.default(T self)
1858 Tanh: tanh.default(T self)
1859 Sigmoid: sigmoid.default(T self)
1860 Relu: relu.default(T self)
1861 Silu: silu.default(T self)
1862 Hardswish: hardswish.default(T self)
1863 Floor: floor.default(T self)
2005 Ceil: ceil.default(T self)
2006 Round: round.default(T self)
2004 Sign: sign.default(T self)
1864 LogicalNot: logical_not.default(T self)
1865 BitwiseNot: bitwise_not.default(T self)
1866 Gelu: gelu.default(T self, s approximate='none')
1867 Softplus: softplus.default(T self, n beta=1, n threshold=20)
1868 LeakyRelu: leaky_relu.default(T self, n negative_slope=0.01)
2007 Elu: elu.default(T self, n alpha=1, n scale=1, n input_scale=1)
1869 Hardtanh: hardtanh.default(T self, n min_val=-1, n max_val=1)
1870 Clamp: clamp.default(T self, n? min=None, n? max=None)
1871 ClampMin: clamp_min.default(T self, n min)
1872 TypeAs: type_as.default(T self, T other)
1873 Glu: glu.default(T self, i dim=-1)
# what ONNX means and torch cannot say in a few calls (runtime/operators.py)
2101 CastFloat8: onnxline.cast_float8.default(T self, s to, ? saturate=True)
2102 Unsigned: onnxline.unsigned.default(T self, T other, s function)
2110 Quantize: onnxline.quantize.default(T self, T scale, T? zero_point, s to, i axis=1, i block_size=0, i? low=None,
    i? high=None, ? saturate=True, = as_floats=False)
2111 Dequantize: onnxline.dequantize.default(T self, T scale, T? zero_point, s to, i axis=1, i block_size=0)
2103 Recurrent: onnxline.recurrent.default(T input, T w, T r, T b, T hidden, T? cell, T? lengths, T? peepholes,
    s kind, s direction='forward', s activations='', f[]? alphas=None, f[]? betas=None, f clip=0.0,
    ? input_forget=False, ? reset_after=False)
2104 RoiAlign: onnxline.roi_align.default(T input, T boxes, T places, i[] output_size, s mode='avg',
    ? half_pixel=True, i sampling_ratio=0, f spatial_scale=1.0)
2112 StableTopk: onnxline.top_k.default(T self, i k, i dim, ? largest=True)
2105 RandomNormal: onnxline.random_normal.default(i[] size, f mean, f scale, s dtype, i seed)
2106 RandomUniform: onnxline.random_uniform.default(i[] size, f low, f high, s dtype, i seed)
2107 Bernoulli: onnxline.bernoulli.default(T self, s dtype, i seed)
2108 Multinomial: onnxline.multinomial.default(T self, i count, s dtype, i seed)
2109 Dropout: onnxline.dropout.default(T self, f ratio, i seed)
# of matrices
2021 Inverse: linalg_inv.default(T A)
2022 Cdist: cdist.default(T x1, T x2, n p=2, i? compute_mode=None)
2023 Triu: triu.default(T self, i diagonal=0)
2024 Tril: tril.default(T self, i diagonal=0)
# along axes
1874 Sum: sum.dim_IntList(T self, i[]? dim, ? keepdim=False, dtype? dtype)
1875 Mean: mean.dim(T self, i[]? dim, ? keepdim=False, dtype? dtype)
1876 Amax: amax.default(T self, i[] dim=(), ? keepdim=False)
2008 Amin: amin.default(T self, i[] dim=(), ? keepdim=False)
2010 Prod: prod.dim_int(T self, i dim, ? keepdim=False, dtype? dtype)
2011 Logsumexp: logsumexp.default(T self, i[] dim, ? keepdim=False)
1877 MaxDim: max.dim(T self, i dim, ? keepdim=False)
1878 Argmax: argmax.default(T self, i? dim=None, ? keepdim=False)
2009 Argmin: argmin.default(T self, i? dim=None, ? keepdim=False)
1879 Cumsum: cumsum.default(T self, i dim, dtype? dtype)
2013 Cumprod: cumprod.default(T self, i dim, dtype? dtype)
1880 VectorNorm: linalg_vector_norm.default(T self, n ord=2, i[]? dim=None, ? keepdim=False, dtype? dtype)
1881 Topk: topk.default(T self, i k, i dim=-1, ? largest=True, ? sorted=True)
2020 Sort: sort.stable(T self, = stable=True, i dim=-1, ? descending=False)
# moves of elements
1882 Cat: cat.default(T[] tensors, i dim=0)
1883 Stack: stack.default(T[] tensors, i dim=0)
1884 Pad: pad.default(T self, i[] pad, s mode='constant', f? value=None)
2017 ConstantPad: constant_pad_nd.default(T self, i[] pad, n value=0)
1885 Repeat: repeat.default(T self, i[] repeats)
1886 RepeatInterleave: repeat_interleave.self_int(T self, i repeats, i? dim=None, - output_size=None)
2012 Flip: flip.default(T self, i[] dims)
1887 Roll: roll.default(T self, i[] shifts, i[] dims=())
# by positions
1888 Embedding: embedding.default(T weight, T indices, - padding_idx=None, - scale_grad_by_freq=None, - sparse=None)
1889 Index: index.Tensor(T self, T?[] indices)
1890 IndexSelect: index_select.default(T self, i dim, T index)
1891 Gather: gather.default(T self, i dim, T index, - sparse_grad=None)
1892 IndexCopy: index_copy.default(T self, i dim, T index, T source)
2018 IndexPut: index_put.default(T self, T?[] indices, T values, ? accumulate=False)
1893 Scatter: scatter.src(T self, i dim, T index, T src)
2019 ScatterReduce: scatter_reduce.two(T self, i dim, T index, T src, s reduce, ? include_self=True)
1894 ScatterValue: scatter.value(T self, i dim, T index, n value)
1895 Copy: copy.default(T self, T src, - non_blocking=None)
1896 SliceScatter: slice_scatter.default(T self, T src, i dim=0, i? start=None, i? end=None, i step=1)
1897 SelectScatter: select_scatter.default(T self, T src, i dim, i index)
# new tensors in the form of another
1898 ZerosLike: zeros_like.default(T self, dtype? dtype, - layout=None, - device=None, - pin_memory=None,
    - memory_format=None)
1899 OnesLike: ones_like.default(T self, dtype? dtype, - layout=None, - device=None, - pin_memory=None,
    - memory_format=None)
""")
"""One row for each operator. A new one takes the number after the highest of these rows: 2113, and so on; a hundred
belongs to one family, so numbers of 2200 and above are of others."""


class Kind(IntEnum):
    """`Kind["Dropout"]` by the op's kind, `Kind(2109)` by the number."""

    _ignore_ = "row"

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
    ReluProduct = 1971
    RowProgram = 2201

    # aten
    Aten = 901
    HigherOrder = 902

    # operators of torch and of our own, with typed arguments
    for row in OPERATORS:
        vars()[row.name] = row.number
