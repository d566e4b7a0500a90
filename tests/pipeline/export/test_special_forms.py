"""Our forms in ONNX of special functions, systems of equations, pools to a size, and indices, each against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.errors import Unsupported
from tests.pipeline.export.test_translations import exported, run

ENDS = [0.0, -0.0, 1e-6, 0.3, -0.7, 1.0, -2.5, 7.9, 8.1, -12.0, 40.0, 85.0, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_series_of_special_functions(dtype: torch.dtype, limit: float) -> None:
    """float32 has 7 digits, and the series have 13 or more."""

    def compute(x: Tensor) -> Tensor:
        special = torch.special
        return torch.stack([torch.digamma(x), torch.i0(x), special.i0e(x), special.i1(x), special.i1e(x)])

    x = torch.tensor([value for value in ENDS if abs(value) != torch.inf], dtype=dtype)
    np.testing.assert_allclose(run(exported(compute, x), x), compute(x), rtol=limit, atol=limit)


def test_inverses_of_the_error_function() -> None:
    def compute(p: Tensor) -> Tensor:
        return torch.stack([torch.erfinv(2 * p - 1), torch.special.ndtri(p)])

    p = torch.tensor([0.0, 1e-38, 1e-20, 1e-7, 0.01, 0.4999, 0.5, 0.75, 0.999999, 1.0, 1.5, -0.1, torch.nan])
    found, expected = run(exported(compute, p), p), compute(p)
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-6)  # near 1 the float32 of torch has 5 digits


def test_comparisons_that_heed_nan_and_the_sign_of_zero() -> None:
    def compute(x: Tensor, y: Tensor) -> Tensor:
        rows = [torch.fmax(x, y), torch.fmin(x, y), torch.hypot(x, y), torch.copysign(x, y), torch.signbit(x).float()]
        return torch.stack([1 / rows[3], *rows])

    x = torch.tensor([*ENDS, 1e30])
    y = torch.tensor([*ENDS[::-1], 1e30])
    np.testing.assert_allclose(run(exported(compute, x, y), x, y), compute(x, y), rtol=1e-6)


def test_rrelu_at_inference_has_one_slope() -> None:
    x = torch.tensor([-2.0, 3.0])
    np.testing.assert_allclose(run(exported(functional.rrelu, x), x), functional.rrelu(x), rtol=1e-6)
    with pytest.raises(Unsupported, match=r"call module\.eval\(\)"):
        exported(lambda x: functional.rrelu(x, training=True), x)


@pytest.mark.parametrize("size", [1e-6, 0.0, 1e9])
def test_a_determinant_that_is_no_float32_has_a_logarithm(size: float) -> None:
    matrix = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)) * size
    compute = lambda matrix: torch.stack(torch.linalg.slogdet(matrix))  # noqa: E731
    np.testing.assert_allclose(run(exported(compute, matrix), matrix), compute(matrix), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 12])
def test_systems_of_equations(count: int) -> None:
    """A zero on the diagonal needs another pivot."""
    rng = torch.Generator().manual_seed(count)
    matrix = torch.randn(2, count, count, generator=rng)
    matrix[:, 0, 0] = 0.0 if count > 1 else 2.0
    right = torch.randn(2, count, 3, generator=rng)

    def compute(a: Tensor, b: Tensor) -> Tensor:
        linear = torch.linalg
        positive = a @ a.mT + torch.eye(count)
        found = [linear.inv(a), linear.solve(a, b), linear.solve(a, b.mT, left=False).mT, linear.cholesky(positive)]
        sign, size = linear.slogdet(a)
        columns = [linear.inv_ex(a)[0], linear.solve(a, b[..., 0])[..., None], linear.cholesky(positive, upper=True)]
        return torch.cat([*found, *columns, torch.stack([sign, size], -1)[:, None].expand(2, count, 2)], -1)

    expected = compute(matrix.double(), right.double())
    limit = 8 * float((compute(matrix, right) - expected).abs().max()) + 1e-5  # as torch itself rounds in float32
    np.testing.assert_allclose(run(exported(compute, matrix, right), matrix, right), expected, rtol=1e-4, atol=limit)


def test_a_large_system_is_refused_with_what_to_do() -> None:
    with pytest.raises(Unsupported, match=r"17 rows has no form in ONNX, of 16 or fewer"):
        exported(torch.linalg.inv, torch.eye(17))


@pytest.mark.parametrize("sizes", [(3, 5), (4, 2), (1, 7), (8, 9)])
def test_pools_to_a_size_that_does_not_divide(sizes: tuple[int, int]) -> None:
    def compute(x: Tensor) -> Tensor:
        values, places = functional.adaptive_max_pool2d(x[:, :, 0], sizes, return_indices=True)
        of_time = functional.adaptive_avg_pool3d(x, (2, *sizes)).flatten(1)
        most = functional.adaptive_max_pool3d(x, (2, *sizes)).flatten(1)
        return torch.cat([values.flatten(1), places.flatten(1).float(), of_time, most], 1)

    x = torch.randn(2, 3, 5, 7, 8)
    np.testing.assert_allclose(run(exported(compute, x), x), compute(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include_self", [True, False])
def test_means_and_extremes_by_index(include_self: bool) -> None:
    def compute(x: Tensor, source: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        places = rows[None, :, None].expand(source.shape)
        mean = x.scatter_reduce(1, places, source, "mean", include_self=include_self)
        found = [x.index_reduce(1, rows, source, way, include_self=include_self) for way in ("mean", "amax", "prod")]
        flat = [x.put(rows[:2] + 5, source[0, :2, 0], accumulate=include_self), x.masked_select(mask[:, None])]
        return torch.cat([part.flatten() for part in (mean, *found, *flat)])

    x, source = torch.randn(2, 4, 3), torch.randn(2, 3, 3)
    given = x, source, torch.tensor([3, 0, 3]), torch.tensor([True, False, True, True])
    np.testing.assert_allclose(run(exported(compute, *given), *given), compute(*given), rtol=1e-5, atol=1e-6)


def test_an_operator_without_a_form_is_named_as_it_was_called() -> None:
    x = torch.tensor([4, 6])
    with pytest.raises(Unsupported, match=r"no translation for aten\.gcd\.default.*: compute the same by other"):
        exported(torch.gcd, x, x)
