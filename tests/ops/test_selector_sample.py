from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.selector_sample import OP, sample_path
from dflash_graph.ops.selector_walk import OP as WALK
from dflash_graph.testing import F32_ELEMENTWISE, assert_traceable, check_op

DTYPES = [torch.float32, torch.bfloat16]
GOLDEN = Path(__file__).parents[1] / "golden"
PROPOSAL = 5


def sample_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, drafts: int, top_k: int = 6, rank: int = 5
) -> dict[str, Tensor]:
    """Small whole numbers: every E is exact, and many are ties."""
    vocab = 40

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=rng).to(dtype)

    ids = torch.rand(batch, drafts, vocab, generator=rng).topk(top_k).indices
    hidden = whole(batch, drafts + 1, rank)
    hidden[:, 0] = torch.nan  # the anchor's column is not looked at
    heats = torch.tensor([-1.0, 0.0, 0.3, 1.0, 2.0, 30.0])
    return {
        "candidates": ids.to(torch.int32),
        "scores": whole(batch, drafts, top_k).float(),
        "hidden": hidden,
        "anchor": torch.randint(0, vocab, (batch,), generator=rng).to(torch.int32),
        "predecessor": whole(vocab, rank),
        "successor": whole(vocab, rank),
        "temperature": heats[torch.randint(6, (batch,), generator=rng)],
        "seed": torch.randint(-(2**31), 2**31, (batch, 2), generator=rng).to(torch.int32),
        "frontier": torch.randint(0, 1000, (batch,), generator=rng).to(torch.int32),
    }


def oracle(sampling, case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Number by number; q rounded to float32 before it is drawn from."""
    rows = {n: v.tolist() for n, v in case.items()}
    found: dict[str, list] = {"drafts": [], "ranks": [], "draft_probs": []}
    for b, before in enumerate(rows["anchor"]):
        path, chosen, laws = [], [], []
        for i, ids in enumerate(rows["candidates"][b]):
            g = rows["hidden"][b][i + 1]
            energies = [
                rows["scores"][b][i][c]
                + sum(
                    p * x * s
                    for p, x, s in zip(
                        rows["predecessor"][before], g, rows["successor"][token], strict=True
                    )
                )
                for c, token in enumerate(ids)
            ]
            heat, best = rows["temperature"][b], max(energies)
            if heat <= 0:
                j = energies.index(best)
                law = [float(c == j) for c in range(len(ids))]
            else:
                weights = [math.exp((e - best) / heat) for e in energies]
                law = torch.tensor([w / sum(weights) for w in weights]).tolist()
                u = sampling.uniform(rows["seed"][b], rows["frontier"][b] + i, PROPOSAL)
                j = sampling.draw(dict(enumerate(law)), u)
            chosen.append(j)
            laws.append(law)
            path.append(before := ids[j])
        found["drafts"].append(path)
        found["ranks"].append(chosen)
        found["draft_probs"].append(laws)
    return {name: torch.tensor(values) for name, values in found.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "drafts", "top_k"), [(1, 1, 1), (3, 4, 6), (1, 15, 16), (60, 7, 4)]
)
def test_selector_sample(
    sampling, rng: torch.Generator, dtype: torch.dtype, batch: int, drafts: int, top_k: int
) -> None:
    case = sample_case(rng, dtype, batch, drafts, top_k)
    expected = oracle(sampling, case)
    check_op(OP, case, {}, F32_ELEMENTWISE, oracle=expected, opcheck=drafts == 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_rows_walk(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = sample_case(rng, dtype, 8, 7)
    for name in ("scores", "hidden", "predecessor", "successor"):
        case[name] = torch.randn(case[name].shape, generator=rng).to(case[name].dtype)
    case["temperature"] = torch.tensor([0.0, -1.0, 1.0, 0.0, 1.0, -0.0, 0.5, 0.0])
    drafts, ranks, probs = OP(**case)
    walked = WALK(**{name: case[name] for name in WALK.inputs})
    for b in (0, 1, 3, 5, 7):
        assert torch.equal(drafts[b], walked[0][b])
        assert torch.equal(ranks[b], walked[1][b])
        one_hot = torch.nn.functional.one_hot(ranks[b].long(), 6).float()
        assert torch.equal(probs[b], one_hot)


def test_by_hand() -> None:
    uniforms = torch.tensor([[0.0, 0.4], [0.7, 0.2], [0.74, 0.9], [0.76, 0.9]])
    log3 = math.log(3.0)
    case = {
        "candidates": torch.tensor([[[1, 2], [3, 4]]] * 4, dtype=torch.int32),
        "scores": torch.tensor([[[log3, 0.0], [0.0, 0.0]]] * 4, dtype=torch.float64),
        "hidden": torch.tensor([[[9.0], [0.0], [1.0]]] * 4, dtype=torch.float64),
        "anchor": torch.zeros(4, dtype=torch.int32),
        "predecessor": torch.tensor([[7.0], [log3], [0.0], [0.0], [0.0]], dtype=torch.float64),
        "successor": torch.tensor([[0.0], [0.0], [0.0], [1.0], [0.0]], dtype=torch.float64),
        "temperature": torch.ones(4, dtype=torch.float64),
    }
    # q_0 = [3/4, 1/4]; q_1 = [3/4, 1/4] after id 1, [1/2, 1/2] after id 2
    drafts, ranks, probs = sample_path(**case, uniforms=uniforms)
    assert ranks.tolist() == [[0, 0], [0, 0], [0, 1], [1, 1]]
    assert drafts.tolist() == [[1, 3], [1, 3], [1, 4], [2, 4]]
    assert probs[:, 0].flatten().tolist() == pytest.approx([0.75, 0.25] * 4)
    assert probs[:, 1].flatten().tolist() == pytest.approx([0.75, 0.25] * 3 + [0.5, 0.5])


def test_nan_leaves_valid_ranks(rng: torch.Generator) -> None:
    case = sample_case(rng, torch.float32, 3, 5)
    case["temperature"] = torch.tensor([1.0, 0.0, 1.0])
    clean = OP(**case)
    case["scores"][:2, 1, 3] = torch.nan
    case["hidden"][:2, 4] = torch.nan
    drafts, ranks, probs = OP(**case)
    assert bool(((ranks >= 0) & (ranks < 6)).all())
    assert torch.equal(case["candidates"].gather(2, ranks.long().unsqueeze(2)).squeeze(2), drafts)
    assert bool(probs[0, 1].isnan().all())
    for found, expected in zip((drafts, ranks, probs), clean, strict=True):
        assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = sample_case(rng, dtype, 4, 15)
    case["temperature"] = torch.tensor([0.0, 0.5, 1.0, 4.0])
    for name in ("scores", "hidden", "predecessor", "successor"):
        case[name] = torch.randn(case[name].shape, generator=rng).to(case[name].dtype)
    whole = OP.reference(**case)
    shared = ("predecessor", "successor")
    flipped = OP.reference(**{n: v if n in shared else v.flip(0) for n, v in case.items()})
    for found, expected in zip(flipped, whole, strict=True):
        assert torch.equal(found.flip(0), expected)
    for b in range(4):
        for drafts in (1, 7, 15):
            part = {n: v if n in shared else v[b : b + 1] for n, v in case.items()}
            part["candidates"] = part["candidates"][:, :drafts]
            part["scores"] = part["scores"][:, :drafts]
            part["hidden"] = part["hidden"][:, : drafts + 1]
            for found, all_rows in zip(OP.reference(**part), whole, strict=True):
                assert torch.equal(found, all_rows[b : b + 1, :drafts])


def test_law_of_the_path(sampling) -> None:
    """200k walks of three steps over three candidates: the law of the whole path."""
    generator = torch.Generator().manual_seed(20)
    batch = 200_000
    case = sample_case(generator, torch.float32, 1, 3, top_k=3, rank=2)
    case["scores"] = torch.randn(1, 3, 3, generator=generator)
    case["temperature"] = torch.tensor([1.3])
    shared = ("predecessor", "successor")
    many = {
        n: v if n in shared else v.expand(batch, *v.shape[1:]).contiguous() for n, v in case.items()
    }
    many["seed"] = sampling.random_seeds(generator, batch)
    _, ranks, probs = OP(**many)
    cells = torch.bincount((ranks.long() * torch.tensor([9, 3, 1])).sum(1), minlength=27)
    law = torch.zeros(27, dtype=torch.float64)
    for cell in range(27):
        path = [cell // 9, cell // 3 % 3, cell % 3]
        before, chance = int(case["anchor"]), 1.0
        for i, j in enumerate(path):
            tokens = case["candidates"][0, i].long()
            pair = (
                case["predecessor"][before] * case["hidden"][0, i + 1] * case["successor"][tokens]
            )
            energies = (case["scores"][0, i].double() + pair.double().sum(-1)) / 1.3
            chance *= float(energies.softmax(0)[j])
            before = int(tokens[j])
        law[cell] = chance
    sampling.assert_law(cells, law, "path")
    chosen = probs.gather(2, ranks.long().unsqueeze(2)).squeeze(2).double().prod(1)
    torch.testing.assert_close(chosen, law[(ranks.long() * torch.tensor([9, 3, 1])).sum(1)])


def test_golden() -> None:
    """The four lists of uniforms of every block, from the stored hidden."""
    numbers, weights = (
        load_file(GOLDEN / "dflash2_g16" / f"{n}.safetensors") for n in ("expected", "model")
    )
    places = [n.removesuffix(".sample.uniforms") for n in numbers if n.endswith("sample.uniforms")]
    assert len(places) >= 16
    for place in places:
        projected = numbers[f"{place}.hidden_projection"]
        hidden = torch.cat((torch.full_like(projected[:1], torch.nan), projected))
        uniforms = numbers[f"{place}.sample.uniforms"]
        rows = len(uniforms)

        def expand(value: Tensor, rows: int = rows) -> Tensor:
            return value.expand(rows, *value.shape)

        drafts, ranks, probs = sample_path(
            expand(numbers[f"{place}.topk_ids"].to(torch.int32)),
            expand(numbers[f"{place}.topk_unary"]),
            expand(hidden),
            expand(numbers[f"{place}.block_ids"][0].to(torch.int32)),
            weights["candidate_selector.predecessor_codebook"],
            weights["candidate_selector.successor_codebook"],
            torch.full((rows,), 0.7),
            uniforms,
        )
        assert torch.equal(ranks.long(), numbers[f"{place}.sample.index"]), place
        assert torch.equal(drafts.long(), numbers[f"{place}.sample.path"]), place
        expected = numbers[f"{place}.sample.q_rows"]
        torch.testing.assert_close(probs.double(), expected, atol=1e-4, rtol=0.0)


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    assert_traceable(OP, sample_case(rng, torch.bfloat16, 3, 4), {})


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in sample_case(rng, torch.bfloat16, 3, 7).items()}
    with pytest.raises(ShapeError, match=r"hidden: axis 1 .* must be 8 \(K\+1\), got 7"):
        OP.infer(specs | {"hidden": spec_of(torch.empty(3, 7, 5, dtype=torch.bfloat16))}, {})
    with pytest.raises(ShapeError, match=r"seed: axis 1 of seed must be 2 \(2\), got 1"):
        OP.infer(specs | {"seed": spec_of(torch.empty(3, 1, dtype=torch.int32))}, {})
    with pytest.raises(ShapeError, match="temperature: expected dtype float32, got bfloat16"):
        OP.infer(specs | {"temperature": spec_of(torch.empty(3, dtype=torch.bfloat16))}, {})
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
    read = 4 * (2 * picked + 3 + 3 + 6 + 3) + 2 * (3 * 7 * 5 * 2 + picked * 5)
    assert cost.read_bytes == read
    assert cost.write_bytes == 4 * (2 * 3 * 7 + picked)
    assert cost.flops == 3 * 7 * (5 + 2 * 6 * 5 + 7 * 6)
