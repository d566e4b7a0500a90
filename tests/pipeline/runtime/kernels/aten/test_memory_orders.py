"""Operators of torch on operands and results in other orders than rows: the kernel gives what rows give.

The table is of the calls that torch makes itself, forward and backward: the operators that a train step meets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.nn import functional as f
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.ir import InputRef, TorchConst
from pipeline.ops import Kind
from pipeline.ops.aten import takes_any_order
from pipeline.ops.aten.memory import ANY_ORDER
from pipeline.runtime.kernels.aten import prepare_kernel
from pipeline.runtime.operators import find_operator

Function = Callable[[torch.Tensor], torch.Tensor]

OF_IMAGES: tuple[Function, ...] = (
    lambda x: f.group_norm(x, 2, x.mean((0, 2, 3)), x.mean((0, 2, 3))),
    lambda x: f.instance_norm(x),
    lambda x: f.layer_norm(x, x.shape[-1:], x[0, 0, 0], x[0, 0, 0]),
    lambda x: f.batch_norm(x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype), training=True),
    lambda x: f.batch_norm(x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)),
    lambda x: f.rms_norm(x, x.shape[-1:]),
    lambda x: f.local_response_norm(x, 3),
    *(lambda x, mode=mode: f.pad(x, (1, 2, 2, 1), mode) for mode in ("reflect", "replicate", "circular", "constant")),
    *(
        lambda x, mode=mode: f.interpolate(x, scale_factor=2, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    ),
    lambda x: f.interpolate(x, size=(3, 4), mode="bilinear", antialias=True),
    lambda x: f.max_pool2d(x, 3, 2, 1),
    lambda x: f.avg_pool2d(x, 3, 2, 1),
    lambda x: f.adaptive_avg_pool2d(x, (2, 3)),
    lambda x: f.adaptive_max_pool2d(x, (2, 3)),
    lambda x: f.lp_pool2d(x, 2, 2),
    lambda x: f.fractional_max_pool2d(
        x, 2, output_size=(3, 3), _random_samples=torch.full((2, 4, 2), 0.3, dtype=x.dtype)
    ),
    lambda x: f.conv2d(x, x[:, :, :3, :3], padding=1),
    lambda x: f.conv_transpose2d(x, x.mean((0, 2, 3)).expand(4, 4)[:, :, None, None] * x[0, 0, :3, :3]),
    lambda x: f.unfold(x, 3, padding=1),
    lambda x: f.fold(f.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1),
    *(
        lambda x, mode=mode: f.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), mode, align_corners=False)
        for mode in ("bilinear", "nearest", "bicubic")
    ),
    lambda x: f.pixel_shuffle(x, 2),
    lambda x: f.pixel_unshuffle(x, 2),
    lambda x: f.channel_shuffle(x, 2),
    lambda x: f.nll_loss(f.log_softmax(x, 1), torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64)),
    lambda x: f.scaled_dot_product_attention(x, x, x),
    lambda x: f.prelu(x, x.mean((0, 2, 3))),
)

ELEMENTS = "elu gelu hardsigmoid hardswish hardtanh leaky_relu mish sigmoid silu softplus tanh relu logsigmoid"

OF_ANY: tuple[Function, ...] = (
    *(lambda x, axis=axis: f.softmax(x, axis) for axis in (1, -1)),
    *(lambda x, axis=axis: f.log_softmax(x, axis) for axis in (1, -1)),
    *(lambda x, axis=axis: x.cumsum(axis) for axis in (1, -1)),
    lambda x: x.cumprod(1),
    lambda x: x.logcumsumexp(1),
    lambda x: x.logsumexp(1),
    lambda x: x.sum((0, -1)) * x.mean(),
    lambda x: x.amax(1) + x.amin(1) + x.max(1).values + x.median(1).values,
    lambda x: x.var(1) + x.std(1) + x.prod(1),
    lambda x: torch.linalg.vector_norm(x, dim=1),
    lambda x: x.sort(1).values + x.flip(1) + x.roll(1, 1),
    lambda x: x.topk(2, 1).values,
    lambda x: torch.cat([x, x], 1) + torch.stack([x, x], 1).flatten(1, 2),
    lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
    lambda x: x.scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
    lambda x: x.index_select(1, torch.tensor([1, 0])) + x[:, torch.tensor([1, 2])],
    lambda x: x.index_add(1, torch.tensor([1, 0]), x[:, :2]),
    lambda x: x.masked_fill(x > 0, 1.0) * torch.where(x > 0, x, -x),
    lambda x: x.triu() + x.tril(1),
    lambda x: x @ x.mT,
    lambda x: f.linear(x, x.flatten(0, -2)[:3], x.flatten()[:3]),
    lambda x: f.glu(x, 1),
    lambda x: (
        f.mse_loss(x, x.detach().flip(0)) + f.smooth_l1_loss(x, x.detach().flip(0)) + f.huber_loss(x, x.detach() + 2)
    ),
    *(lambda x, name=name: getattr(f, name)(x) for name in ELEMENTS.split()),
)

OF_VOLUMES: tuple[Function, ...] = (
    lambda x: f.avg_pool3d(x, 2),
    lambda x: f.max_pool3d(x, 2),
    lambda x: f.adaptive_avg_pool3d(x, (2, 3, 2)),
    lambda x: f.adaptive_max_pool3d(x, (2, 3, 2)),
    lambda x: f.pad(x, (1, 1, 1, 1, 1, 1), "reflect"),
    lambda x: f.pad(x, (1, 1, 1, 1, 1, 1), "replicate"),
    lambda x: f.interpolate(x, scale_factor=2, mode="trilinear"),
    lambda x: f.group_norm(x, 2),
    lambda x: f.conv3d(x, x[:, :, :2, :2, :2]),
    lambda x: f.grid_sample(x, x[:, :3].permute(0, 2, 3, 4, 1).tanh(), align_corners=False),
)

FUNCTIONS = [
    *((function, (2, 4, 6, 4)) for function in (*OF_IMAGES, *OF_ANY)),
    *((function, (2, 4, 4, 4, 4)) for function in OF_VOLUMES),
    *((function, (3, 4, 4)) for function in OF_ANY),
]

DRAWS = ("rand", "bernoulli", "dropout")


class Calls(TorchDispatchMode):
    """Collects one call of each operator for each form of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable and func.namespace == "aten":
            copies = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
            forms = pytree.tree_map_only(torch.Tensor, torch.Tensor.dim, copies[0])
            views = any(result.alias_info is not None for result in func._schema.returns)
            if not views and not any(word in str(func) for word in (*DRAWS, "as_strided", "empty", "_unsafe_view")):
                self.found.setdefault(f"{func} {forms}", (func, *copies))
        return func(*args, **kwargs)


def calls_of(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    with warnings.catch_warnings(), Calls() as calls:
        warnings.simplefilter("ignore")
        for function, shape in FUNCTIONS if dtype is torch.float64 else FUNCTIONS[: len(OF_IMAGES)]:
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            out = function(x)
            torch.autograd.grad((out * torch.randn_like(out)).sum(), x)
    return calls.found


def rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() > 1 and tensor.is_floating_point() else tensor


ORDERS = (channels_last, permuted, with_gaps, expanded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_call_gives_in_every_order_what_it_gives_in_rows(dtype: torch.dtype) -> None:
    limit = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]  # sums of a few hundred numbers near 1
    seen, wrong = set[str](), []
    out_orders = cycle((rows, channels_last, permuted))
    for func, args, kwargs in calls_of(dtype).values():
        seen.add(str(func))
        for order in ORDERS:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
            for chosen in [[at] for at in places] + [places][: len(places) > 1]:
                given = [order(leaf) if at in chosen else leaf for at, leaf in enumerate(leaves)]
                plain = [rows(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
                ins, kw = pytree.tree_unflatten(plain, tree)
                wanted = [one for one in pytree.tree_leaves(func(*ins, **kw)) if isinstance(one, torch.Tensor)]
                out_order = next(out_orders)
                outs = [out_order(torch.zeros_like(one, memory_format=torch.contiguous_format)) for one in wanted]
                launch(func, *pytree.tree_unflatten(given, tree), outs)
                if not all(is_close(one, other, limit) for one, other in zip(outs, wanted, strict=True)):
                    wrong.append(f"{func} {order.__name__} {chosen} -> {out_order.__name__}")
    assert not wrong
    assert {"aten.native_group_norm_backward.default", "aten.reflection_pad2d_backward.default"} <= seen
    if dtype is torch.float64:
        assert len(seen) > 100
        assert len(seen & ANY_ORDER) > 40


def is_close(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    if not found.is_floating_point():  # of equal elements the place of any one is right
        return True
    return torch.allclose(found, wanted, rtol=limit, atol=limit, equal_nan=True)


def launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]) -> None:
    """Bind and call the kernel of a call whose operands lay in rows in the trace."""
    ins: list[torch.Tensor] = []
    call = dict(zip([one.name for one in func._schema.arguments], (item(one, ins) for one in args), strict=False))
    call |= {name: item(one, ins) for name, one in kwargs.items()}
    traced = None if takes_any_order(str(func)) else [rows(torch.empty(one.shape)).stride() for one in ins]
    prepare_kernel(Kind.Aten, {"op": str(func), "call": call, "orders": (), "traced": traced})(ins, outs)()


def item(given: Any, ins: list[torch.Tensor]) -> Any:
    if isinstance(given, torch.Tensor):
        ins.append(given)
        return InputRef(len(ins) - 1)
    if isinstance(given, list | tuple):
        return tuple(item(one, ins) for one in given)
    for kind, word in WORDS.items():
        if isinstance(given, kind):
            return TorchConst(word, str(given).removeprefix("torch."))
    return given


WORDS = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}


def test_every_operator_in_the_table_is_one_of_torch() -> None:
    for kind in ANY_ORDER:
        assert find_operator(kind).name().startswith(("aten::", "onnxline::")), kind
