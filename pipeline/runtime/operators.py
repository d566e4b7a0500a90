"""Operators of torch by name, and our own (`onnxline.…`): what ONNX means and torch cannot say in a few calls.

Each of our own is registered once, with the function that computes it, a fake (shape and dtype of the result), and a
gradient where it has one. So torch runs, traces and differentiates these operators like its own, a plan calls them by
their row in `pipeline.ops`, and `find_operator` finds both. `argument` converts the attributes of a call to torch's
arguments: constants by name, tensors and bodies by their references.

ONNX's operators that draw random values. Called as operators of torch they draw torch's own (`torch.manual_seed`), so
that no two steps of a training draw the same; a plan gives each a generator with the seed of its node. Onnxruntime
draws other values for the same seed: it has another generator.

ONNX's QuantizeLinear and DequantizeLinear in torch's operators, with gradients. Rounding has no gradient, so it takes
that of a straight line (Bengio et al. 2013); a number that is rounded beyond the ends of the format has none. With
that, the gradient of a scale that quantize and dequantize share is that of LSQ (Esser et al. 2020, "Learned step size
quantization", equation 3), by the rules of calculus alone:

    q = clamp(round(x / s) + z)      y = (q - z) · s      dy/ds = round(x/s) - x/s  within,  q - z  beyond
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import library

from pipeline.errors import SourceError
from pipeline.ir import Attr, BodyRef, InputRef, TorchConst
from pipeline.runtime import own_layers
from pipeline.runtime.devices import TARGET
from pipeline.runtime.tensors import dtype_name, torch_dtype


def random_normal(
    size: Sequence[int], mean: float, scale: float, dtype: str, seed: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    del seed
    wide = torch.float64 if dtype == "float64" else torch.float32
    drawn = torch.randn(size, generator=generator, dtype=wide, device=_device_of(generator))
    return (mean + scale * drawn).to(torch_dtype(dtype))


def random_uniform(
    size: Sequence[int], low: float, high: float, dtype: str, seed: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """At least `low` and below `high`. Drawn between 0 and 1: torch refuses ranges that a small dtype cannot span."""
    del seed
    drawn = torch.rand(size, generator=generator, dtype=torch.float64, device=_device_of(generator))
    return (low + (high - low) * drawn).to(torch_dtype(dtype))


def _device_of(generator: torch.Generator | None) -> torch.device | None:
    """Where a plan draws; without a generator torch's default device, which is meta where nothing is computed."""
    return None if generator is None else generator.device


def bernoulli(self: torch.Tensor, dtype: str, seed: int, generator: torch.Generator | None = None) -> torch.Tensor:
    del seed
    return torch.bernoulli(self.detach(), generator=generator).to(torch_dtype(dtype))


def multinomial(
    self: torch.Tensor, count: int, dtype: str, seed: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """ONNX gives log-probabilities, which need not sum up to one; it draws with replacement.

    Before a single draw torch reads the sums on the host, where a capture would end; so two are drawn.
    """
    del seed
    shares = torch.softmax(self.detach().double(), 1)
    drawn = torch.multinomial(shares, max(count, 2), replacement=True, generator=generator)
    return drawn[:, :count].to(torch_dtype(dtype))


def dropout(
    self: torch.Tensor, ratio: float, seed: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the mask of what was kept: this is scaled up, so that the mean stays."""
    del seed
    if generator is None:
        return torch.native_dropout(self, ratio, True)
    kept = torch.rand(self.shape, generator=generator, dtype=torch.float64, device=self.device) >= ratio
    return torch.where(kept, self / (1 - ratio), 0), kept


DRAWS: Final[Mapping[str, Callable[..., Any]]] = {
    "random_normal(SymInt[] size, float mean, float scale, str dtype, int seed) -> Tensor": random_normal,
    "random_uniform(SymInt[] size, float low, float high, str dtype, int seed) -> Tensor": random_uniform,
    "bernoulli(Tensor self, str dtype, int seed) -> Tensor": bernoulli,
    "multinomial(Tensor self, SymInt count, str dtype, int seed) -> Tensor": multinomial,
    "dropout(Tensor self, float ratio, int seed) -> (Tensor, Tensor)": dropout,
}
"""The function of each, by the schema of its operator."""


def quantize(
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    to: str,
    axis: int = 1,
    block_size: int = 0,
    low: int | None = None,
    high: int | None = None,
    saturate: bool = True,
    as_floats: bool = False,
) -> torch.Tensor:
    """round(self / scale) + zero_point, within the range of the dtype `to`; ties go to even. ONNX's QuantizeLinear.

    Args:
        self: floats of any shape. 16-bit floats are divided in float32, as a quotient in 16 bits would round twice.
        scale: one element for the whole tensor, one for each index of `axis`, or one for each block of `block_size`
            indices of `axis`.
        zero_point: of the shape of `scale`; None for 0. A float8 is rounded by its cast, and its zero point is 0.
        to: the name of an integer or float8 dtype.
        axis: the axis of `self` along which scales differ.
        block_size: how many indices of `axis` share a scale; 0 for no blocks.
        low: the lowest integer; by default that of `to`.
        high: the highest integer; by default that of `to`.
        saturate: a value that a float8 cannot hold becomes the largest value of the type.
        as_floats: the result has a float dtype and integral values, since integers have no gradient.

    Returns:
        A tensor of the shape of `self`, of the dtype `to`.
    """
    wide = torch.float64 if torch.float64 in (self.dtype, scale.dtype) else torch.float32
    values = self.to(wide) / spread(scale.to(wide), self, axis, block_size)
    zero = None if zero_point is None else spread(zero_point.to(wide), self, axis, block_size)
    if to.startswith("float8"):
        values = values if zero is None else values + zero
        return torch.ops.onnxline.cast_float8(values, to, saturate)
    values = values + (values.round() - values).detach() if as_floats else values.round()
    values = values if zero is None else values + zero
    limits = torch.iinfo(torch_dtype(to))
    values = values.clamp(limits.min if low is None else low, limits.max if high is None else high)
    return values if as_floats else values.to(torch_dtype(to))


def dequantize(
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    to: str,
    axis: int = 1,
    block_size: int = 0,
) -> torch.Tensor:
    """(self - zero_point) · scale, of the float dtype `to`. ONNX's DequantizeLinear.

    Args:
        self: integers or float8 of any shape. The difference is taken in float32, which holds integers of up to 24 bits
            exactly, and in float64 for integers of 32 bits.
        scale: as in `quantize`.
        zero_point: as in `quantize`.
        to: the name of a float dtype.
        axis: as in `quantize`.
        block_size: as in `quantize`.
    """
    large = self.dtype in (torch.int32, torch.uint32)
    wide = torch.float64 if to == "float64" or large else torch.float32
    values = self.to(wide)
    if zero_point is not None:
        values = values - spread(zero_point.to(wide), self, axis, block_size)
    return (values * spread(scale.to(wide), self, axis, block_size)).to(torch_dtype(to))


def spread(parameters: torch.Tensor, x: torch.Tensor, axis: int, block_size: int) -> torch.Tensor:
    """Scales or zero points so that they broadcast to `x`: one for all, for each index of an axis, or each block."""
    if parameters.numel() == 1:
        return parameters.reshape(())
    if block_size:
        return parameters.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return parameters.view([-1 if own == axis % x.dim() else 1 for own in range(x.dim())])


def unsigned(self: torch.Tensor, other: torch.Tensor, function: str) -> torch.Tensor:
    """Arithmetic of unsigned integers of 16 bits and more, which torch lacks: by signed integers of the same bits.

    `function` is a key of `UNSIGNED_FUNCTIONS`. Values wrap around, a quotient is rounded down, and it and the
    remainder are 0 for a divisor of 0.
    """
    signed = SIGNED.get(self.dtype)
    if signed is None or other.dtype is not self.dtype:
        raise TypeError(f"found {self.dtype} and {other.dtype}, expected one of {', '.join(map(str, SIGNED))} for both")
    if function not in UNSIGNED_FUNCTIONS:
        raise ValueError(f"function={function!r}; expected one of {', '.join(UNSIGNED_FUNCTIONS)}")
    found = UNSIGNED_FUNCTIONS[function](self.view(signed), other.view(signed))
    return found if found.dtype is torch.bool else found.view(self.dtype)


def is_less(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Whether `left` is less, both read as unsigned: without its highest bit a signed integer has that order."""
    least = torch.iinfo(left.dtype).min
    return (left ^ least) < (right ^ least)


def divide_unsigned(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Half of `left` is no negative number, and neither is a divisor below the highest bit; a larger one goes into
    `left` once or not at all."""
    divisor = right.clamp_min(1)
    half = (left >> 1) & torch.iinfo(left.dtype).max
    quotient = half.div(divisor, rounding_mode="trunc") << 1
    quotient = quotient + ~is_less(left - quotient * divisor, divisor)
    return torch.where(right > 0, quotient, ((right != 0) & ~is_less(left, right)).to(left.dtype))


SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

UNSIGNED_FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "add": torch.add,
    "sub": torch.sub,
    "div": divide_unsigned,
    "minimum": lambda left, right: torch.where(is_less(left, right), left, right),
    "maximum": lambda left, right: torch.where(is_less(left, right), right, left),
    "remainder": lambda left, right: torch.where(right == 0, 0, left - divide_unsigned(left, right) * right),
    "lt": is_less,
    "le": lambda left, right: ~is_less(right, left),
    "gt": lambda left, right: is_less(right, left),
    "ge": lambda left, right: ~is_less(left, right),
}
"""The functions of `onnxline::unsigned`, by torch's names; what torch computes itself is not among them."""


@library.custom_op("onnxline::cast_float8", mutates_args=())
def cast_float8(self: torch.Tensor, to: str, saturate: bool = True) -> torch.Tensor:
    """A conversion of floats to a float8 type, as ONNX's table for `saturate` has it.

    Saturated, a number that is too large becomes the largest one. Otherwise it becomes NaN or infinity, whichever the
    type has.
    """
    dtype, x = float8_dtype(to), self.float()
    limit = torch.finfo(dtype).max
    narrow = x.clamp(-limit, limit)
    if not saturate:
        bound, beyond = BEYOND[dtype]
        narrow = torch.where(x.abs() >= bound, torch.copysign(torch.full_like(x, beyond), x), narrow)
    return narrow.to(dtype)


@cast_float8.register_fake
def fake_cast_float8(self: torch.Tensor, to: str, saturate: bool = True) -> torch.Tensor:
    return torch.empty_like(self, dtype=float8_dtype(to))


def float8_dtype(name: str) -> torch.dtype:
    dtype = torch_dtype(name)
    if dtype not in BEYOND:
        raise ValueError(f"to={name!r}; expected one of {', '.join(map(dtype_name, BEYOND))}")
    return dtype


def save_dtype(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def cast_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient.to(ctx.dtype), None, None


BEYOND: Final = {
    torch.float8_e4m3fn: (464 + 2**-15, math.nan),
    torch.float8_e4m3fnuz: (248, math.nan),
    torch.float8_e5m2: (61440, math.inf),
    torch.float8_e5m2fnuz: (61440, math.nan),
}
"""By type: the magnitude at which rounding goes beyond the largest number, and the result of rounding there. The
magnitude lies halfway to the next number that the type would have, and a tie goes to the even one: 464 to 448."""

cast_float8.register_autograd(cast_back, setup_context=save_dtype)


COMPOSED = (own_layers.recurrent, own_layers.roi_align, own_layers.top_k, quantize, dequantize, unsigned)
"""Functions of torch's own operators: torch sees through them, so they need no fake and no gradient."""

LIBRARY: Final = library.Library("onnxline", "FRAGMENT")
"""It has to live as long as its operators."""

for function in COMPOSED:
    LIBRARY.define(function.__name__ + library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")

for schema, draw in DRAWS.items():
    LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    LIBRARY.impl(draw.__name__, draw, "CompositeImplicitAutograd")


def argument(item: Attr, tensors: Sequence[torch.Tensor], bodies: Sequence[Any] = ()) -> Any:
    """`item` as an argument of torch; tuples become lists."""
    match item:
        case tuple():
            return [argument(part, tensors, bodies) for part in item]
        case InputRef(index):
            return tensors[index]
        case BodyRef(index):
            return bodies[index]
        case TorchConst(kind, name) if kind in WORDS:
            return WORDS[kind](name)
    return item


def find_operator(kind: str) -> torch._ops.OpOverload:
    """The operator called `aten.add.Tensor`, or `mylib.op.default`.

    Raises:
        SourceError: torch has no operator of this name, as when the library that registers it is not imported.
    """
    try:
        namespace, name, overload = kind.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, ValueError) as error:
        raise SourceError(
            f"torch has no operator {kind}; import the module that defines it, or give it an executor"
        ) from error


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """The tensors among the results of an operator, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_in(part)


def _device(name: str) -> torch.device:
    """That of the program that is bound, if it is no CPU. Otherwise a graph that was traced on meta runs on the CPU."""
    target = TARGET.get()
    return torch.device("cpu" if name.startswith("meta") else name) if target.is_host else target.place


def _constant(name: str) -> Any:
    return getattr(torch, name)


WORDS: Mapping[str, Callable[[str], Any]] = {
    "dtype": _constant,
    "layout": _constant,
    "memory_format": _constant,
    "device": _device,
    "operator": find_operator,
}


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """histc of integers, which torch has on other devices only (Mixtral's experts in `transformers`)."""
    if self.is_floating_point():
        return torch.histc(self, bins, min, max)
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


def flash_attention(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Attention and the logarithms of its sums, by torch's kernel for the CPU. That divides by how many heads, queries
    and keys there are, so where one of them is 0, it is not called."""
    if not query.is_cpu or query.dim() != 4 or (query.shape[1] and query.shape[2] and key.shape[2]):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, *rest, **options)
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=wide)


def flash_attention_gradient(gradient: torch.Tensor, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """As torch's kernel for the CPU, which divides by the number of heads."""
    if query.is_cpu and query.dim() == 4 and not query.shape[1]:
        return [torch.zeros_like(operand) for operand in (query, *rest[:2])]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return kernel(gradient, query, *rest, **options)


CPU_FALLBACKS: Mapping[str, Callable[..., Any]] = {
    "aten.histc.default": histc,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": flash_attention_gradient,
}
"""Functions with the operator's own arguments, by kind, for operators that torch has on meta and not on the CPU, since
models choose operators by device, so that traces on meta contain them; and for those whose kernels end the process."""
