"""The selector's walk and greedy acceptance in Triton's interpreter: ranks, laws and bits."""

from __future__ import annotations

import pytest
import torch

from dflash_graph.kernels import kernel_case
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.philox import uniform
from dflash_graph.testing import EXACT, F32_ELEMENTWISE, INTEGER_POISON, same_bytes

WALK, SAMPLE, GREEDY = map(get_op, ("selector_walk", "selector_sample", "accept_greedy"))
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1), (6, 5), (16, 32), (17, 40)]  # C, R
VOCAB = 60


def walk_case(rng, dtype, batch, drafts, top_k=6, rank=5, *, exact=False):
    """With `exact`, small whole numbers: every E is exact, and many are ties."""

    def normal(*shape):
        if exact:
            return torch.randint(-2, 3, shape, generator=rng).to(dtype)
        return torch.randn(*shape, generator=rng).to(dtype)

    hidden = normal(batch, drafts + 1, rank)
    hidden[:, 0] = torch.nan  # the anchor's column is not looked at
    ids = torch.rand(batch, drafts, VOCAB, generator=rng).topk(top_k).indices
    return {
        "candidates": ids.to(torch.int32),
        "scores": normal(batch, drafts, top_k).float(),
        "hidden": hidden,
        "anchor": torch.randint(VOCAB, (batch,), generator=rng, dtype=torch.int32),
        "predecessor": normal(VOCAB, rank),
        "successor": normal(VOCAB, rank),
    }


def sample_case(rng, dtype, batch, drafts, top_k=6, rank=5, *, exact=False):
    heats = torch.tensor([-1.0, 0.0, 0.3, 1.0, 2.0, 30.0])
    return {
        **walk_case(rng, dtype, batch, drafts, top_k, rank, exact=exact),
        "temperature": heats[torch.randint(6, (batch,), generator=rng)],
        "seed": torch.randint(-(2**31), 2**31, (batch, 2), generator=rng).to(torch.int32),
        "frontier": torch.randint(1000, (batch,), generator=rng, dtype=torch.int32),
    }


def rows_of(case, rows):
    shared = ("predecessor", "successor")
    return {name: value if name in shared else value[rows] for name, value in case.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "rank"), SIZES)
@pytest.mark.parametrize("exact", [False, True])
def test_walk(rng, check, dtype, top_k, rank, exact):
    check(WALK, walk_case(rng, dtype, 2, 3, top_k, rank, exact=exact), {}, EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "rank"), SIZES)
@pytest.mark.parametrize("exact", [False, True])
def test_sample(rng, run, dtype, top_k, rank, exact):
    """The same draws as the formula from the same represented numbers; greedy rows walk."""
    case = sample_case(rng, dtype, 4, 3, top_k, rank, exact=exact)
    case["temperature"][0], case["temperature"][1] = 0.0, 1.0
    found = run(SAMPLE, case, {})
    drafts, ranks, probs = SAMPLE.reference(**case)
    assert torch.equal(found["drafts"], drafts) and torch.equal(found["ranks"], ranks)
    torch.testing.assert_close(found["draft_probs"], probs, rtol=1e-6, atol=0.0)
    walked = run(WALK, {name: case[name] for name in WALK.inputs}, {})
    for row in (case["temperature"] <= 0.0).nonzero().squeeze(1).tolist():
        assert torch.equal(found["ranks"][row], walked["ranks"][row])


@pytest.mark.parametrize("drafts", [1, 2, 7, 15, 17])
def test_every_length(rng, check, drafts):
    check(WALK, walk_case(rng, torch.float32, 1, drafts), {}, EXACT)
    case = sample_case(rng, torch.float32, 1, drafts)
    check(SAMPLE, case, {}, F32_ELEMENTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_company(rng, run, dtype):
    case = sample_case(rng, dtype, 3, 4)
    together = run(SAMPLE, case, {})
    turned = run(SAMPLE, rows_of(case, torch.tensor([2, 1, 0])), {})
    for name, value in together.items():
        assert same_bytes(turned[name].flip(0), value), f"{name} in reverse"
    for row in range(3):
        alone = rows_of(case, slice(row, row + 1))
        cut = {
            name: value[:, : 3 if name == "hidden" else 2].contiguous()
            if name in ("candidates", "scores", "hidden")
            else value
            for name, value in alone.items()
        }
        for columns, found in ((4, run(SAMPLE, alone, {})), (2, run(SAMPLE, cut, {}))):
            for name, value in found.items():
                assert same_bytes(value, together[name][row : row + 1, :columns]), name


def test_a_law_whose_sum_stays_below_the_draw(rng, run):
    """Two equal candidates: the running sum ends at one, and only a rank with mass is drawn."""
    case = sample_case(rng, torch.float32, 64, 2, top_k=3, rank=4)
    case["temperature"][:] = 1.0
    case["scores"][:] = torch.tensor([0.0, 0.0, -1e30])
    case["predecessor"][:] = 0.0
    found = run(SAMPLE, case, {})
    assert bool((found["ranks"] < 2).all())
    assert torch.equal(found["draft_probs"][0, 0], torch.tensor([0.5, 0.5, 0.0]))
    draws = uniform(case["seed"], case["frontier"].long().unsqueeze(1) + torch.arange(2), 5)
    assert torch.equal(found["ranks"], (draws >= 0.5).to(torch.int32))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_give_a_candidate(rng, run, value):
    case = sample_case(rng, torch.float32, 2, 2)
    case["temperature"] = torch.tensor([0.0, 1.0])
    clean = run(SAMPLE, rows_of(case, slice(0, 1)), {})
    case["scores"][1] = value
    for op in (WALK, SAMPLE):
        found = run(op, {name: case[name] for name in op.inputs}, {})
        assert bool(((found["ranks"] >= 0) & (found["ranks"] < 6)).all())
        chosen = case["candidates"].gather(2, found["ranks"].long().unsqueeze(2)).squeeze(2)
        assert torch.equal(found["drafts"], chosen)
        assert torch.equal(found["ranks"][:1], clean["ranks"])
    assert bool(found["draft_probs"][1].isnan().all())


def test_ids_outside_the_codebooks(rng, run):
    case = walk_case(rng, torch.float32, 2, 3)
    case["candidates"][0], case["anchor"][1] = INTEGER_POISON, -1
    found = run(WALK, case, {})
    assert bool((found["drafts"][0] == INTEGER_POISON).all())
    assert bool((found["drafts"][1] >= 0).all())


def greedy_case(rng, batch, width):
    targets = torch.randint(3, (batch, width), generator=rng, dtype=torch.int32)
    ids = torch.cat((torch.zeros(batch, 1, dtype=torch.int32), targets[:, :-1]), 1)
    wrong = torch.rand(batch, width, generator=rng) < 0.2
    return {
        "ids": torch.where(wrong, 3, ids).to(torch.int32),
        "targets": targets,
        "scores": torch.randn(batch, width, generator=rng),
        "live_drafts": torch.randint(width, (batch,), generator=rng, dtype=torch.int32),
    }


@pytest.mark.parametrize("width", [1, 2, 8, 16, 17])
def test_accept_greedy(rng, check, run, width):
    case = greedy_case(rng, 5, width)
    case["live_drafts"][0], case["live_drafts"][1] = width - 1, 0
    case["ids"][0, 1:] = case["targets"][0, :-1]
    scores = case["scores"]
    for row, value in ((2, torch.nan), (3, torch.inf), (4, -torch.inf)):
        scores[row, int(torch.randint(width, (1,), generator=rng))] = value
    found = check(GREEDY, case, {}, EXACT)
    assert found["accepted"][:2].tolist() == [width - 1, 0]
    for row in range(5):
        alone = run(GREEDY, {name: value[row : row + 1] for name, value in case.items()}, {})
        for name, value in alone.items():
            assert same_bytes(value, found[name][row : row + 1])


def test_accept_greedy_ignores_dead_columns(rng, run):
    case = greedy_case(rng, 2, 8)
    case["live_drafts"][:] = 3
    expected = run(GREEDY, case, {})
    case["ids"][:, 4:], case["targets"][:, 4:] = INTEGER_POISON, INTEGER_POISON
    case["scores"][:, 4:] = torch.nan
    for name, value in run(GREEDY, case, {}).items():
        assert same_bytes(value, expected[name]), name


def test_a_preset_has_the_walk_of_its_sizes():
    case = walk_case(torch.Generator(), torch.bfloat16, 1, 7, 16, 256)
    found = kernel_case("selector_walk", {name: spec_of(v) for name, v in case.items()}, {})
    assert found is not None and found.num_warps == 16
