from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.conv_prepare import OP
from dflash_graph.testing import BF16_REDUCTION, F32_REDUCTION, Tolerance, assert_matches, check_op

TOLERANCE = {torch.float32: F32_REDUCTION, torch.bfloat16: BF16_REDUCTION}
GOLDEN = Path(__file__).parents[1] / "golden" / "dflash2_g16"
#: Recommended with the golden numbers: ten times the error of the float32 run that made them.
GOLDEN_DELTA = Tolerance(5e-5, 0.0, 1e-5)
GOLDEN_PREPARED = Tolerance(2e-4, 0.0, 1e-5)


def prepare_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, groups: int, share: int
) -> dict[str, Tensor]:
    hidden = groups * share
    case = {
        "x": torch.randn(batch, columns, hidden, generator=rng),
        "projection": torch.randn(4 * groups, hidden, generator=rng) / hidden**0.5,
        "base": torch.randn(2, 2, hidden, generator=rng),
    }
    case["x"][0, columns // 2] = 0.0
    return {n: v.to(dtype) for n, v in case.items()}


def oracle(case: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Channel by channel, with the rows of the projection picked by their number."""
    x, projection, base = (v.double() for v in case.values())
    batch, columns, hidden = x.shape
    prepared = torch.zeros_like(x)
    delta = torch.zeros(batch, columns, 2, groups, dtype=torch.float64)
    for b in range(batch):
        for i in range(columns):
            made = projection @ x[b, i]
            for tap in range(2):
                for g in range(groups):
                    delta[b, i, tap, g] = made[(1 * 2 + tap) * groups + g]
                if i - tap < 0:
                    continue
                for h in range(hidden):
                    g = h // (hidden // groups)
                    factor = base[0, tap, h] + made[(0 * 2 + tap) * groups + g]
                    prepared[b, i, h] += factor * x[b, i - tap, h]
    return {"prepared": prepared, "delta": delta}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("batch", "columns", "groups", "share"),
    [(1, 1, 3, 8), (3, 5, 3, 7), (1, 16, 17, 1), (2, 2, 1, 16)],
)
def test_conv_prepare(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, groups: int, share: int
) -> None:
    case = prepare_case(rng, dtype, batch, columns, groups, share)
    check_op(
        OP,
        case,
        {"groups": groups},
        TOLERANCE[dtype],
        oracle=oracle(case, groups),
        opcheck=columns <= 5,
    )


def test_the_delta_of_side_0_is_not_rounded(rng: torch.Generator) -> None:
    """The bfloat16 result rounds the exact one; a rounded delta shows in a tenth of them."""
    case = prepare_case(rng, torch.bfloat16, 3, 16, 5, 8)
    prepared, delta = OP(**case, groups=5)
    exact = oracle(case, 5)
    assert (prepared != exact["prepared"].to(torch.bfloat16)).float().mean() < 0.01
    assert (delta != exact["delta"].to(torch.bfloat16)).float().mean() < 0.01


def test_by_hand() -> None:
    """Two columns and channels, one group: delta = [x0, x1, x0 + x1, 0], (side, tap) in order."""
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    projection = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    base = torch.tensor([[[10.0, 20.0], [100.0, 200.0]], [[-1.0, -1.0], [-1.0, -1.0]]])
    prepared, delta = OP(x=x, projection=projection, base=base, groups=1)
    assert prepared.tolist() == [
        [[11.0 * 1, 21.0 * 2], [13.0 * 3 + 104.0 * 1, 23.0 * 4 + 204.0 * 2]]
    ]
    assert delta.tolist() == [[[[3.0], [0.0]], [[7.0], [0.0]]]]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Column i needs columns i-1 and i and nothing else."""
    case = prepare_case(rng, dtype, 3, 16, 5, 8)
    whole = OP.reference(**case, groups=5)
    for b in range(3):
        for start, end in ((0, 1), (0, 8), (2, 4), (3, 16), (14, 16)):
            part = OP.reference(
                case["x"][b : b + 1, start:end], case["projection"], case["base"], groups=5
            )
            kept = start > 0  # its first column lost its predecessor
            for found, all_rows in zip(part, whole, strict=True):
                assert torch.equal(found[:, kept:], all_rows[b : b + 1, start + kept : end])
    spoiled = case["x"].clone()
    spoiled[1, 6] = torch.nan
    for found, all_rows in zip(
        OP.reference(spoiled, case["projection"], case["base"], groups=5), whole, strict=True
    ):
        for b in (0, 2):
            assert torch.equal(found[b], all_rows[b])
        assert torch.equal(found[1, :6], all_rows[1, :6])
        assert torch.equal(found[1, 8:], all_rows[1, 8:])


@pytest.mark.parametrize("branch", ["attention", "mlp"])
@pytest.mark.parametrize("place", ["F1.W2", "F16.W5", "F28.W8", "F89.W16"])
def test_golden(branch: str, place: str) -> None:
    numbers, weights = (load_file(GOLDEN / f"{n}.safetensors") for n in ("expected", "model"))
    prefix = f"{place}.layer0.{branch}"
    prepared, delta = OP(
        x=numbers[f"{prefix}.branch_input"].unsqueeze(0),
        projection=weights[f"layers.0.{branch}_conv.kernel_projection.weight"],
        base=weights[f"layers.0.{branch}_conv.base_kernel"],
        groups=4,
    )
    assert_matches(prepared[0], numbers[f"{prefix}.prepared"], GOLDEN_PREPARED)
    assert_matches(delta[0], numbers[f"{prefix}.finish_delta"], GOLDEN_DELTA)


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = prepare_case(rng, torch.bfloat16, 2, 5, 3, 8)
    traced = torch.compile(
        lambda *args: OP.reference(*args, groups=3), fullgraph=True, backend="aot_eager"
    )
    for found, eager in zip(traced(*case.values()), OP.reference(**case, groups=3), strict=True):
        assert torch.equal(found, eager)


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in prepare_case(rng, torch.bfloat16, 3, 8, 5, 8).items()}
    with pytest.raises(ShapeError, match=r"projection: axis 0 .* must be 16 \(4\*groups\), got 20"):
        OP.infer(specs, {"groups": 4})
    with pytest.raises(ShapeError, match="7 groups do not divide H = 40"):
        OP.infer(
            specs | {"projection": spec_of(torch.empty(28, 40, dtype=torch.bfloat16))},
            {"groups": 7},
        )
    cost = OP.cost(specs, {"groups": 5})
    assert cost.read_bytes == 2 * (3 * 8 * 40 + 20 * 40 + 2 * 40)
    assert cost.write_bytes == 2 * (3 * 8 * 40 + 3 * 8 * 10)
    # The product; an add and a multiply for each of a channel's 15 taps, and 7 adds of two taps.
    assert cost.flops == 3 * (8 * 2 * 20 * 40 + 15 * 2 * 40 + 7 * 40)
