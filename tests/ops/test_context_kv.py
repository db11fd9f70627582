from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.context_kv import OP
from dflash_graph.testing import BF16_REDUCTION, F32_REDUCTION, assert_matches, check_op

TOLERANCE = {torch.float32: F32_REDUCTION, torch.bfloat16: BF16_REDUCTION}
ATTRIBUTES = {"kv_heads": 2, "head_dim": 12, "rotary_half": 6, "eps": 1e-6, "tiled": True}


def kv_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, rotary_half: int = 6
) -> dict[str, Tensor]:
    angles = torch.rand(batch, columns, rotary_half, generator=rng) * 2 * math.pi
    case = {
        "c": torch.randn(batch, columns, 20, generator=rng),
        "weight": torch.randn(48, 20, generator=rng),
        "k_norm": torch.rand(12, generator=rng) + 0.5,
    }
    case["c"][0, 0] = 0.0
    case["c"][-1, -1] = torch.eye(20)[3] * 1e18
    return {n: v.to(dtype) for n, v in case.items()} | {"cos": angles.cos(), "sin": angles.sin()}


def oracle(case: dict[str, Tensor], rotary_half: int) -> dict[str, Tensor]:
    """Head by head and channel by channel."""
    c, weight, norm, cos, sin = (v.double() for v in case.values())
    batch, columns, _ = c.shape
    k, v = (torch.empty(batch, columns, 2, 12, dtype=torch.float64) for _ in range(2))
    for b in range(batch):
        for i in range(columns):
            for h in range(2):
                y = weight[h * 12 : h * 12 + 12] @ c[b, i]
                y = norm * y / math.sqrt(float((y * y).sum()) / 12 + 1e-6)
                turned = y.clone()
                for r in range(rotary_half):
                    low, high = y[r], y[r + rotary_half]
                    turned[r] = low * cos[b, i, r] - high * sin[b, i, r]
                    turned[r + rotary_half] = high * cos[b, i, r] + low * sin[b, i, r]
                k[b, i, h] = turned
                v[b, i, h] = weight[24 + h * 12 : 36 + h * 12] @ c[b, i]
    return {"k": k, "v": v}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "columns", "rotary_half"), [(1, 1, 6), (3, 5, 6), (2, 16, 4)])
def test_context_kv(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, rotary_half: int
) -> None:
    case = kv_case(rng, dtype, batch, columns, rotary_half)
    for tiled in (True, False):
        check_op(
            OP,
            case,
            ATTRIBUTES | {"rotary_half": rotary_half, "tiled": tiled},
            TOLERANCE[dtype],
            oracle=oracle(case, rotary_half),
            opcheck=tiled and batch == 3,
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = kv_case(rng, dtype, 3, 16)
    whole = OP.reference(**case, **ATTRIBUTES)
    for b, start, end in ((0, 0, 1), (1, 3, 4), (2, 15, 16), (1, 2, 7), (2, 0, 8), (0, 1, 16)):
        part = {
            n: v if n in ("weight", "k_norm") else v[b : b + 1, start:end] for n, v in case.items()
        }
        for found, all_rows in zip(OP.reference(**part, **ATTRIBUTES), whole, strict=True):
            assert torch.equal(found, all_rows[b : b + 1, start:end])


def test_the_projection_is_not_rounded_before_the_norm(rng: torch.Generator) -> None:
    """The bfloat16 key rounds the exact one; a cast in between would show in hundreds of values."""
    case = kv_case(rng, torch.bfloat16, 3, 16)
    case["c"][0, 0] = 1.0
    exact = oracle(case, 6)["k"]
    found = OP.reference(**case, **ATTRIBUTES)[0]
    differs = (found != exact.to(torch.bfloat16)).float().mean()
    assert differs < 0.01
    assert_matches(found, exact, BF16_REDUCTION)


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = kv_case(rng, torch.bfloat16, 2, 5)
    traced = torch.compile(
        lambda *args: OP.reference(*args, **ATTRIBUTES), fullgraph=True, backend="aot_eager"
    )
    for found, eager in zip(
        traced(*case.values()), OP.reference(**case, **ATTRIBUTES), strict=True
    ):
        assert torch.equal(found, eager)


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in kv_case(rng, torch.bfloat16, 3, 8).items()}
    with pytest.raises(ShapeError, match=r"weight: axis 0 .* must be 72 .*got 48"):
        OP.infer(specs, ATTRIBUTES | {"kv_heads": 3})
    with pytest.raises(ShapeError, match=r"2\*7 channels is wider than a head of 12"):
        wide = spec_of(torch.empty(3, 8, 7))
        OP.infer(specs | {"cos": wide, "sin": wide}, ATTRIBUTES | {"rotary_half": 7})
    cost = OP.cost(specs, ATTRIBUTES)
    assert cost.read_bytes == 2 * (3 * 8 * 20 + 48 * 20 + 12) + 4 * 2 * 3 * 8 * 6
    assert cost.write_bytes == 2 * 2 * 3 * 8 * 24
    # two products, a norm of 4 a channel, 6 a rotated pair
    assert cost.flops == 24 * (2 * 48 * 20 + 4 * 24 + 6 * 12)
