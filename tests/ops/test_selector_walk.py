from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.selector_walk import OP
from dflash_graph.testing import EXACT, check_op

DTYPES = [torch.float32, torch.bfloat16]
GOLDEN = Path(__file__).parents[1] / "golden"


def walk_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, drafts: int, top_k: int = 6, rank: int = 5
) -> dict[str, Tensor]:
    """Small whole numbers: every E is exact, and many maxima are ties."""
    vocab = 40

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=rng).to(dtype)

    ids = torch.rand(batch, drafts, vocab, generator=rng).topk(top_k).indices
    hidden = whole(batch, drafts + 1, rank)
    hidden[:, 0] = torch.nan  # the anchor's column is not looked at
    return {
        "candidates": ids.to(torch.int32),
        "scores": whole(batch, drafts, top_k).float(),
        "hidden": hidden,
        "anchor": torch.randint(0, vocab, (batch,), generator=rng).to(torch.int32),
        "predecessor": whole(vocab, rank),
        "successor": whole(vocab, rank),
    }


def oracle(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Number by number."""
    candidates, scores, hidden, anchor, predecessor, successor = (v.tolist() for v in case.values())
    drafts, ranks = [], []
    for b, before in enumerate(anchor):
        path, chosen = [], []
        for i, ids in enumerate(candidates[b]):
            values = [
                scores[b][i][c]
                + sum(
                    p * g * s
                    for p, g, s in zip(
                        predecessor[before], hidden[b][i + 1], successor[ids[c]], strict=True
                    )
                )
                for c in range(len(ids))
            ]
            chosen.append(values.index(max(values)))
            path.append(before := ids[chosen[-1]])
        drafts.append(path)
        ranks.append(chosen)
    return {"drafts": torch.tensor(drafts), "ranks": torch.tensor(ranks)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "drafts", "top_k"), [(1, 1, 1), (3, 4, 6), (1, 15, 16), (3, 7, 4)]
)
def test_selector_walk(
    rng: torch.Generator, dtype: torch.dtype, batch: int, drafts: int, top_k: int
) -> None:
    case = walk_case(rng, dtype, batch, drafts, top_k)
    check_op(OP, case, {}, EXACT, oracle=oracle(case), opcheck=drafts == 4)


def test_by_hand() -> None:
    """Greedy and left to right: what a later proposal would gain does not change an earlier one."""
    case = {
        "candidates": torch.tensor([[[1, 2], [3, 4]]], dtype=torch.int32),
        "scores": torch.tensor([[[1.0, 1.0], [0.0, 1.0]]]),
        "hidden": torch.tensor([[[9.0], [1.0], [2.0]]]),
        "anchor": torch.tensor([0], dtype=torch.int32),
        "predecessor": torch.tensor([[1.0], [3.0], [-9.0], [0.0], [0.0]]),
        "successor": torch.tensor([[0.0], [0.5], [0.5], [2.0], [1.0]]),
    }
    # i = 0: E = [1.5, 1.5], the tie goes to rank 0, id 1; i = 1: E = [0 + 3*2*2, 1 + 3*2*1]
    drafts, ranks = OP(**case)
    assert (drafts.tolist(), ranks.tolist()) == ([[1, 3]], [[0, 0]])
    case["predecessor"][1] = -3.0  # i = 1: E = [-12, -5]
    drafts, ranks = OP(**case)
    assert (drafts.tolist(), ranks.tolist()) == ([[1, 4]], [[0, 1]])


def test_a_tie_is_decided_in_float32() -> None:
    """E is rounded before it is compared: what float32 cannot tell apart goes to the lower rank."""
    case = {
        "candidates": torch.tensor([[[1, 2]]], dtype=torch.int32),
        "scores": torch.tensor([[[1e8, 1e8]]]),
        "hidden": torch.tensor([[[0.0], [1.0]]]),
        "anchor": torch.tensor([0], dtype=torch.int32),
        "predecessor": torch.ones(3, 1),
        "successor": torch.tensor([[0.0], [0.25], [0.5]]),
    }
    assert OP(**case)[1].tolist() == [[0]]


def test_nan_leaves_valid_ranks(rng: torch.Generator) -> None:
    case = walk_case(rng, torch.float32, 2, 5)
    case["scores"][0, 1, 3] = torch.nan
    case["hidden"][0, 4] = torch.nan
    drafts, ranks = OP(**case)
    assert bool(((ranks >= 0) & (ranks < 6)).all())
    assert torch.equal(case["candidates"].gather(2, ranks.long().unsqueeze(2)).squeeze(2), drafts)
    assert torch.equal(drafts[1], oracle(case)["drafts"][1].to(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = walk_case(rng, dtype, 3, 15)
    for name in ("scores", "hidden", "predecessor", "successor"):
        case[name] = torch.randn(case[name].shape, generator=rng).to(case[name].dtype)
    whole = OP.reference(**case)
    for b in range(3):
        for drafts in (1, 7, 15):
            part = {
                "candidates": case["candidates"][b : b + 1, :drafts],
                "scores": case["scores"][b : b + 1, :drafts],
                "hidden": case["hidden"][b : b + 1, : drafts + 1],
                "anchor": case["anchor"][b : b + 1],
                "predecessor": case["predecessor"],
                "successor": case["successor"],
            }
            for found, all_rows in zip(OP.reference(**part), whole, strict=True):
                assert torch.equal(found, all_rows[b : b + 1, :drafts])


@pytest.mark.parametrize("folder", ["dflash2_g16", "dflash2_g8"])
def test_golden(folder: str) -> None:
    numbers, weights = (
        load_file(GOLDEN / folder / f"{n}.safetensors") for n in ("expected", "model")
    )
    places = [n.removesuffix(".topk_ids") for n in numbers if n.endswith(".topk_ids")]
    assert len(places) >= 16
    for place in places:
        projected = numbers[f"{place}.hidden_projection"]
        hidden = torch.cat((torch.full_like(projected[:1], torch.nan), projected))
        drafts, ranks = OP(
            candidates=numbers[f"{place}.topk_ids"].to(torch.int32).unsqueeze(0),
            scores=numbers[f"{place}.topk_unary"].unsqueeze(0),
            hidden=hidden.unsqueeze(0),
            anchor=numbers[f"{place}.block_ids"][:1].to(torch.int32),
            predecessor=weights["candidate_selector.predecessor_codebook"],
            successor=weights["candidate_selector.successor_codebook"],
        )
        assert drafts[0].tolist() == numbers[f"{place}.greedy.path"].tolist(), place
        assert ranks[0].tolist() == numbers[f"{place}.greedy.index"].tolist(), place


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = walk_case(rng, torch.bfloat16, 2, 4)
    traced = torch.compile(lambda *args: OP.reference(*args), fullgraph=True, backend="aot_eager")
    for found, eager in zip(traced(*case.values()), OP.reference(**case), strict=True):
        assert torch.equal(found, eager)


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in walk_case(rng, torch.bfloat16, 3, 7).items()}
    with pytest.raises(ShapeError, match=r"hidden: axis 1 .* must be 8 \(K\+1\), got 7"):
        OP.infer(specs | {"hidden": spec_of(torch.empty(3, 7, 5, dtype=torch.bfloat16))}, {})
    with pytest.raises(ShapeError, match="scores: expected dtype float32, got bfloat16"):
        OP.infer(specs | {"scores": spec_of(torch.empty(3, 7, 6, dtype=torch.bfloat16))}, {})
    with pytest.raises(ShapeError, match="at least one proposal, got K = 0"):
        OP.infer(
            specs
            | {
                "candidates": spec_of(torch.empty(3, 0, 6, dtype=torch.int32)),
                "scores": spec_of(torch.empty(3, 0, 6)),
                "hidden": spec_of(torch.empty(3, 1, 5, dtype=torch.bfloat16)),
            },
            {},
        )
    cost = OP.cost(specs, {})
    picked = 3 * 7 * 6
    assert cost.read_bytes == 4 * (2 * picked + 3) + 2 * (3 * 7 * 5 * 2 + picked * 5)
    assert cost.write_bytes == 4 * 2 * 3 * 7
    assert cost.flops == 3 * 7 * (5 + 2 * 6 * 5 + 6)
