from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.conv_finish import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    Tolerance,
    assert_matches,
    check_op,
)

TOLERANCE = {torch.float32: F32_ELEMENTWISE, torch.bfloat16: BF16_ELEMENTWISE}
GOLDEN = Path(__file__).parents[1] / "golden" / "dflash2_g16"
#: Recommended with the golden numbers: ten times the error of the float32 run that made them.
GOLDEN_FINISHED = Tolerance(3e-4, 0.0, 1e-5)


def finish_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, groups: int, share: int
) -> dict[str, Tensor]:
    hidden = groups * share
    case = {
        "y": torch.randn(batch, columns, hidden, generator=rng),
        "base": torch.randn(2, 2, hidden, generator=rng),
        "delta": torch.randn(batch, columns, 2, groups, generator=rng),
    }
    case["y"][0, columns // 2] = 0.0
    case["y"][-1, -1] *= 1e30
    return {n: v.to(dtype) for n, v in case.items()}


def oracle(case: dict[str, Tensor], groups: int) -> Tensor:
    y, base, delta = (v.double() for v in case.values())
    out = torch.zeros_like(y)
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in y.shape)).tolist():
        for tap in range(2):
            if i >= tap:
                g = h // (y.shape[2] // groups)
                out[b, i, h] += (base[1, tap, h] + delta[b, i, tap, g]) * y[b, i - tap, h]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("batch", "columns", "groups", "share"),
    [(1, 1, 3, 8), (3, 5, 3, 7), (1, 16, 17, 1), (2, 2, 1, 16)],
)
def test_conv_finish(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, groups: int, share: int
) -> None:
    case = finish_case(rng, dtype, batch, columns, groups, share)
    check_op(
        OP,
        case,
        {"groups": groups},
        TOLERANCE[dtype],
        oracle={"out": oracle(case, groups)},
        opcheck=columns == 5,
    )


def test_by_hand() -> None:
    """Side 1 of the base; column 0 has no predecessor, not even one of another request."""
    y = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, -1.0]]])
    base = torch.tensor([[[9.0, 9.0], [9.0, 9.0]], [[1.0, 2.0], [10.0, 20.0]]])
    delta = torch.tensor([[[[1.0], [0.0]], [[0.0], [5.0]]], [[[0.0], [7.0]], [[0.0], [0.0]]]])
    assert OP(y=y, base=base, delta=delta, groups=1).tolist() == [
        [[2.0, 6.0], [3.0 + 15.0, 8.0 + 50.0]],
        [[5.0, 12.0], [50.0, -2.0 + 120.0]],
    ]


def test_an_infinite_tap_without_predecessor_is_not_evaluated() -> None:
    base = torch.full((2, 2, 2), torch.inf)
    base[1, 0] = 1.0
    out = OP(y=torch.ones(1, 1, 2), base=base, delta=torch.zeros(1, 1, 2, 1), groups=1)
    assert out.tolist() == [[[1.0, 1.0]]]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Column i needs columns i-1 and i and nothing else."""
    case = finish_case(rng, dtype, 3, 16, 5, 8)
    y, base, delta = case.values()
    whole = OP.reference(**case, groups=5)
    for b in range(3):
        for start, end in ((0, 1), (0, 8), (2, 4), (3, 16), (14, 16)):
            rows = slice(b, b + 1), slice(start, end)
            kept = start > 0  # its first column lost its predecessor
            part = OP.reference(y[rows], base, delta[rows], groups=5)
            assert torch.equal(part[:, kept:], whole[b : b + 1, start + kept : end])
    y[1, 6] = torch.nan
    found = OP.reference(y, base, delta, groups=5)
    clean = torch.ones(3, 16, dtype=torch.bool)
    clean[1, 6:8] = False
    assert torch.equal(found[clean], whole[clean])


@pytest.mark.parametrize("branch", ["attention", "mlp"])
@pytest.mark.parametrize("place", ["F1.W2", "F16.W5", "F28.W8", "F89.W16"])
def test_golden(branch: str, place: str) -> None:
    numbers, weights = (load_file(GOLDEN / f"{n}.safetensors") for n in ("expected", "model"))
    prefix = f"{place}.layer0.{branch}"
    out = OP(
        y=numbers[f"{prefix}.branch_output"].unsqueeze(0),
        base=weights[f"layers.0.{branch}_conv.base_kernel"],
        delta=numbers[f"{prefix}.finish_delta"].unsqueeze(0),
        groups=4,
    )
    assert_matches(out[0], numbers[f"{prefix}.finished"], GOLDEN_FINISHED)


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = finish_case(rng, torch.bfloat16, 2, 5, 3, 8)
    traced = torch.compile(
        lambda *args: OP.reference(*args, groups=3), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(traced(*case.values()), OP.reference(**case, groups=3))


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in finish_case(rng, torch.bfloat16, 3, 8, 5, 8).items()}
    with pytest.raises(ShapeError, match=r"delta: axis 3 .* must be 4 .*groups.*, got 5"):
        OP.infer(specs, {"groups": 4})
    with pytest.raises(ShapeError, match="7 groups do not divide H = 40"):
        OP.infer(
            specs | {"delta": spec_of(torch.empty(3, 8, 2, 7, dtype=torch.bfloat16))},
            {"groups": 7},
        )
    cost = OP.cost(specs, {"groups": 5})
    assert cost.read_bytes == 2 * (3 * 8 * 40 + 2 * 40 + 3 * 8 * 10)
    assert cost.write_bytes == 2 * 3 * 8 * 40
    assert cost.flops == 3 * (15 * 2 * 40 + 7 * 40)
