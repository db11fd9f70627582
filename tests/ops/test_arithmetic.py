from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.arithmetic import (
    accumulator,
    matmul_rows,
    mean_square_scale,
    rotate,
    sigmoid,
    silu,
    softplus,
)
from dflash_graph.testing import BF16_REDUCTION, F32_REDUCTION, assert_matches

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: F32_REDUCTION, torch.bfloat16: BF16_REDUCTION}


def test_accumulator() -> None:
    for dtype, wide in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert accumulator(torch.empty(1, dtype=dtype)) is wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unrounded", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (37, 53), (1, 1), (257, 3), (130, 301)])
def test_rows_have_the_same_bits_in_any_company(
    rng: torch.Generator, dtype: torch.dtype, unrounded: bool, inner: int, outer: int
) -> None:
    """1 to 40 rows, each row at every place of a tile that the start makes."""
    x = torch.randn(48, inner, generator=rng).to(dtype)
    weight = torch.randn(outer, inner, generator=rng).to(dtype)
    whole = matmul_rows(x, weight, unrounded=unrounded)
    for rows in range(1, 41):
        start = rows * 7 % (48 - rows + 1)
        part = matmul_rows(x[start : start + rows], weight, unrounded=unrounded)
        assert torch.equal(part, whole[start : start + rows]), rows
    order = torch.randperm(48, generator=rng)
    assert torch.equal(matmul_rows(x[order], weight, unrounded=unrounded), whole[order])
    blocks = matmul_rows(x.reshape(3, 16, inner), weight, unrounded=unrounded)
    assert torch.equal(blocks.reshape(48, outer), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_rows_may_hold_anything(rng: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(8, 37, generator=rng).to(dtype)
    weight = torch.randn(53, 37, generator=rng).to(dtype)
    whole = matmul_rows(x, weight)
    for value in (torch.nan, torch.inf, 0.0, 1e30):
        spoiled = x.clone()
        spoiled[2:7] = value
        found = matmul_rows(spoiled, weight)
        for row in (0, 1, 7):
            assert torch.equal(found[row], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 23])
def test_matmul_rows_is_the_product(rng: torch.Generator, dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(1, rows, 37, generator=rng).to(dtype)
    weight = torch.randn(53, 37, generator=rng).to(dtype)
    exact = (x.double().unsqueeze(2) * weight.double()).sum(-1)
    for tiled in (True, False):
        rounded = matmul_rows(x, weight, tiled=tiled)
        assert rounded.dtype is dtype
        assert_matches(rounded, exact, TOLERANCE[dtype])
        wide = matmul_rows(x, weight, tiled=tiled, unrounded=True)
        assert wide.dtype is torch.float32
        assert_matches(wide, exact, F32_REDUCTION)
    oracle = matmul_rows(x.double(), weight.double(), unrounded=True)
    assert oracle.dtype is torch.float64
    assert torch.allclose(oracle, exact, rtol=1e-13, atol=1e-13)


def test_matmul_rows_gives_fresh_memory(rng: torch.Generator) -> None:
    x, weight = torch.randn(8, 6, generator=rng), torch.eye(6)
    for tiled in (True, False):
        product = matmul_rows(x, weight, tiled=tiled)
        assert product.is_contiguous()
        assert product.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logistic_functions_at_extremes(dtype: torch.dtype) -> None:
    """Against closed forms written so that neither overflows nor cancels."""
    points = [0.0, -0.0, 1e-30, 0.5, -0.5, 20.0, -20.0, 88.0, -88.0, 700.0, -700.0, 1e4, -1e4, 1e30]
    x = torch.tensor(points, dtype=dtype)
    for value, s, y, p in zip(
        x.double().tolist(),
        sigmoid(x).tolist(),
        silu(x).tolist(),
        softplus(x).tolist(),
        strict=True,
    ):
        tail = math.exp(-abs(value))
        logistic = 1 / (1 + tail) if value >= 0 else tail / (1 + tail)
        assert math.isclose(s, logistic, rel_tol=1e-14, abs_tol=1e-300)
        assert math.isclose(y, value * logistic, rel_tol=1e-14, abs_tol=1e-300)
        assert math.isclose(p, max(value, 0.0) + math.log1p(tail), rel_tol=1e-14, abs_tol=1e-300)
    for function in (sigmoid, silu, softplus):
        assert function(x).dtype is torch.float64
        assert function(torch.tensor([torch.nan])).isnan().all()


def test_logistic_functions_at_infinity() -> None:
    infinities = torch.tensor([torch.inf, -torch.inf])
    assert sigmoid(infinities).tolist() == [1.0, 0.0]
    assert softplus(infinities).tolist() == [math.inf, 0.0]


def test_mean_square_scale(rng: torch.Generator) -> None:
    x = torch.randn(3, 5, generator=rng)
    found = mean_square_scale(x, 1e-6)
    assert found.shape == (3, 1)
    for row, scale in zip(x.tolist(), found.flatten().tolist(), strict=True):
        assert math.isclose(scale, 1 / math.sqrt(math.fsum(v * v for v in row) / 5 + 1e-6))
    assert mean_square_scale(torch.zeros(1, 4), 1e-6).item() == pytest.approx(1e3)
    huge = torch.full((1, 4), 3e38)  # its square is no float32
    assert mean_square_scale(huge, 1e-6).item() == pytest.approx(1 / 3e38)


def test_rotate(rng: torch.Generator) -> None:
    """A pair turns as a complex number does; channels past the rotary part pass."""
    x = torch.randn(2, 3, 4, 10, generator=rng)
    angle = torch.rand(2, 3, 3, generator=rng, dtype=torch.float64) * 6
    found = rotate(x, angle.cos(), angle.sin())
    assert found.dtype is torch.float64
    turned = torch.polar(torch.ones_like(angle), angle).unsqueeze(2)
    turned = turned * torch.complex(x[..., :3].double(), x[..., 3:6].double())
    expected = torch.cat((turned.real, turned.imag, x[..., 6:].double()), -1)
    assert torch.allclose(found, expected, rtol=1e-14, atol=1e-14)
