from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.head import lowest_argmax
from dflash_graph.op import spec_of
from dflash_graph.ops import head_scores
from dflash_graph.ops.head_argmax import OP
from dflash_graph.testing import F32_REDUCTION, check_op

DTYPES = [torch.float32, torch.bfloat16]
PLAIN = {"skip": 0, "public_vocab": 50, "multiplier": 1.0, "softcap": 0.0}


def tied_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int
) -> dict[str, torch.Tensor]:
    """Small whole numbers: every score is exact, and most maxima are ties."""
    x = torch.randint(-1, 2, (batch, columns, 6), generator=rng)
    x[-1, -1] = 0
    return {"x": x.to(dtype), "weight": torch.randint(-1, 2, (53, 6), generator=rng).to(dtype)}


def one_row(scores: list[float], **changed: float) -> tuple[int, float]:
    """The choice from given scores, through a head of width 1."""
    attributes = PLAIN | {"public_vocab": len(scores)} | changed
    ids, best = OP(x=torch.ones(1, 1, 1), weight=torch.tensor(scores).unsqueeze(1), **attributes)
    return int(ids), float(best)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "columns", "skip"), [(1, 1, 0), (3, 5, 1), (3, 16, 0), (1, 2, 1)]
)
def test_lowest_id_wins(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, skip: int
) -> None:
    case = tied_case(rng, dtype, batch, columns)
    case["weight"][50:] = torch.nan  # padded rows
    weight = case["weight"][:50].double()
    ids = torch.empty(batch, columns - skip, dtype=torch.int64)
    best = torch.empty(batch, columns - skip, dtype=torch.float64)
    for b in range(batch):
        for i in range(columns - skip):
            scores = (2 * (weight @ case["x"][b, skip + i].double())).tolist()
            best[b, i] = max(scores)
            ids[b, i] = scores.index(max(scores))
    attributes = PLAIN | {"skip": skip, "multiplier": 2.0}
    check_op(
        OP, case, attributes, F32_REDUCTION, oracle={"ids": ids, "scores": best}, opcheck=batch == 3
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_head_scores_bit_for_bit(rng: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, 40, generator=rng).to(dtype)
    weight = torch.randn(213, 40, generator=rng).to(dtype)
    for multiplier, softcap in ((1.0, 0.0), (0.3, 2.0)):
        scores = head_scores.OP(
            x=x, weight=weight, multiplier=multiplier, softcap=softcap, tiled=True
        )[:, 2:, :201]
        ids, best = OP(
            x=x, weight=weight, skip=2, public_vocab=201, multiplier=multiplier, softcap=softcap
        )
        assert torch.equal(best, scores.amax(-1))
        assert torch.equal(scores.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1), best)


def test_ties_infinities_and_nan() -> None:
    inf, nan = torch.inf, torch.nan
    assert one_row([1.0, 3.0, 3.0, 2.0]) == (1, 3.0)
    assert one_row([-inf, inf, inf]) == (1, inf)
    assert one_row([-inf, -inf]) == (0, -inf)
    assert one_row([-5.0, -0.0, 0.0]) == (1, 0.0)
    assert one_row([1.0, 100.0, 200.0], softcap=1.0) == (1, 1.0)  # both saturate
    assert one_row([1.0, 2.0, 9.0], public_vocab=2) == (1, 2.0)
    assert one_row([1.0, 2.0, nan], public_vocab=2) == (1, 2.0)
    for scores in ([nan, 1.0], [inf, nan], [nan, nan], [0.0, nan, 5.0]):
        chosen, best = one_row(scores)
        assert 0 <= chosen < len(scores)
        assert best != best


def test_signed_zeros_and_many_ties() -> None:
    """On scores, as a product never gives -0.0; long rows, for both vector and tail code."""
    for size in (1, 2, 7, 64, 1000, 2049):
        scores = torch.zeros(3, size)
        scores[0, : size // 2] = -0.0
        scores[1, size // 2 :] = -0.0
        scores[2, size - 1] = 1.0
        assert lowest_argmax(scores).tolist() == [0, 0, size - 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(3, 16, 40, generator=rng).to(dtype)
    weight = torch.randn(53, 40, generator=rng).to(dtype)
    whole = OP.reference(x, weight, **PLAIN)
    for b, start, end in ((0, 0, 1), (1, 3, 4), (2, 15, 16), (1, 2, 7), (2, 0, 8)):
        part = OP.reference(x[b : b + 1, start:end], weight, **PLAIN)
        for found, all_rows in zip(part, whole, strict=True):
            assert torch.equal(found, all_rows[b : b + 1, start:end])
    for found, all_rows in zip(OP.reference(x, weight, **PLAIN | {"skip": 3}), whole, strict=True):
        assert torch.equal(found, all_rows[:, 3:])


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = tied_case(rng, torch.bfloat16, 2, 5)
    traced = torch.compile(
        lambda *args: OP.reference(*args, **PLAIN), fullgraph=True, backend="aot_eager"
    )
    for found, eager in zip(traced(*case.values()), OP.reference(**case, **PLAIN), strict=True):
        assert torch.equal(found, eager)


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in tied_case(rng, torch.bfloat16, 3, 8).items()}
    for changed, message in (
        ({"skip": 8}, r"skip must be in 0..7 \(W = 8 columns\), got 8"),
        ({"skip": -1}, "got -1"),
        ({"public_vocab": 0}, r"public_vocab must be in 1..53 \(rows of the head\), got 0"),
        ({"public_vocab": 54}, "got 54"),
        ({"softcap": -0.5}, "softcap must be 0 .* got -0.5"),
    ):
        with pytest.raises(ShapeError, match=message):
            OP.infer(specs, PLAIN | changed)
    cost = OP.cost(specs, PLAIN | {"skip": 1})
    assert cost.read_bytes == 2 * (3 * 7 * 6 + 50 * 6)
    assert cost.write_bytes == 3 * 7 * (4 + 4)
    assert cost.flops == 2 * 3 * 7 * 50 * 6
