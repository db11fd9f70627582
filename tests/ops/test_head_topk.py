from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.head import stable_topk
from dflash_graph.op import spec_of
from dflash_graph.ops import head_argmax
from dflash_graph.ops.head_topk import OP
from dflash_graph.testing import F32_REDUCTION, check_op

DTYPES = [torch.float32, torch.bfloat16]
PLAIN = {"skip": 1, "public_vocab": 50, "top_k": 9, "multiplier": 1.0, "softcap": 0.0}


def tied_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int
) -> dict[str, torch.Tensor]:
    """Small whole numbers: every score is exact, and ties fill the list and cross its end."""
    x = torch.randint(-1, 2, (batch, columns, 6), generator=rng)
    x[-1, -1] = 0
    return {"x": x.to(dtype), "weight": torch.randint(-1, 2, (53, 6), generator=rng).to(dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "columns", "skip", "top_k"),
    [(1, 1, 0, 1), (3, 5, 1, 9), (1, 16, 1, 16), (3, 2, 1, 50)],
)
def test_stable_order(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, skip: int, top_k: int
) -> None:
    case = tied_case(rng, dtype, batch, columns)
    case["weight"][50:] = torch.nan  # padded rows
    weight = case["weight"][:50].double()
    ids = torch.empty(batch, columns - skip, top_k, dtype=torch.int64)
    best = torch.empty(batch, columns - skip, top_k, dtype=torch.float64)
    for b in range(batch):
        for i in range(columns - skip):
            scores = (0.5 * (weight @ case["x"][b, skip + i].double())).tolist()
            order = sorted(range(50), key=lambda v: (-scores[v], v))[:top_k]
            ids[b, i] = torch.tensor(order)
            best[b, i] = torch.tensor([scores[v] for v in order])
    attributes = PLAIN | {"skip": skip, "top_k": top_k, "multiplier": 0.5}
    check_op(
        OP,
        case,
        attributes,
        F32_REDUCTION,
        oracle={"ids": ids, "scores": best},
        opcheck=columns == 5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signs_zeros_infinities(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Both methods against a sort of (score, id), on scores that bit tricks get wrong first."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.5],
        dtype=dtype,
    )
    for size in (11, 64, 517):
        scores = values[torch.randint(0, 11, (4, size), generator=rng)]
        for count in (1, 2, 10, 11):
            expected = [
                sorted(range(size), key=lambda v: (-row[v], v))[:count] for row in scores.tolist()
            ]
            assert stable_topk(scores, count).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_ranks_first_and_ids_stay_distinct(dtype: torch.dtype) -> None:
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[1.0, nan, inf, 2.0, nan], [nan] * 5, [-inf] * 5], dtype=dtype)
    scores[0, 4] = scores[0, 4].copysign(torch.tensor(-1.0))
    assert scores[0, 4].signbit()
    assert stable_topk(scores, 4).tolist() == [[1, 4, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_first_candidate_is_the_argmax(rng: torch.Generator) -> None:
    x = torch.randn(2, 8, 40, generator=rng)
    weight = torch.randn(213, 40, generator=rng)
    shared = {"skip": 1, "public_vocab": 201, "multiplier": 0.7, "softcap": 4.0}
    ids, scores = OP(x=x, weight=weight, top_k=16, **shared)
    best_ids, best = head_argmax.OP(x=x, weight=weight, **shared)
    assert torch.equal(ids[..., 0], best_ids)
    assert torch.equal(scores[..., 0], best)
    assert bool((scores[..., 1:] <= scores[..., :-1]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(3, 16, 40, generator=rng).to(dtype)
    weight = torch.randn(53, 40, generator=rng).to(dtype)
    attributes = PLAIN | {"skip": 0}
    whole = OP.reference(x, weight, **attributes)
    for b, start, end in ((0, 0, 1), (1, 3, 4), (2, 15, 16), (1, 2, 7), (2, 0, 8)):
        part = OP.reference(x[b : b + 1, start:end], weight, **attributes)
        for found, all_rows in zip(part, whole, strict=True):
            assert torch.equal(found, all_rows[b : b + 1, start:end])


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
        ({"top_k": 0}, "got top_k 0, public_vocab 50"),
        ({"top_k": 51}, "1 <= top_k <= public_vocab <= 53 .*, got top_k 51, public_vocab 50"),
        ({"public_vocab": 54}, "public_vocab 54"),
        ({"softcap": -0.5}, "softcap must be 0 .* got -0.5"),
    ):
        with pytest.raises(ShapeError, match=message):
            OP.infer(specs, PLAIN | changed)
    cost = OP.cost(specs, PLAIN)
    assert cost.read_bytes == 2 * (3 * 7 * 6 + 50 * 6)
    assert cost.write_bytes == 3 * 7 * 9 * (4 + 4)
    assert cost.flops == 2 * 3 * 7 * 50 * 6
