/* The kinds of kernels that a plan.bin names by number, as the table of operators has them; a number never changes. */
#ifndef ONNXLINE_KINDS_H
#define ONNXLINE_KINDS_H

#include <stdint.h>

#define ONNXLINE_KINDS(KIND) \
    KIND(Identity, 101) \
    KIND(Cast, 102) \
    KIND(Reshape, 601) \
    KIND(Transpose, 602) \
    KIND(Split, 604) \
    KIND(Slice, 605) \
    KIND(Expand, 606) \
    KIND(Select, 609) \
    KIND(Unbind, 610) \
    KIND(Diagonal, 611) \
    KIND(Unfold, 612) \
    KIND(Contiguous, 613) \
    KIND(Aten, 901) \
    KIND(HigherOrder, 902) \
    KIND(OnnxNode, 1101) \
    KIND(SGD, 1401) \
    KIND(Adam, 1402) \
    KIND(NotFinite, 1403) \
    KIND(CountStep, 1404) \
    KIND(LinearPointwise, 1501) \
    KIND(ConvPointwise, 1502) \
    KIND(ScaledDotProductAttention, 1503) \
    KIND(SmallAttention, 1601) \
    KIND(Linear, 1801) \
    KIND(MatMul, 1802) \
    KIND(Mm, 1803) \
    KIND(Bmm, 1804) \
    KIND(Addmm, 1805) \
    KIND(Baddbmm, 1806) \
    KIND(Einsum, 1807) \
    KIND(AtenScaledDotProductAttention, 1808) \
    KIND(Conv1d, 1809) \
    KIND(Conv2d, 1810) \
    KIND(Conv2dPadding, 1811) \
    KIND(ConvTranspose2d, 1812) \
    KIND(MaxPool2d, 1813) \
    KIND(AvgPool2d, 1814) \
    KIND(AdaptiveAvgPool1d, 1815) \
    KIND(AdaptiveAvgPool2d, 1816) \
    KIND(UpsampleBilinear2d, 1817) \
    KIND(UpsampleLinear1d, 1818) \
    KIND(GridSampler, 1819) \
    KIND(Im2col, 1820) \
    KIND(LayerNorm, 1821) \
    KIND(GroupNorm, 1822) \
    KIND(BatchNorm, 1823) \
    KIND(RmsNorm, 1824) \
    KIND(Softmax, 1825) \
    KIND(LogSoftmax, 1826) \
    KIND(Add, 1827) \
    KIND(Sub, 1828) \
    KIND(Mul, 1829) \
    KIND(Div, 1830) \
    KIND(Pow, 1831) \
    KIND(Maximum, 1832) \
    KIND(Minimum, 1833) \
    KIND(Rsub, 1834) \
    KIND(Remainder, 1835) \
    KIND(And, 1836) \
    KIND(Or, 1837) \
    KIND(LogicalAnd, 1838) \
    KIND(Eq, 1839) \
    KIND(Ne, 1840) \
    KIND(Lt, 1841) \
    KIND(Le, 1842) \
    KIND(Gt, 1843) \
    KIND(Ge, 1844) \
    KIND(Where, 1845) \
    KIND(MaskedFill, 1846) \
    KIND(Neg, 1847) \
    KIND(Abs, 1848) \
    KIND(Sqrt, 1849) \
    KIND(Rsqrt, 1850) \
    KIND(Reciprocal, 1851) \
    KIND(Square, 1852) \
    KIND(Exp, 1853) \
    KIND(Log, 1854) \
    KIND(Sin, 1855) \
    KIND(Cos, 1856) \
    KIND(Erf, 1857) \
    KIND(Tanh, 1858) \
    KIND(Sigmoid, 1859) \
    KIND(Relu, 1860) \
    KIND(Silu, 1861) \
    KIND(Hardswish, 1862) \
    KIND(Floor, 1863) \
    KIND(LogicalNot, 1864) \
    KIND(BitwiseNot, 1865) \
    KIND(Gelu, 1866) \
    KIND(Softplus, 1867) \
    KIND(LeakyRelu, 1868) \
    KIND(Hardtanh, 1869) \
    KIND(Clamp, 1870) \
    KIND(ClampMin, 1871) \
    KIND(TypeAs, 1872) \
    KIND(Glu, 1873) \
    KIND(Sum, 1874) \
    KIND(Mean, 1875) \
    KIND(Amax, 1876) \
    KIND(MaxDim, 1877) \
    KIND(Argmax, 1878) \
    KIND(Cumsum, 1879) \
    KIND(VectorNorm, 1880) \
    KIND(Topk, 1881) \
    KIND(Cat, 1882) \
    KIND(Stack, 1883) \
    KIND(Pad, 1884) \
    KIND(Repeat, 1885) \
    KIND(RepeatInterleave, 1886) \
    KIND(Roll, 1887) \
    KIND(Embedding, 1888) \
    KIND(Index, 1889) \
    KIND(IndexSelect, 1890) \
    KIND(Gather, 1891) \
    KIND(IndexCopy, 1892) \
    KIND(Scatter, 1893) \
    KIND(ScatterValue, 1894) \
    KIND(Copy, 1895) \
    KIND(SliceScatter, 1896) \
    KIND(SelectScatter, 1897) \
    KIND(ZerosLike, 1898) \
    KIND(OnesLike, 1899) \
    KIND(ReluProduct, 1971) \
    KIND(DivMode, 2001) \
    KIND(Fmod, 2002) \
    KIND(LogicalXor, 2003) \
    KIND(Sign, 2004) \
    KIND(Ceil, 2005) \
    KIND(Round, 2006) \
    KIND(Elu, 2007) \
    KIND(Amin, 2008) \
    KIND(Argmin, 2009) \
    KIND(Prod, 2010) \
    KIND(Logsumexp, 2011) \
    KIND(Flip, 2012) \
    KIND(Cumprod, 2013) \
    KIND(Conv3d, 2014) \
    KIND(ConvTranspose1d, 2015) \
    KIND(ConvTranspose3d, 2016) \
    KIND(ConstantPad, 2017) \
    KIND(IndexPut, 2018) \
    KIND(ScatterReduce, 2019) \
    KIND(Sort, 2020) \
    KIND(Inverse, 2021) \
    KIND(Cdist, 2022) \
    KIND(Triu, 2023) \
    KIND(Tril, 2024) \
    KIND(CastFloat8, 2101) \
    KIND(Unsigned, 2102) \
    KIND(Recurrent, 2103) \
    KIND(RoiAlign, 2104) \
    KIND(RandomNormal, 2105) \
    KIND(RandomUniform, 2106) \
    KIND(Bernoulli, 2107) \
    KIND(Multinomial, 2108) \
    KIND(Dropout, 2109) \
    KIND(Quantize, 2110) \
    KIND(Dequantize, 2111) \
    KIND(StableTopk, 2112) \
    KIND(RowProgram, 2201)

#define ONNXLINE_ENTRY(name, number) ONNXLINE_KIND_##name = number,
enum onnxline_kind { ONNXLINE_KINDS(ONNXLINE_ENTRY) };
#undef ONNXLINE_ENTRY

static inline const char *onnxline_kind_name(uint32_t kind_id) {
#define ONNXLINE_NAME(name, number) case number: return #name;
    switch (kind_id) {
        ONNXLINE_KINDS(ONNXLINE_NAME)
        default: return "?";
    }
#undef ONNXLINE_NAME
}

#endif
