"""One call of each operator of torch that has a kind of its own: operands, and the fields that the call becomes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as f

aten, onnxline = torch.ops.aten, torch.ops.onnxline

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
Y = torch.linspace(3, -1, 24).reshape(2, 3, 4)
M = torch.linspace(-1, 1, 16).reshape(4, 4)
# No row has an index twice: of two writes to one place, a GPU does either one last.
I = torch.tensor([[2, 0, 1], [1, 2, 0]])  # noqa: E741 - as the arguments of the functions below
B = X > 0
U16 = torch.uint16
P = torch.linspace(-1, 1, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6)
K = torch.linspace(-1, 1, 4 * 4 * 9).reshape(4, 4, 3, 3)
V = torch.linspace(0.5, 1.5, 4)

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...], str]] = {
    "Linear": (lambda x, m, v: f.linear(x, m, v), (X, M, V), "has_bias=True"),
    "MatMul": (lambda x, m: x @ m, (X, M), ""),
    "Mm": (lambda a, b: torch.mm(a, b), (X[0], M), ""),
    "Bmm": (lambda x, y: torch.bmm(x, y.mT), (X, Y), ""),
    "Addmm": (lambda v, a, b: torch.addmm(v, a, b, alpha=0.5), (V, X[0], M), "beta=1 alpha=0.5"),
    "Baddbmm": (
        lambda c, x, y: torch.baddbmm(c, x, y.mT, beta=0.5, alpha=2),
        (X[:, :, :3].contiguous(), X, Y),
        "beta=0.5 alpha=2",
    ),
    "Einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (X, Y), "equation='bij,bkj->bik' tensors=2"),
    "AtenScaledDotProductAttention": (
        lambda x, y: aten.scaled_dot_product_attention(x, y, y, None, 0.0, True, scale=0.5),
        (X, Y),
        "has_attn_mask=False is_causal=True has_scale=True scale=0.5 enable_gqa=False",
    ),
    "Conv1d": (
        lambda p, k: f.conv1d(p, k, stride=2, padding=1),
        (P[:, :, 0].contiguous(), K[..., 0].contiguous()),
        "has_bias=False stride=(2,) padding=(1,) dilation=(1,) groups=1",
    ),
    "Conv2d": (
        lambda p, k, v: f.conv2d(p, k, v, padding=(1, 0), dilation=2),
        (P, K, V),
        "has_bias=True stride=(1, 1) padding=(1, 0) dilation=(2, 2) groups=1",
    ),
    "Conv2dPadding": (
        lambda p, k: f.conv2d(p, k, padding="same"),
        (P, K),
        "has_bias=False stride=(1, 1) padding='same' dilation=(1,) groups=1",
    ),
    "ConvTranspose2d": (
        lambda p, k: f.conv_transpose2d(p, k, stride=2, output_padding=1),
        (P, K),
        "has_bias=False stride=(2, 2) padding=(0, 0) output_padding=(1, 1) groups=1 dilation=(1,)",
    ),
    "Conv3d": (
        lambda p, k: f.conv3d(p, k, dilation=(2, 1, 1)),
        (P[:, :, None].expand(2, 4, 5, 6, 6).contiguous(), K[:, :, None].expand(4, 4, 2, 3, 3).contiguous()),
        "has_bias=False stride=(1, 1, 1) padding=(0, 0, 0) dilation=(2, 1, 1) groups=1",
    ),
    "ConvTranspose1d": (
        lambda p, k, v: f.conv_transpose1d(p, k, v, padding=1),
        (P[:, :, 0].contiguous(), K[..., 0].contiguous(), V),
        "has_bias=True stride=(1,) padding=(1,) output_padding=(0,) groups=1 dilation=(1,)",
    ),
    "ConvTranspose3d": (
        lambda p, k: f.conv_transpose3d(p, k, stride=2, output_padding=(0, 1, 1)),
        (P[:, :, None].contiguous(), K[:, :, None].contiguous()),
        "has_bias=False stride=(2, 2, 2) padding=(0, 0, 0) output_padding=(0, 1, 1) groups=1 dilation=(1,)",
    ),
    "MaxPool2d": (
        lambda p: f.max_pool2d(p, 3, 2, 1, ceil_mode=True),
        (P,),
        "kernel_size=(3, 3) stride=(2, 2) padding=(1, 1) dilation=(1, 1) ceil_mode=True",
    ),
    "AvgPool2d": (
        lambda p: f.avg_pool2d(p, 2, padding=1, count_include_pad=False),
        (P,),
        "kernel_size=(2, 2) stride=() padding=(1, 1) ceil_mode=False count_include_pad=False "
        "has_divisor_override=False divisor_override=0",
    ),
    "AdaptiveAvgPool1d": (lambda x: f.adaptive_avg_pool1d(x, 2), (X,), "output_size=(2,)"),
    "AdaptiveAvgPool2d": (lambda p: f.adaptive_avg_pool2d(p, (2, 3)), (P,), "output_size=(2, 3)"),
    "UpsampleBilinear2d": (
        lambda p: f.interpolate(p, size=(9, 4), mode="bilinear", align_corners=True),
        (P,),
        "has_output_size=True output_size=(9, 4) align_corners=True has_scale_factors=False scale_factors=()",
    ),
    "UpsampleLinear1d": (
        lambda x: f.interpolate(x, scale_factor=2.0, mode="linear"),
        (X,),
        "has_output_size=False output_size=() align_corners=False has_scale_factors=True scale_factors=(2.0,)",
    ),
    "GridSampler": (
        lambda p, g: f.grid_sample(p, g, mode="nearest", padding_mode="border", align_corners=True),
        (P, P[..., :2].contiguous()),
        "interpolation_mode=1 padding_mode=1 align_corners=True",
    ),
    "Im2col": (
        lambda p: f.unfold(p, 3, stride=2),
        (P,),
        "kernel_size=(3, 3) dilation=(1, 1) padding=(0, 0) stride=(2, 2)",
    ),
    "LayerNorm": (
        lambda x, v: f.layer_norm(x, (4,), v, v, 1e-6),
        (X, V),
        "normalized_shape=(4,) has_weight=True has_bias=True eps=1e-06",
    ),
    "GroupNorm": (
        lambda p, v: f.group_norm(p, 2, v, v),
        (P, V),
        "num_groups=2 has_weight=True has_bias=True eps=1e-05",
    ),
    "BatchNorm": (lambda p, v: f.batch_norm(p, v, v, v, v), (P, V), "momentum=0.1 eps=1e-05"),
    "RmsNorm": (
        lambda x, v: f.rms_norm(x, (4,), v),
        (X, V),
        "normalized_shape=(4,) has_weight=True has_eps=False eps=0.0",
    ),
    "Softmax": (lambda x: x.softmax(1, dtype=torch.float64), (X,), "dim=1 dtype='float64'"),
    "LogSoftmax": (lambda x: x.log_softmax(-1), (X,), "dim=-1 dtype=''"),
    "Add": (lambda x, y: torch.add(x, y, alpha=0.3), (X, Y), "tensor_other=True other=0 alpha=0.3"),
    "Sub": (lambda x: x - 2, (X,), "tensor_other=False other=2 alpha=1"),
    "Mul": (lambda x, y: x * y, (X, Y), "tensor_other=True other=0"),
    "Div": (lambda x: x / 3.0, (X,), "tensor_other=False other=3.0"),
    "DivMode": (
        lambda i: torch.div(i, 2, rounding_mode="trunc"),
        (I,),
        "tensor_other=False other=2 rounding_mode='trunc'",
    ),
    "Pow": (lambda x: x**2, (X,), "tensor_exponent=False exponent=2"),
    "Maximum": (lambda x, y: torch.maximum(x, y), (X, Y), ""),
    "Minimum": (lambda x, y: torch.minimum(x, y), (X, Y), ""),
    "Rsub": (lambda x: torch.rsub(x, 1.5), (X,), "other=1.5 alpha=1"),
    "Fmod": (lambda x: torch.fmod(x, 1.5), (X,), "tensor_other=False other=1.5"),
    "Remainder": (lambda i: i % 2, (I,), "tensor_other=False other=2"),
    "And": (lambda b: b & b.flip(1), (B,), "tensor_other=True other=0"),
    "Or": (lambda i: torch.bitwise_or(i, 1), (I,), "tensor_other=False other=1"),
    "LogicalAnd": (lambda x, y: torch.logical_and(x, y), (X, Y), ""),
    "LogicalXor": (lambda b: torch.logical_xor(b, b.flip(1)), (B,), ""),
    "Eq": (lambda i: i == 1, (I,), "tensor_other=False other=1"),
    "Ne": (lambda x, y: x != y, (X, Y), "tensor_other=True other=0"),
    "Lt": (lambda x: x < 0.5, (X,), "tensor_other=False other=0.5"),
    "Le": (lambda x, y: x <= y, (X, Y), "tensor_other=True other=0"),
    "Gt": (lambda x: x > 0, (X,), "tensor_other=False other=0"),
    "Ge": (lambda x, y: x >= y, (X, Y), "tensor_other=True other=0"),
    "Where": (lambda b, x: torch.where(b, x, 0.5), (B, X), "tensor_self=True self=0 tensor_other=False other=0.5"),
    "MaskedFill": (lambda x, b: x.masked_fill(b, -1.0), (X, B), "value=-1.0"),
    "Neg": (lambda x: -x, (X,), ""),
    "Abs": (lambda x: x.abs(), (X,), ""),
    "Sqrt": (lambda v: v.sqrt(), (V,), ""),
    "Rsqrt": (lambda v: v.rsqrt(), (V,), ""),
    "Reciprocal": (lambda v: v.reciprocal(), (V,), ""),
    "Square": (lambda x: x.square(), (X,), ""),
    "Exp": (lambda x: x.exp(), (X,), ""),
    "Log": (lambda v: v.log(), (V,), ""),
    "Sin": (lambda x: x.sin(), (X,), ""),
    "Cos": (lambda x: x.cos(), (X,), ""),
    "Erf": (lambda x: x.erf(), (X,), ""),
    "Tanh": (lambda x: x.tanh(), (X,), ""),
    "Sigmoid": (lambda x: x.sigmoid(), (X,), ""),
    "Relu": (lambda x: x.relu(), (X,), ""),
    "Silu": (lambda x: f.silu(x), (X,), ""),
    "Hardswish": (lambda x: f.hardswish(x), (X,), ""),
    "Floor": (lambda x: x.floor(), (X,), ""),
    "Ceil": (lambda x: x.ceil(), (X,), ""),
    "Round": (lambda x: x.round(), (X,), ""),
    "Sign": (lambda x: x.sign(), (X,), ""),
    "LogicalNot": (lambda b: b.logical_not(), (B,), ""),
    "BitwiseNot": (lambda i: ~i, (I,), ""),
    "Gelu": (lambda x: f.gelu(x, approximate="tanh"), (X,), "approximate='tanh'"),
    "Softplus": (lambda x: f.softplus(x, beta=2), (X,), "beta=2 threshold=20"),
    "LeakyRelu": (lambda x: f.leaky_relu(x, 0.2), (X,), "negative_slope=0.2"),
    "Elu": (lambda x: f.elu(x, 0.5), (X,), "alpha=0.5 scale=1 input_scale=1"),
    "Hardtanh": (lambda x: f.hardtanh(x, -0.5, 0.5), (X,), "min_val=-0.5 max_val=0.5"),
    "Clamp": (lambda x: x.clamp(max=1), (X,), "has_min=False min=0 has_max=True max=1"),
    "ClampMin": (lambda x: aten.clamp_min(x, -0.5), (X,), "min=-0.5"),
    "TypeAs": (lambda x, i: x.type_as(i), (X, I), ""),
    "Glu": (lambda x: f.glu(x), (X,), "dim=-1"),
    "CastFloat8": (
        lambda x: torch.ops.onnxline.cast_float8(x * 300, "float8_e4m3fn"),
        (X,),
        "to='float8_e4m3fn' saturate=True",
    ),
    "Unsigned": (lambda i: torch.ops.onnxline.unsigned(i.to(U16), (i * 3).to(U16), "add"), (I,), "function='add'"),
    "Quantize": (
        lambda x, v: onnxline.quantize(x, v, to="uint8", axis=2, low=0, high=15),
        (X, V),
        "has_zero_point=False to='uint8' axis=2 block_size=0 has_low=True low=0 has_high=True high=15 saturate=True",
    ),
    "Dequantize": (
        lambda i, v: onnxline.dequantize(i, v[:1], i[:1, 0], to="float64"),
        (I, V),
        "has_zero_point=True to='float64' axis=1 block_size=0",
    ),
    "Recurrent": (
        lambda x, w, r, b, h: onnxline.recurrent(x, w, r, b, h, kind="GRU", direction="reverse", clip=1.5)[0],
        (X, X.reshape(1, 6, 4), X.reshape(2, 6, 2)[:1], X.reshape(2, 12)[1:], X.reshape(4, 3, 2)[1:2]),
        "has_cell=False has_lengths=False has_peepholes=False kind='GRU' direction='reverse' activations='' "
        "has_alphas=False alphas=() has_betas=False betas=() clip=1.5 input_forget=False reset_after=False",
    ),
    "StableTopk": (lambda x: onnxline.top_k(x, 2, 1), (X,), "k=2 dim=1 largest=True"),
    "Cdist": (lambda x, y: aten.cdist(x, y), (X, Y), "p=2 has_compute_mode=False compute_mode=0"),
    "Triu": (lambda x: x.triu(1), (X,), "diagonal=1"),
    "Tril": (lambda x: x.tril(), (X,), "diagonal=0"),
    "Sum": (lambda x: x.sum((0, -1), keepdim=True), (X,), "has_dim=True dim=(0, -1) keepdim=True dtype=''"),
    "Mean": (lambda x: x.mean(1), (X,), "has_dim=True dim=(1,) keepdim=False dtype=''"),
    "Amax": (lambda x: x.amax((0, 1)), (X,), "dim=(0, 1) keepdim=False"),
    "Amin": (lambda x: x.amin((0, 1)), (X,), "dim=(0, 1) keepdim=False"),
    "Prod": (lambda x: x.prod(1), (X,), "dim=1 keepdim=False dtype=''"),
    "Logsumexp": (lambda x: x.logsumexp(1), (X,), "dim=(1,) keepdim=False"),
    "MaxDim": (lambda x: x.max(1), (X,), "dim=1 keepdim=False"),
    "Argmax": (lambda x: x.argmax(-1), (X,), "has_dim=True dim=-1 keepdim=False"),
    "Argmin": (lambda x: x.argmin(-1), (X,), "has_dim=True dim=-1 keepdim=False"),
    "Cumsum": (lambda x: x.cumsum(1), (X,), "dim=1 dtype=''"),
    "Cumprod": (lambda x: x.cumprod(1), (X,), "dim=1 dtype=''"),
    "VectorNorm": (
        lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        (X,),
        "ord=3 has_dim=True dim=(1,) keepdim=False dtype=''",
    ),
    "Topk": (lambda x: x.topk(2), (X,), "k=2 dim=-1 largest=True sorted=True"),
    "Sort": (lambda x: x.sort(dim=1, descending=True, stable=True), (X,), "dim=1 descending=True"),
    "Cat": (lambda x, y: torch.cat([x, y], 1), (X, Y), "tensors=2 dim=1"),
    "Stack": (lambda x, y: torch.stack([x, y], -1), (X, Y), "tensors=2 dim=-1"),
    "Pad": (
        lambda x: f.pad(x, (1, -1, 0, 2), value=-1.0),
        (X,),
        "pad=(1, -1, 0, 2) mode='constant' has_value=True value=-1.0",
    ),
    "ConstantPad": (lambda x: aten.constant_pad_nd(x, (1, -1, 0, 2), -1.0), (X,), "pad=(1, -1, 0, 2) value=-1.0"),
    "Repeat": (lambda x: x.repeat(1, 2, 1), (X,), "repeats=(1, 2, 1)"),
    "RepeatInterleave": (lambda x: x.repeat_interleave(2, dim=1), (X,), "repeats=2 has_dim=True dim=1"),
    "Flip": (lambda x: x.flip(1), (X,), "dims=(1,)"),
    "Roll": (lambda x: x.roll(1, 2), (X,), "shifts=(1,) dims=(2,)"),
    "Embedding": (lambda i, m: f.embedding(i, m), (I, M), ""),
    "Index": (lambda i, x: x[:, i], (I, X), "indices=(0, 1)"),
    "IndexSelect": (lambda i, x: x.index_select(1, i[0]), (I, X), "dim=1"),
    "Gather": (lambda i, x: x[:, 0].gather(1, i), (I, X), "dim=1"),
    "IndexCopy": (lambda i, x: x.index_copy(2, i[0], x[:, :, :3] * 2), (I, X), "dim=2"),
    "IndexPut": (
        lambda i, x: aten.index_put(x[:, 0] + 0, (None, i[0]), x[:, 1, 1:], True),
        (I, X),
        "indices=(0, 1) accumulate=True",
    ),
    "Scatter": (lambda i, x: (x[:, 0] + 0).scatter(1, i, x[:, 1, 1:]), (I, X), "dim=1"),
    "ScatterReduce": (
        lambda i, x: (x[:, 0] + 0).scatter_reduce(1, i, x[:, 1, 1:], "amax"),
        (I, X),
        "dim=1 reduce='amax' include_self=True",
    ),
    "ScatterValue": (lambda i, x: (x[:, 0] + 0).scatter(1, i, 0.5), (I, X), "dim=1 value=0.5"),
    "Copy": (lambda x, y: aten.copy(x, y), (X, Y), ""),
    "SliceScatter": (
        lambda x, y: x.slice_scatter(y[:, :2], 1, 1, 3),
        (X, Y),
        "dim=1 has_start=True start=1 has_end=True end=3 step=1",
    ),
    "SelectScatter": (lambda x, y: x.select_scatter(y[:, 0], 1, 2), (X, Y), "dim=1 index=2"),
    "ZerosLike": (lambda x: torch.zeros_like(x), (X,), "dtype=''"),
    "OnesLike": (lambda x: torch.ones_like(x, dtype=torch.int64), (X,), "dtype='int64'"),
}
"""kind → a function of these operands, and the fields of its call."""
