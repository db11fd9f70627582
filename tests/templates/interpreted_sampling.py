"""Sampled acceptance at small geometry in Triton's interpreter, against the reference as it runs.

The reference in float32, not in float64: a law's one rounding is part of the contract.
"""

from __future__ import annotations

import pytest
import torch

from dflash_graph.kernels import Choice
from dflash_graph.ops import get_op
from dflash_graph.testing import same_bytes

ONE_HOT, SPARSE = get_op("accept_one_hot"), get_op("accept_sparse")
SMALL = Choice({"CHUNK": 64}, num_warps=4, num_stages=1)
PLAIN, PREFILL = 1, 0


def pick(rng, values, *shape):
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=rng)]


def round_case(rng, batch, columns, vocab, public, *, tied=True, **given):
    """Rows of every kind; what the contract does not look at is poison."""
    scores = torch.randn(batch, columns, vocab, generator=rng) * 2.0
    if tied:
        scores = pick(rng, [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.5, 3.0], batch, columns, vocab)
        scores += pick(rng, [0.0, 0.0, 1e4], batch, 1, 1)
    scores[..., public:] = torch.nan
    drafts = torch.where(
        torch.rand(batch, columns, generator=rng) < 0.7,
        scores[..., :public].argmax(-1),
        torch.randint(0, public, (batch, columns), generator=rng),
    )
    ids = torch.cat((torch.full((batch, 1), -7), drafts[:, :-1]), 1)
    live = torch.randint(0, columns, (batch,), generator=rng)
    dead = torch.arange(columns) > live.unsqueeze(1)
    ids[dead] = -(2**30)
    scores[dead] = torch.nan
    counts = torch.full((batch + 2, vocab), -(2**30))
    slots = torch.randperm(batch + 2, generator=rng)[:batch]
    counts[slots, :public] = pick(rng, [0, 0, 0, 1, 2, 7], batch, public)
    case = {
        "ids": ids.to(torch.int32),
        "scores": scores,
        "counts": counts.to(torch.int32),
        "slots": slots.to(torch.int32),
        "live_drafts": live.to(torch.int32),
        "frontier": pick(rng, [0, 1, 17, 40000], batch).to(torch.int32),
        "temperature": pick(rng, [-1.0, 0.0, 0.25, 0.7, 1.0, 1.0, 4.0], batch),
        "top_p": pick(rng, [0.0, 0.3, 0.5, 0.9, 1.0, 1.0], batch),
        "min_p": pick(rng, [0.0, 0.0, 0.0, 0.05, 0.3, 1.0], batch),
        "presence": pick(rng, [0.0, 0.0, 0.5, -0.5, 2.0], batch),
        "frequency": pick(rng, [0.0, 0.0, 0.25, -0.1], batch),
        "top_k": pick(rng, [-1, 0, 0, 1, 3, 5, 9999], batch).to(torch.int32),
        "seed": torch.randint(-(2**31), 2**31, (batch, 2), generator=rng).to(torch.int32),
    }
    for name, value in given.items():
        case[name] = torch.full_like(case[name], value)
    return case


def with_laws(rng, case, public, width=4):
    """Arguments of accept_sparse: each draft among candidates with probabilities."""
    batch, columns = case["ids"].shape
    dead = torch.arange(columns - 1) >= case["live_drafts"].unsqueeze(1)
    order = torch.rand(batch, columns - 1, public, generator=rng)
    drafts = case["ids"][:, 1:].long().masked_fill(dead, 0).unsqueeze(2)
    candidates = order.scatter(2, drafts, 2.0).topk(width).indices
    candidates = candidates.roll(1, 2)
    q = torch.rand(batch, columns - 1, width, generator=rng)
    q = q / q.sum(-1, keepdim=True)
    q[torch.rand(batch, columns - 1, generator=rng) < 0.05] = torch.nan
    candidates[dead] = -(2**30)
    q[dead] = torch.nan
    ids, rest = case["ids"], {n: v for n, v in case.items() if n != "ids"}
    return {"ids": ids, "candidates": candidates.to(torch.int32), "draft_probs": q, **rest}


def compare(run, op, case, attributes, **changes):
    """Exactly the reference, but for the id that ends a row which is not finite."""
    changes = {"choice": SMALL, **changes}
    found = run(op, case, attributes, **changes)
    expected = dict(zip(op.outputs, op.reference(**case, **attributes), strict=True))
    for b in (expected["finite"] == 0).nonzero().flatten().tolist():
        end = int(expected["accepted"][b])
        assert 0 <= int(found["outputs"][b, end]) < attributes["public_vocab"]
        expected["outputs"][b, end] = found["outputs"][b, end]
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name}: {found[name]} is not {value}"
    return found


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_accept_one_hot(rng, run, columns, tied):
    """With scores that are not finite in half the calls."""
    for batch, vocab, public, purpose in ((3, 11, 9, PREFILL), (2, 120, 101, PLAIN)):
        case = round_case(rng, batch, columns, vocab, public, tied=tied)
        if tied:
            values = pick(rng, [torch.nan, torch.inf, -torch.inf], batch, columns, vocab)
            where = torch.rand(batch, columns, vocab, generator=rng) < 1 / vocab
            case["scores"] = torch.where(where, values, case["scores"])
        compare(run, ONE_HOT, case, {"public_vocab": public, "purpose": purpose})


@pytest.mark.parametrize(("columns", "tied"), [(2, False), (4, True)])
def test_accept_sparse(rng, run, columns, tied):
    for batch, vocab, public, width in ((3, 11, 9, 4), (2, 120, 101, 5)):
        case = round_case(rng, batch, columns, vocab, public, tied=tied)
        compare(run, SPARSE, with_laws(rng, case, public, width), {"public_vocab": public})


FILTERS = (
    {"top_k": 4},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.6},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "presence": 0.4, "frequency": 0.1},
    {},
)


def test_filters(rng, run):
    """Each filter in a row that samples, with peaked and with flat laws, with and without ties."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0}
    for heat, tied in ((0.8, True), (0.8, False), (30.0, False)):
        case = round_case(rng, len(FILTERS), 2, 120, 120, tied=tied, temperature=heat)
        for name in off:
            values = torch.tensor([{**off, **given}[name] for given in FILTERS])
            case[name] = values.to(case[name].dtype)
        compare(run, ONE_HOT, case, {"public_vocab": 120, "purpose": PLAIN})


def test_extreme_scores(rng, run):
    """Most of a law underflows; scores on both sides of zero, denormal and infinite ones."""
    case = round_case(rng, 6, 2, 70, 70, tied=False, presence=0.0, frequency=0.0)
    case["scores"] = case["scores"].nan_to_num()
    case["scores"][0] *= 1e30
    case["scores"][1] *= 1e-42
    case["scores"][2, :, ::2] = -torch.inf
    case["scores"][3] -= 3e38
    case["scores"][4] = 1e-45
    case["temperature"] = torch.tensor([1.0, 1e-42, 1.0, 1e37, 1e-3, 1e-3])
    compare(run, ONE_HOT, case, {"public_vocab": 70, "purpose": PLAIN})


def test_default_choice(rng, run):
    case = round_case(rng, 2, 3, 300, 290)
    attributes = {"public_vocab": 290, "purpose": PLAIN}
    compare(run, ONE_HOT, case, attributes, choice=None)


def test_numbers_above_the_whole_sum(run, rng):
    """Laws whose float32 probabilities sum to less than the greatest number that may be drawn."""
    batch, vocab = 3, 131
    case = round_case(rng, batch, 1, vocab, vocab, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0)
    case["presence"] *= 0.0
    case["frequency"] *= 0.0
    case["scores"] = torch.full((batch, 1, vocab), -200.0)
    case["scores"][:, :, [5, 77, 78]] = 0.0
    found = compare(run, ONE_HOT, case, {"public_vocab": vocab, "purpose": PLAIN})
    assert set(found["outputs"].flatten().tolist()) <= {5, 77, 78}


def test_choices_do_not_depend_on_company(rng, run):
    columns, public = 3, 101
    rows = round_case(rng, 2, columns, 120, public, tied=False)
    for op, case, attributes in (
        (ONE_HOT, rows, {"public_vocab": public, "purpose": PLAIN}),
        (SPARSE, with_laws(rng, rows, public), {"public_vocab": public}),
    ):
        whole = run(op, case, attributes, choice=SMALL)
        turned = {n: v if n == "counts" else v.flip(0) for n, v in case.items()}
        for name, found in run(op, turned, attributes, choice=SMALL).items():
            assert same_bytes(found.flip(0), whole[name]), name
        for b in range(2):
            kept = max(int(case["live_drafts"][b]) + 1, 2)
            alone = {n: v if n == "counts" else v[b : b + 1] for n, v in case.items()}
            alone |= {n: alone[n][:, :kept] for n in ("ids", "scores")}
            if op is SPARSE:
                alone |= {n: alone[n][:, : kept - 1] for n in ("candidates", "draft_probs")}
            alone = {n: v.contiguous() for n, v in alone.items()}
            for name, found in run(op, alone, attributes, choice=SMALL).items():
                same = whole[name][b : b + 1]
                assert same_bytes(found, same[:, :kept] if name == "outputs" else same), name
