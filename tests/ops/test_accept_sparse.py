from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.accept_one_hot import OP as ONE_HOT
from dflash_graph.ops.accept_sparse import OP
from dflash_graph.ops.selector_sample import OP as SELECTOR
from dflash_graph.testing import EXACT, check_op

GOLDEN = Path(__file__).parents[1] / "golden"
DRAWS = 200_000
CHAINS = [
    *("P1.sparse4", "P2.sparse4", "P3.sparse4", "P4.sparse4", "P1.onehot", "P4.onehot"),
    *("P1.dense", "P2.dense", "P2.equal", "P2.disjoint", "markov.P2", "markov.P3", "markov.P4"),
]

#: Every filter and penalty alone, then together.
SETTINGS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "presence": {"presence": 0.8},
    "frequency": {"frequency": 0.4},
    "all": {"temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.05, "presence": 0.5,
            "frequency": 0.3},
}  # fmt: skip


def arguments(case: dict[str, Tensor], candidates: Tensor, probs: Tensor) -> dict[str, Tensor]:
    """Arguments of this op from those of accept_one_hot."""
    given = {**case, "candidates": candidates.to(torch.int32), "draft_probs": probs.float()}
    return {name: given[name] for name in OP.inputs}


def mixed(
    sampling, rng: torch.Generator, batch: int, columns: int, vocab: int, public: int, width: int
) -> dict[str, Tensor]:
    """Rows of every kind; live drafts are among their candidates, mostly."""
    case = sampling.mixed(rng, batch, columns, vocab, public)
    drafts = case["ids"][:, 1:].long()
    candidates = torch.rand(batch, columns - 1, public, generator=rng).topk(width).indices
    dead = torch.arange(columns - 1) >= case["live_drafts"].unsqueeze(1)
    known = (candidates == drafts.unsqueeze(2)).any(2) | dead
    place = torch.randint(width, drafts.shape, generator=rng).unsqueeze(2)
    moved = candidates.scatter(2, place, drafts.unsqueeze(2))
    candidates = torch.where(known.unsqueeze(2), candidates, moved)
    probs = torch.softmax(torch.randn(candidates.shape, generator=rng) * 2, 2)
    candidates[dead], probs[dead] = -(2**30), torch.nan
    return arguments(case, candidates, probs)


def expected(sampling, case: dict[str, Tensor], public_vocab: int) -> dict[str, Tensor]:
    """The oracle, with what the op chose where a row has no valid choice."""
    oracle = sampling.accept(case, public_vocab)
    outputs = OP(**case, public_vocab=public_vocab)[2].long()
    free = oracle["outputs"] == -2
    assert bool(((outputs[free] >= 0) & (outputs[free] < public_vocab)).all())
    oracle["outputs"] = torch.where(free, outputs, oracle["outputs"])
    return oracle


@pytest.mark.parametrize("columns", [2, 5, 8, 16])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_accept_sparse(sampling, rng: torch.Generator, batch: int, columns: int) -> None:
    """Rows of every kind beside each other, some with columns that are not finite."""
    for repeat in range(4):
        case = mixed(sampling, rng, batch, columns, 11, 9, width=(1, 3, 4, 9)[repeat])
        if repeat % 2:
            spoiled = torch.rand(batch, columns, 11, generator=rng) < 0.03
            values = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf])
            chosen = values[torch.randint(4, case["scores"].shape, generator=rng)]
            case["scores"] = torch.where(spoiled, chosen, case["scores"])
        oracle = expected(sampling, case, 9)
        opcheck = batch == 3 and columns == 5 and repeat == 3
        check_op(OP, case, {"public_vocab": 9}, EXACT, oracle=oracle, opcheck=opcheck)


def test_point_masses_are_accept_one_hot(sampling, rng: torch.Generator) -> None:
    case = sampling.mixed(rng, 200, 6, vocab=11, public_vocab=9)
    drafts = case["ids"][:, 1:].unsqueeze(2)
    found = OP(**arguments(case, drafts, torch.ones(drafts.shape)), public_vocab=9)
    one_hot = ONE_HOT(**case, public_vocab=9, purpose=1)
    for left, right in zip(found, one_hot, strict=True):
        assert torch.equal(left, right)


def test_a_law_that_is_nan_accepts_nothing(sampling) -> None:
    rows = 2000
    case = sampling.neutral(
        torch.ones(rows, 2),
        torch.zeros(rows, 2, 4),
        seed=sampling.random_seeds(torch.Generator().manual_seed(5), rows),
    )
    laws = torch.full((rows, 1, 2), torch.nan)
    found = OP(**arguments(case, torch.tensor([1, 3]).expand(rows, 1, 2), laws), public_vocab=4)
    accepted, _, outputs, finite = found
    assert not bool(accepted.any())
    assert bool(finite.all())
    cells = torch.bincount(outputs[:, 0].long(), minlength=4)
    sampling.assert_law(cells, torch.full((4,), 0.25), "correction")


def test_choices_do_not_depend_on_company(sampling, rng: torch.Generator) -> None:
    case = mixed(sampling, rng, 24, 16, 301, 300, width=16)
    case["scores"][..., :300] += torch.randn(24, 16, 300, generator=rng)
    whole = OP.reference(**case, public_vocab=300)
    flipped = {n: v if n == "counts" else v.flip(0) for n, v in case.items()}
    for found, all_rows in zip(OP.reference(**flipped, public_vocab=300), whole, strict=True):
        assert torch.equal(found.flip(0), all_rows)
    for b in range(24):
        for columns in {max(int(case["live_drafts"][b]) + 1, 2), 16}:
            part = {n: v if n == "counts" else v[b : b + 1] for n, v in case.items()}
            part |= {n: part[n][:, :columns] for n in ("ids", "scores")}
            part |= {n: part[n][:, : columns - 1] for n in ("candidates", "draft_probs")}
            alone = OP.reference(**part, public_vocab=300)
            for name, found, all_rows in zip(OP.outputs, alone, whole, strict=True):
                same = all_rows[b : b + 1]
                assert torch.equal(found, same[:, :columns] if name == "outputs" else same)


def check_laws(
    sampling, case: dict[str, Tensor], public: int, count_law: Tensor, laws: Tensor
) -> None:
    accepted, licensed, outputs, finite = OP(**case, public_vocab=public)
    assert bool(finite.all())
    sampling.assert_law(torch.bincount(accepted, minlength=len(count_law)), count_law, "accepted")
    for i, law in enumerate(laws):
        emits = licensed > i
        if bool(emits.any()):
            cells = torch.bincount(outputs[emits, i].long(), minlength=len(law))
            sampling.assert_law(cells, law, f"position {i}")
        else:
            assert float(count_law[i:].sum()) < 1e-4


def drawn(probs: Tensor, generator: torch.Generator) -> Tensor:
    """A rank of each row of `[N, C]`, by torch's own generator."""
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)


@pytest.mark.parametrize("name", CHAINS)
def test_golden_laws(sampling, name: str) -> None:
    """Accepted count and the token at each position; a markov chain's laws follow the path."""
    numbers = load_file(GOLDEN / "rejection_chain" / "expected.safetensors")
    generator = torch.Generator().manual_seed(3000 + CHAINS.index(name))
    markov = name.startswith("markov")
    p = numbers[f"{name}.{'p_table' if markov else 'p'}"]
    q_ids, q = (numbers[f"{name}.{'q_table' if markov else 'q'}_{n}"] for n in ("ids", "probs"))
    length, vocab = len(q), p.shape[-1]
    before = numbers[f"{name}.anchor"] if markov else torch.zeros(1, dtype=torch.int64)
    ids, laws, candidates, scores = [before.expand(DRAWS)], [], [], []
    for i in range(length + 1):
        scores.append((p[i][ids[-1]] if markov else p[i].expand(DRAWS, vocab)).log().float())
        if i < length:
            laws.append(q[i][ids[-1]] if markov else q[i].expand(DRAWS, -1))
            candidates.append(q_ids[i][ids[-1]] if markov else q_ids[i].expand(DRAWS, -1))
            rank = drawn(laws[-1], generator)
            ids.append(candidates[-1].gather(1, rank.unsqueeze(1)).squeeze(1))
    case = sampling.neutral(
        torch.stack(ids, 1), torch.stack(scores, 1), seed=sampling.random_seeds(generator, DRAWS)
    )
    check_laws(
        sampling,
        arguments(case, torch.stack(candidates, 1), torch.stack(laws, 1)),
        vocab,
        numbers[f"{name}.accepted_count_law"],
        numbers[f"{name}.emitted_law"],
    )


def test_no_draft_is_live(sampling) -> None:
    """P = 0: the token after the anchor has the target's law, whatever was proposed."""
    generator = torch.Generator().manual_seed(40)
    p = load_file(GOLDEN / "rejection_chain" / "expected.safetensors")["P1.sparse4.p"]
    case = sampling.neutral(
        torch.zeros(DRAWS, 2),
        p.log().float().expand(DRAWS, -1, -1),
        live_drafts=torch.zeros(DRAWS, dtype=torch.int32),
        seed=sampling.random_seeds(generator, DRAWS),
    )
    q_ids = torch.arange(4).expand(DRAWS, 1, 4)
    case = arguments(case, q_ids, torch.full((DRAWS, 1, 4), 0.25))
    check_laws(sampling, case, p.shape[1], torch.ones(1), p[:1])


@pytest.mark.parametrize("name", SETTINGS)
def test_law_of_filters_and_penalties(sampling, name: str) -> None:
    """Two drafts from laws over three candidates, against all paths enumerated."""
    generator = torch.Generator().manual_seed(4000 + list(SETTINGS).index(name))
    controls = sampling.neutral_controls | SETTINGS[name]
    vocab, public = 12, 10
    scores = torch.randint(-4, 5, (3, vocab), generator=generator) / 2 + 0.125
    scores[:, public:] = 50.0
    counts = torch.tensor([[9] * vocab, [0, 3, 0, 1, 0, 2, 0, 0, 1, 0, 9, 9]], dtype=torch.int32)
    order = scores[:, :public].argsort(dim=1, descending=True)
    q_ids = order[:2][:, [0, 2, 7]]
    q = torch.tensor([[0.5, 0.3, 0.2], [0.25, 0.625, 0.125]])
    ranks = torch.stack([drawn(law.expand(DRAWS, 3), generator) for law in q], 1)
    drafts = torch.stack([q_ids[i][ranks[:, i]] for i in range(2)], 1)
    case = sampling.neutral(
        torch.cat((torch.ones(DRAWS, 1), drafts), 1),
        scores.expand(DRAWS, 3, vocab),
        counts=counts,
        slots=torch.ones(DRAWS, dtype=torch.int32),
        seed=sampling.random_seeds(generator, DRAWS),
        **{
            n: torch.full((DRAWS,), v).to(torch.int32 if n == "top_k" else torch.float32)
            for n, v in controls.items()
        },
    )
    proposals = [
        dict(zip(i.tolist(), law.tolist(), strict=True)) for i, law in zip(q_ids, q, strict=True)
    ]
    seen = counts[1, :public].tolist()
    laws = sampling.chain_laws(scores[:, :public].tolist(), seen, controls, proposals)
    case = arguments(case, q_ids.expand(DRAWS, 2, 3), q.expand(DRAWS, 2, 3))
    check_laws(sampling, case, public, *laws)


def test_law_of_a_whole_round(sampling) -> None:
    """Drafts from selector_sample under the same seed: proposals and tests share no numbers."""
    generator = torch.Generator().manual_seed(50)
    vocab, length, width = 9, 3, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    scores = normal(length + 1, vocab)
    candidates = normal(length, vocab).topk(width).indices.to(torch.int32)
    seed = sampling.random_seeds(generator, DRAWS)
    frontier = torch.randint(0, 500, (DRAWS,), generator=generator).to(torch.int32)
    anchor = torch.zeros(DRAWS, dtype=torch.int32)
    proposed = SELECTOR(
        candidates=candidates.expand(DRAWS, length, width),
        scores=normal(length, width).expand(DRAWS, length, width),
        hidden=normal(length + 1, 2).expand(DRAWS, length + 1, 2),
        anchor=anchor,
        predecessor=normal(vocab, 2),
        successor=normal(vocab, 2),
        temperature=torch.full((DRAWS,), 0.9),
        seed=seed,
        frontier=frontier,
    )
    drafts, _, laws = proposed
    case = sampling.neutral(
        torch.cat((anchor.unsqueeze(1), drafts), 1),
        scores.expand(DRAWS, length + 1, vocab),
        seed=seed,
        frontier=frontier,
    )
    case = arguments(case, candidates.expand(DRAWS, length, width), laws)
    accepted, licensed, outputs, _ = OP(**case, public_vocab=vocab)
    assert len(accepted.unique()) == length + 1
    for i, law in enumerate(scores.double().softmax(1)):
        emits = licensed > i
        cells = torch.bincount(outputs[emits, i].long(), minlength=vocab)
        sampling.assert_law(cells, law, f"position {i}")
        # also from what was drawn before it
        if i and int((licensed > i).sum()) > 1000:
            last = outputs[emits, i - 1].long() * vocab + outputs[emits, i].long()
            pairs = torch.bincount(last, minlength=vocab * vocab).reshape(vocab, vocab)
            for row in pairs:
                if int(row.sum()) > 100:
                    sampling.assert_law(row, law, f"position {i} after one token")


def test_contract(sampling, rng: torch.Generator) -> None:
    case = mixed(sampling, rng, 3, 8, 20, 18, width=4)
    specs = {n: spec_of(v) for n, v in case.items()}
    with pytest.raises(ShapeError, match=r"public_vocab must be in 1..20 \(V, .*\), got 0"):
        OP.infer(specs, {"public_vocab": 0})
    with pytest.raises(ShapeError, match=r"scores: axis 1 .* must be 8 \(K\+1\), got 7"):
        OP.infer(specs | {"scores": spec_of(torch.empty(3, 7, 20))}, {"public_vocab": 18})
    with pytest.raises(ShapeError, match=r"draft_probs: axis 2 .* must be 4 \(C from .*got 5"):
        OP.infer(specs | {"draft_probs": spec_of(torch.empty(3, 7, 5))}, {"public_vocab": 18})
    with pytest.raises(ShapeError, match=r"K = 0; accept_one_hot takes W = 1"):
        OP.infer(
            specs
            | {
                "ids": spec_of(torch.empty(3, 1, dtype=torch.int32)),
                "candidates": spec_of(torch.empty(3, 0, 4, dtype=torch.int32)),
                "draft_probs": spec_of(torch.empty(3, 0, 4)),
                "scores": spec_of(torch.empty(3, 1, 20)),
            },
            {"public_vocab": 18},
        )
    cost = OP.cost(specs, {"public_vocab": 18})
    assert cost.read_bytes == 4 * (24 + 2 * 3 * 7 * 4 + 24 * 18 + 3 * 18 + 9 * 3 + 6)
    assert cost.write_bytes == 4 * (3 * 3 + 24)
    assert cost.flops == 3 * (18 * (8 * 8 + 1) + 7 + 4)
