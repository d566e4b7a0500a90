"""Our forms in ONNX of single operators, each against torch on onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from pipeline.errors import Unsupported
from pipeline.export.patches import apply_patches
from pipeline.export.program_rewrites import (
    BY_PARTS,
    MOVES,
    cast_subtrahends,
    copy_reduced_outputs,
    decompose_complex,
    move_complex_as_real,
    unsqueeze_scalars,
)
from pipeline.export.to_onnx import explain_untranslatable
from pipeline.export.translations import TRANSLATIONS, translation_table
from pipeline.runtime.tensors import to_numpy


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def exported(function: Callable[..., Any], *args: Tensor) -> onnx.ModelProto:
    program = torch.export.export(Calling(function), args, strict=False)
    program = decompose_complex(program)
    move_complex_as_real(program)
    unsqueeze_scalars(program)
    cast_subtrahends(program)
    copy_reduced_outputs(program)
    try:
        made = torch.onnx.export(
            program, dynamo=True, optimize=False, verbose=False, custom_translation_table=translation_table()
        )
    except Exception as error:
        raise Unsupported(explain_untranslatable(error)) from error
    assert made is not None
    return onnx_ir.to_proto(made.model)


def run(model: onnx.ModelProto, *args: Tensor) -> np.ndarray:
    """By onnxruntime; by ONNX's reference evaluator on bfloat16, for which onnxruntime has no kernels on a CPU."""
    feeds = {info.name: to_numpy(tensor) for info, tensor in zip(model.graph.input, args, strict=True)}
    if any(tensor.dtype == torch.bfloat16 for tensor in args):
        evaluated: Any = ReferenceEvaluator(model).run(None, feeds)
        return np.asarray(evaluated[0])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(a, b, offs=ends)


def fallback(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    import transformers.integrations.moe  # noqa: F401  it enters the operator

    return torch.ops.transformers.grouped_mm_fallback(a, b, ends)


ENDS = {"each some": [2, 3, 7], "the first none": [0, 3, 7], "the middle none": [4, 4, 7], "all in one": [7, 7, 7]}


@pytest.mark.parametrize(
    ("function", "dtype", "tolerance"),
    [
        (fallback, torch.float32, 1e-5),
        (fallback, torch.float16, 2e-2),  # sums of 16 products, of a size around 4
        (grouped, torch.bfloat16, 1e-1),  # torch 2.13 traces this one in bfloat16 only
    ],
)
def test_grouped_product(function: Callable[..., Tensor], dtype: torch.dtype, tolerance: float) -> None:
    """One program serves every way of dividing the rows: nothing of the ends that it was traced with is in it."""
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(7, 16, generator=rng).to(dtype)
    b = torch.randn(3, 16, 8, generator=rng).to(dtype)
    model = exported(function, a, b, torch.tensor([2, 3, 7], dtype=torch.int32))
    for what, ends in ENDS.items():
        parts = torch.tensor_split(a.double(), torch.tensor(ends[:-1]))
        expected = torch.cat([part @ matrix for part, matrix in zip(parts, b.double(), strict=True)])
        found = run(model, a, b, torch.tensor(ends, dtype=torch.int32)).astype(np.float64)
        np.testing.assert_allclose(found, expected, atol=tolerance, err_msg=what)


def test_grouped_product_of_one_group_and_rows_after_it() -> None:
    a, b, ends = torch.randn(5, 16), torch.randn(1, 16, 8), torch.tensor([3], dtype=torch.int32)
    expected = torch.cat([a[:3] @ b[0], torch.zeros(2, 8)])
    np.testing.assert_allclose(run(exported(fallback, a, b, ends), a, b, ends), expected, atol=1e-5)


def test_grouped_product_of_two_stacks() -> None:
    a, b = torch.randn(3, 4, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    model = exported(lambda a, b: torch.nn.functional.grouped_mm(a, b), a, b)
    np.testing.assert_allclose(run(model, a, b).astype(np.float64), torch.bmm(a.double(), b.double()), atol=1e-1)


def test_a_grouped_product_over_columns_is_refused() -> None:
    a, b, ends = torch.randn(8, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.tensor([8, 16], dtype=torch.int32)
    with pytest.raises(Unsupported) as caught:
        exported(grouped, a, b, ends)
    first, reason = str(caught.value).splitlines()
    assert first.startswith("torch.onnx has no translation for aten._grouped_mm.default, which the model (Calling)")
    assert "a grouped product of 2-D and 2-D has no form in ONNX" in reason


def test_every_translation_has_an_operator() -> None:
    import transformers.integrations.moe  # noqa: F401

    assert len(translation_table()) == len(TRANSLATIONS)


MOVED: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.ops.aten.unsqueeze.default: lambda z: z.unsqueeze(-1) * z.unsqueeze(1) + z.unsqueeze(0).unsqueeze(-2),
    torch.ops.aten.select.int: lambda z: z.select(-1, 2) + z[:, -1],
    torch.ops.aten.index_select.default: lambda z: z.index_select(-1, torch.tensor([2, 0])),
    torch.ops.aten.index.Tensor: lambda z: z[:, torch.tensor([[2, 0], [1, 1]])],
    torch.ops.aten.expand.default: lambda z: z.unsqueeze(0).expand(2, -1, 3) * 2,
    torch.ops.aten.repeat.default: lambda z: z.repeat(2, 3),
}


def test_moves_of_complex_numbers() -> None:
    assert MOVED.keys() == MOVES.keys()

    def moved(x: Tensor) -> Tensor:
        return torch.cat([torch.view_as_real(move(torch.view_as_complex(x))).flatten() for move in MOVED.values()])

    x = torch.randn(3, 3, 2)
    np.testing.assert_allclose(run(exported(moved, x), x), moved(x), atol=1e-6)


PARTED: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.ops.aten.angle.default: lambda z: torch.complex(torch.angle(z), torch.atan2(z.real, z.imag)),
    torch.ops.aten.mul.Scalar: lambda z: torch.ops.aten.mul.Scalar(z, 2j) + torch.ops.aten.mul.Scalar(z.real, 1 - 1j),
    torch.ops.aten.mul.Tensor: lambda z: z * 2j * z + z.conj() * 2j,
    torch.ops.aten.exp.default: lambda z: torch.exp(z) + torch.exp(1j * z.imag),
    torch.ops.aten.pow.Tensor_Scalar: lambda z: z**2,
    torch.ops.aten.where.self: lambda z: torch.where(z.real > 0, z, z.imag),
}


def test_complex_numbers_are_computed_by_their_parts() -> None:
    assert PARTED.keys() == BY_PARTS.keys()

    def parted(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.stack([compute(torch.view_as_complex(x)) for compute in PARTED.values()]))

    x = torch.randn(3, 3, 2)
    np.testing.assert_allclose(run(exported(parted, x), x), parted(x), atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_signal_from_its_spectrogram(batch: int) -> None:
    """Magnitude and phase, as vocoders predict them, back to a signal."""

    def vocoder(x: Tensor) -> Tensor:
        return torch.istft(x[:, :5].exp() * torch.exp(1j * x[:, 5:]), 8, 2, 8, window=torch.hann_window(8))

    x = torch.randn(batch, 10, 12)
    np.testing.assert_allclose(run(exported(vocoder, x), x), vocoder(x), atol=1e-4)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_extremes_of_any_rank(shape: tuple[int, ...]) -> None:
    def extremes(x: Tensor) -> Tensor:
        largest, smallest = torch.topk(x, 1), torch.topk(x, 1, dim=0, largest=False)
        along = [x.amax((-1,), keepdim=True), x.amin(0), *largest, *smallest]
        along += [x.prod(-1), (x > 0).prod(0, keepdim=True), (x > 0).any(0), (x > 0).all(-1, keepdim=True), x.any(0)]
        return torch.cat([part.reshape(-1).float() for part in (x.amax(), x.amin(), torch.amax(x, ()), *along)])

    x = torch.randn(shape)
    np.testing.assert_array_equal(run(exported(extremes, x), x), extremes(x))


@pytest.mark.parametrize("shape", [(), (3, 6)])
def test_ordered_elements_and_products_of_any_rank(shape: tuple[int, ...]) -> None:
    def ordered(x: Tensor) -> Tensor:
        last = max(x.ndim - 1, 0)
        pairs = [*x.median(-1), *x.median(0, keepdim=True), *x.kthvalue(1), *x.kthvalue(1, 0, keepdim=True)]
        products = [x.cumprod(-1), x.cumprod(0), (x > 0).cumprod(last)]
        return torch.cat([part.reshape(-1).float() for part in (x.median(), *pairs, *products)])

    x = torch.randn(shape)
    np.testing.assert_allclose(run(exported(ordered, x), x), ordered(x), atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_a_stable_sort_of_any_rank_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Equal elements stay in their order."""

    def ordered(x: Tensor) -> Tensor:
        pairs = [*x.sort(dim=-1, stable=True), *x.sort(dim=0, descending=True, stable=True), x.sort(-1)[0]]
        return torch.cat([part.reshape(-1).float() for part in pairs])

    x = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    np.testing.assert_array_equal(run(exported(ordered, x), x), ordered(x))


@pytest.mark.parametrize("shape", [(), (3, 6)])
def test_frequent_and_running_elements_of_any_rank(shape: tuple[int, ...]) -> None:
    def found(x: Tensor) -> Tensor:
        y, holes = x.round(), x.masked_fill(x > 0.5, torch.nan)
        pairs = [*y.mode(-1), *y.mode(0, keepdim=True), *y.long().mode(0)]
        pairs += [*y.cummax(-1), *y.cummin(0), *y.long().cummax(0), holes.cummax(-1)[0].nan_to_num(7)]
        pairs += [holes.nanmedian().nan_to_num(7), *(part.nan_to_num(7) for part in holes.nanmedian(-1, keepdim=True))]
        return torch.cat([part.reshape(-1).float() for part in pairs])

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    np.testing.assert_array_equal(run(exported(found, x), x), found(x))


@pytest.mark.parametrize("rows", [(), (6,), (1, 6), (4, 1), (2, 1, 6), (2, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_what_is_copied_has_the_shape_and_dtype_of_where_it_is_copied_to(
    rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    def copied(x: Tensor, y: Tensor) -> Tensor:
        return (x * 1).copy_(y)

    x, y = torch.randn(2, 4, 6), torch.randint(0, 2, rows).to(dtype)
    np.testing.assert_array_equal(run(exported(copied, x, y), x, y), copied(x, y))


@pytest.mark.parametrize("pool", [torch.nn.functional.avg_pool2d, torch.nn.functional.avg_pool3d])
@pytest.mark.parametrize("divisor", [None, 3])
def test_averages_by_a_divisor(pool: Callable[..., Tensor], divisor: int | None) -> None:
    def averaged(x: Tensor) -> Tensor:
        padded = pool(x, 3, 2, 1, count_include_pad=False, divisor_override=divisor)
        return torch.cat([padded.flatten(), pool(x, 2, divisor_override=divisor).flatten()])

    x = torch.randn(1, 5, 6, 7) if pool is torch.nn.functional.avg_pool2d else torch.randn(1, 2, 5, 6, 7)
    np.testing.assert_allclose(run(exported(averaged, x), x), averaged(x), atol=1e-6)


def test_a_scalar_along_a_dim_is_a_vector_of_one_element() -> None:
    """Whatever the operator: reductions, pairs of results, and operators that keep the shape."""

    def along(x: Tensor) -> Tensor:
        y = x.sum()
        parts = [y.var(0, unbiased=False), y.std(-1, unbiased=False, keepdim=True), y.norm(dim=0), y.norm(1, 0, True)]
        parts += [*torch.var_mean(y, 0, correction=0), *torch.std_mean(y, 0, correction=0, keepdim=True), *y.sort(0)]
        parts += [
            y.logsumexp(0),
            y.softmax(-1),
            y.cumsum(0),
            *y.max(0),
            y.argmin(0),
            *y.topk(1),
            y.mean(0, keepdim=True),
            y.sum(0, dtype=torch.float64),
        ]
        return torch.stack([part.float() for part in parts])

    x = torch.tensor([1.0, -3.0])
    np.testing.assert_allclose(run(exported(along, x), x), along(x), atol=1e-6)


def test_integers_from_a_float_number_as_a_mask_of_zeros_and_ones() -> None:
    """torch.onnx 2.13 refuses `1.0 - mask` for integers by itself; without that the cast can go."""
    mask = torch.tensor([[1, 0, 1]])
    model = exported(lambda given: (1.0 - given) * -3.0, mask)
    np.testing.assert_array_equal(run(model, mask), [[0.0, -3.0, 0.0]])
    program = torch.export.export(Calling(lambda given: 1.0 - given), (mask,))
    with pytest.raises(Exception, match="Cannot find a compatible OpOverload"):
        torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)


@pytest.mark.parametrize("reduce", [torch.sum, torch.amax, torch.cumsum, torch.prod])
def test_a_reduction_in_half_precision_that_is_an_output_keeps_its_type(reduce: Callable[..., Tensor]) -> None:
    """torch.onnx 2.13 makes the output float32."""
    x = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float16)
    found = run(exported(lambda given: reduce(given, 1), x), x)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, reduce(x, 1))


def test_the_phase_of_a_negative_number_is_pi() -> None:
    """The first number of a real signal's spectrum is real, and a vocoder's model reads its phase."""

    def phase(x: Tensor) -> Tensor:
        return torch.angle(torch.stft(x, 8, 4, 8, window=torch.hann_window(8), return_complex=True))[:, :1]

    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    assert (phase(x) > 3).any()
    np.testing.assert_allclose(run(exported(phase, x), x), phase(x), atol=1e-5)


def test_nonzero_of_a_scalar_has_no_index() -> None:
    def found(x: Tensor) -> Tensor:
        return x.sum().nonzero()

    model = exported(found, torch.ones(2))
    for x in (torch.ones(2), torch.zeros(2)):
        assert run(model, x).shape == found(x).shape


def test_places_in_a_sorted_sequence() -> None:
    row, rows = torch.tensor([0.0, 1.0, 1.0, 3.0]), torch.tensor([[0.0, 1.0, 2.0], [4.0, 5.0, 5.0]])
    order = torch.tensor([2, 0, 3, 1])

    def places(x: Tensor) -> Tensor:
        along = [torch.searchsorted(row, x, right=right) for right in (False, True)]
        along += [torch.searchsorted(rows, x, side="right", out_int32=True), torch.searchsorted(row.long(), x.long())]
        along += [torch.searchsorted(row[order.argsort()], x, sorter=order.argsort().argsort())]
        return torch.cat([*(part.flatten().long() for part in along), torch.searchsorted(row, 1.0, right=True)[None]])

    x = torch.tensor([[-1.0, 1.0, 0.5], [5.0, torch.nan, torch.inf]])
    np.testing.assert_array_equal(run(exported(places, x.nan_to_num(9)), x.nan_to_num(9)), places(x.nan_to_num(9)))
    alone = torch.tensor([torch.nan, 1.0])
    assert run(exported(lambda x: torch.searchsorted(row, x), alone), alone).tolist() == [4, 1]


def test_distances_of_rows() -> None:
    orders = (0.0, 1.0, 2.0, 3.0, torch.inf)

    def distances(x: Tensor) -> Tensor:
        return torch.stack([torch.cdist(x, x[:1, ::2], p=p) for p in orders])  # of equal rows too

    x = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0))  # above 25 rows torch takes products
    for p, found, expected in zip(orders, run(exported(distances, x), x), distances(x.double()), strict=True):
        limit = 2e-3 if p == 2 else 1e-5  # the root of a rounding error
        np.testing.assert_allclose(found, expected, atol=limit, err_msg=f"{p}")


TAILS = [0.0, -1e-6, 0.7, -2.5, 9.5, -15.0, 30.0, -30.0, 200.0, -200.0, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_that_the_own_form_of_torch_loses(dtype: torch.dtype) -> None:
    def tails(x: Tensor) -> Tensor:
        of_one = [torch.special.erfcx(x), nn.functional.logsigmoid(x)]
        return torch.stack([*of_one, *torch.logaddexp(x[:, None], x), *torch.logaddexp2(x[:, None], x)])

    x = torch.tensor(TAILS, dtype=dtype)
    limit = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(run(exported(tails, x), x), tails(x), rtol=limit, atol=limit)


def test_log_of_gamma() -> None:
    x = torch.tensor([0.0, -1.0, -2.5, -0.1, 1e-6, 0.3, 0.5, 1.0, 1.5, 2.0, 3.7, 100.0, 1e8, torch.inf, torch.nan])
    model = exported(torch.lgamma, x)
    np.testing.assert_allclose(run(model, x), torch.lgamma(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(("upper", "left"), [(False, True), (True, True), (False, False)])
def test_a_triangular_system(count: int, unit: bool, upper: bool, left: bool) -> None:
    """What is across the diagonal is not read; among nearly equal rows powers of the matrix grow."""
    rng = torch.Generator().manual_seed(count)
    matrix = torch.full((2, count, count), 0.9) + 0.1 * torch.rand(2, count, count, generator=rng)
    is_read = torch.ones(count, count, dtype=torch.bool)
    matrix = matrix.where(is_read.triu() if upper else is_read.tril(), math.nan)
    right = torch.randn(2, count, 3, generator=rng)
    right = right if left else right.mT.contiguous()

    def solve(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unit)

    expected = solve(matrix.double(), right.double())
    tolerance = 4 * float((solve(matrix, right) - expected).abs().max()) + 1e-6
    np.testing.assert_allclose(run(exported(solve, matrix, right), matrix, right), expected, rtol=1e-5, atol=tolerance)


def test_the_delta_rule_is_one_system_in_a_trace() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    class Rule(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return library.torch_chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1].sigmoid())[0]

    Rule.__module__ = library.__name__
    module, x = Rule(), 0.1 * torch.randn(1, 4, 2, 8)
    with apply_patches(module, is_traced=True):
        program = torch.export.export(module, (x,), strict=False)
    called = [node.target for node in program.graph.nodes]
    assert called.count(torch.ops.aten.linalg_solve_triangular.default) == 2 and len(called) < 150


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_over_time_and_space(bias: bool) -> None:
    layer = nn.Conv3d(4, 6, (2, 3, 3), stride=(1, 2, 2), padding=(1, 0, 1), dilation=(1, 1, 2), groups=2, bias=bias)
    tensor = torch.randn(2, 4, 3, 8, 9)
    with torch.no_grad():
        expected = layer(tensor).numpy()
    given = (tensor, layer.weight.detach(), *((layer.bias.detach(),) if layer.bias is not None else ()))

    def convolve(tensor: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.conv3d(tensor, weight, bias, (1, 2, 2), (1, 0, 1), (1, 1, 2), 2)

    np.testing.assert_allclose(run(exported(convolve, *given), *given), expected, atol=1e-5)
