"""Kernels of the output head at small geometry in Triton's interpreter; see `interpreted.py`."""

from __future__ import annotations

import pytest
import torch

from dflash_graph.kernels import Choice
from dflash_graph.ops import get_op
from dflash_graph.testing import F32_REDUCTION, same_bytes

SCORES, ARGMAX, TOPK = (get_op(name) for name in ("head_scores", "head_argmax", "head_topk"))
SMALL = Choice({"BLOCK_O": 16, "BLOCK_I": 32}, num_warps=4, num_stages=2)
PLAIN = {"multiplier": 1.0, "softcap": 0.0}
LAWS = [PLAIN, {"multiplier": 0.3, "softcap": 2.0}]
VOCAB, PUBLIC, HIDDEN = 83, 77, 40


def head_case(rng, batch, columns, vocab=VOCAB, hidden=HIDDEN):
    weight = torch.randn(vocab, hidden, generator=rng)
    return {"x": torch.randn(batch, columns, hidden, generator=rng), "weight": weight}


def tied_case(rng, batch, columns):
    """Small whole numbers: every score is exact, and most of the greatest are ties. Rows that are
    not public are NaN.
    """
    x = torch.randint(-1, 2, (batch, columns, 6), generator=rng).float()
    x[-1, -1] = 0.0
    weight = torch.randint(-1, 2, (VOCAB, 6), generator=rng).float()
    weight[PUBLIC:] = torch.nan
    return {"x": x, "weight": weight}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("batch", "columns"), [(1, 1), (3, 5), (1, 16), (2, 9)])
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 1), (48, 32), (83, 40)])
def test_head_scores(rng, check, law, batch, columns, vocab, hidden):
    case = head_case(rng, batch, columns, vocab, hidden)
    check(SCORES, case, {**law, "tiled": True}, F32_REDUCTION, choice=SMALL)


def test_default_tiles(rng, check):
    case = head_case(rng, 2, 3)
    check(SCORES, case, {**PLAIN, "tiled": True}, F32_REDUCTION)
    check(ARGMAX, case, {**PLAIN, "skip": 1, "public_vocab": PUBLIC}, F32_REDUCTION)
    check(TOPK, case, {**PLAIN, "skip": 1, "public_vocab": PUBLIC, "top_k": 16}, F32_REDUCTION)


def test_cap_of_extreme_scores(rng, run):
    weight = torch.tensor([0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1e-30, -7.5, 7.4999])
    law = {"multiplier": 1.0, "softcap": 30.0, "tiled": True}
    case = {"x": torch.ones(1, 1, 1), "weight": weight.unsqueeze(1)}
    found = run(SCORES, case, law, choice=SMALL)["scores"][0, 0]
    assert found[:5].tolist() == [0.0, 30.0, -30.0, 30.0, -30.0]
    assert bool(found[5].isnan())
    expected = 30.0 * torch.tanh(weight[6:].double() / 30.0)
    assert torch.allclose(found[6:].double(), expected, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize(("batch", "columns", "skip"), [(1, 1, 0), (3, 5, 1), (2, 9, 2)])
@pytest.mark.parametrize("top_k", [1, 5, 16])
def test_first_ids(rng, check, batch, columns, skip, top_k):
    """Ties within a tile and across tiles, more ids than tiles, rows that are not public."""
    case = tied_case(rng, batch, columns)
    attributes = {"skip": skip, "public_vocab": PUBLIC, "multiplier": 2.0, "softcap": 0.0}
    check(ARGMAX, case, attributes, F32_REDUCTION, choice=SMALL)
    check(TOPK, case, attributes | {"top_k": top_k}, F32_REDUCTION, choice=SMALL)


@pytest.mark.parametrize("public_vocab", [1, 15, 16, 17, VOCAB])
def test_public_vocabulary(rng, check, public_vocab):
    attributes = {**PLAIN, "skip": 0, "public_vocab": public_vocab}
    case = head_case(rng, 1, 3)
    check(ARGMAX, case, attributes, F32_REDUCTION, choice=SMALL)
    top = attributes | {"top_k": min(7, public_vocab)}
    check(TOPK, case, top, F32_REDUCTION, choice=SMALL)


def test_agree_with_head_scores_bit_for_bit(rng, run):
    for law in LAWS:
        case = head_case(rng, 2, 8)
        attributes = {**law, "skip": 2, "public_vocab": PUBLIC}
        scores = run(SCORES, case, {**law, "tiled": True}, choice=SMALL)["scores"]
        scores = scores[:, 2:, :PUBLIC]
        best = run(ARGMAX, case, attributes, choice=SMALL)
        assert same_bytes(best["scores"], scores.amax(-1))
        assert torch.equal(best["ids"].long(), scores.argmax(-1))
        first = run(TOPK, case, attributes | {"top_k": 9}, choice=SMALL)
        assert same_bytes(first["scores"], scores.gather(-1, first["ids"].long()))
        assert torch.equal(first["ids"].long(), scores.sort(-1, descending=True).indices[..., :9])


def scores_case(scores):
    return {"x": torch.ones(1, 1, 1), "weight": torch.tensor(scores).unsqueeze(1)}


def test_infinities_and_nan(run):
    inf, nan = torch.inf, torch.nan

    def best(scores, public_vocab=None):
        attributes = {**PLAIN, "skip": 0, "public_vocab": public_vocab or len(scores)}
        return [v.item() for v in run(ARGMAX, scores_case(scores), attributes).values()]

    def first(scores):
        attributes = {**PLAIN, "skip": 0, "public_vocab": len(scores), "top_k": 3}
        return run(TOPK, scores_case(scores), attributes, choice=SMALL)["ids"].flatten().tolist()

    assert best([-inf, inf, inf]) == [1, inf]
    assert best([-inf, -inf]) == [0, -inf]
    assert best([1.0, 2.0, nan], 2) == [1, 2.0]
    for scores in ([nan, 1.0], [inf, nan], [nan, nan], [0.0] * 40 + [nan, 5.0]):
        chosen, score = best(scores)
        assert 0 <= chosen < len(scores)
        assert score != score
    assert first([1.0, nan, inf, -inf, nan]) == [1, 4, 2]
    assert first([-inf] * 5) == [0, 1, 2]
    assert first([2.0, -inf, *[-inf] * 30, 2.0]) == [0, 32, 1]


@pytest.mark.parametrize("block_rows", [16, 32])
def test_bits_do_not_depend_on_company(rng, run, block_rows):
    holes = {"BLOCK_R": block_rows}
    case = head_case(rng, 3, 6)
    attributes = {**PLAIN, "skip": 1, "public_vocab": PUBLIC}
    calls = (
        (SCORES, {**PLAIN, "tiled": True}, 0),
        (ARGMAX, attributes, 1),
        (TOPK, attributes | {"top_k": 5}, 1),
    )
    for op, given, skip in calls:
        whole = run(op, case, given, choice=SMALL)
        others = case["x"] * 1e3
        others[1] = case["x"][1]
        others[:, :skip] = torch.nan
        for rows, columns in (([2, 1, 0], 6), ([1], 4), ([2, 0], 2)):
            part = case | {"x": case["x"][rows, :columns].contiguous()}
            for name, found in run(op, part, given, choice=SMALL, holes=holes).items():
                assert same_bytes(found, whole[name][rows, : columns - skip]), f"{op.name}.{name}"
        company = run(op, case | {"x": others}, given, choice=SMALL)
        for name, found in company.items():
            assert same_bytes(found[1, skip:], whole[name][1, skip:]), f"{op.name}.{name}"
