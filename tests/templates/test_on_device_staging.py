"""Kernels that move rows, walk the candidates and accept, at the shapes of the 27B preset, on a
device: formula and bits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_graph.ops import get_op
from dflash_graph.testing import EXACT, F32_ELEMENTWISE, INTEGER_POISON, same_bytes

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Tensor]]
HIDDEN, VOCAB, BLOCKS = 5120, 248320, 5
DTYPES = [torch.bfloat16, torch.float32]


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Drawn on the device: tables of a vocabulary are large."""
    seed = int(torch.randint(2**31, (1,), generator=rng))
    drawn = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=drawn, device="cuda", dtype=dtype)


def whole(rng: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=rng, dtype=torch.int32).cuda()


def slots_of(rng: torch.Generator, batch: int, capacity: int) -> Tensor:
    return torch.randperm(capacity, generator=rng)[:batch].to(torch.int32).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(rng: torch.Generator, run: Run, dtype: torch.dtype) -> None:
    op, table = get_op("embedding"), normal(rng, VOCAB, HIDDEN, dtype=dtype)
    ids = whole(rng, VOCAB, 8, 16)
    ids[0, 0], ids[0, 1] = 0, VOCAB - 1
    found = run(op, {"ids": ids, "table": table}, {"scale": 1.0})["x"]
    assert same_bytes(found, table[ids.long()])
    one = run(op, {"ids": ids[3:4, :5].contiguous(), "table": table}, {"scale": 1.0})["x"]
    assert same_bytes(one, found[3:4, :5])
    wild = torch.tensor([[-1, VOCAB, INTEGER_POISON]], dtype=torch.int32).cuda()
    found = run(op, {"ids": wild, "table": table}, {"scale": 1.0})["x"]
    assert same_bytes(found[0], table[[0, VOCAB - 1, 0]])
    scaled = run(op, {"ids": ids, "table": table}, {"scale": 2.5})["x"]
    assert same_bytes(scaled, (table[ids.long()].double() * 2.5).to(dtype))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("columns", [1, 2, 8, 16, 17])
def test_ids(rng: torch.Generator, check: Run, batch: int, columns: int) -> None:
    anchor = whole(rng, VOCAB, batch)
    attributes = {"columns": columns, "mask_token_id": VOCAB - 1}
    check(get_op("block_ids"), {"anchor": anchor}, attributes, EXACT)
    if columns > 1:
        drafts, live = whole(rng, VOCAB, batch, columns - 1), whole(rng, columns, batch)
        case = {"anchor": anchor, "drafts": drafts, "live_drafts": live}
        check(get_op("verify_ids"), case, {}, EXACT)


@pytest.mark.parametrize(("half", "sections"), [(32, (11, 11, 10)), (64, ())])
@pytest.mark.parametrize("limit", [8, 2**18, 2**31 - 1])
def test_rotary_table(
    rng: torch.Generator, check: Run, run: Run, half: int, sections: tuple[int, ...], limit: int
) -> None:
    op, attributes = get_op("rotary_table"), {"theta": 1e7, "rotary_half": half}
    attributes["sections"] = sections
    positions = whole(rng, limit, 3 if sections else 1, 8, 16)
    found = check(op, {"positions": positions}, attributes, F32_ELEMENTWISE)
    cut = {"positions": positions[:, 5:6, :3].contiguous()}
    for name, value in run(op, cut, attributes).items():
        assert same_bytes(value, found[name][5:6, :3]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 8, 16])
def test_slots(rng: torch.Generator, check: Run, dtype: torch.dtype, columns: int) -> None:
    """Everything that a request's slot gives and takes; what is not committed is not finite."""
    batch, slots = 8, slots_of(rng, 8, 9)
    committed = whole(rng, columns + 1, batch)
    committed[0], committed[1] = 0, columns
    pending = normal(rng, 9, columns, BLOCKS * HIDDEN, dtype=dtype)
    check(get_op("pending_features"), {"pending": pending, "slots": slots}, {}, EXACT)
    continuation = normal(rng, 9, HIDDEN, dtype=dtype)
    check(get_op("slot_hidden"), {"continuation": continuation, "slots": slots}, {}, EXACT)
    features = [normal(rng, batch, columns, HIDDEN, dtype=dtype) for _ in range(BLOCKS)]
    dead = torch.arange(columns, device="cuda") >= committed.unsqueeze(1)
    for feature in features:
        feature[dead] = torch.nan
    where = {"slots": slots, "committed": committed}
    case = {"features": features, "pending": pending, **where}
    check(get_op("stage_features"), case, {"blocks": BLOCKS}, EXACT)
    case = {"hidden": features[0], "continuation": continuation, **where}
    check(get_op("stage_hidden"), case, {}, EXACT)


@pytest.mark.parametrize("columns", [1, 8, 16])
def test_count_tokens(rng: torch.Generator, check: Run, columns: int) -> None:
    outputs, committed = whole(rng, 3, 8, columns), whole(rng, columns + 1, 8)
    outputs[:, 0] = VOCAB - 1
    outputs[torch.arange(columns, device="cuda") >= committed.unsqueeze(1)] = INTEGER_POISON
    case = {
        "outputs": outputs,
        "counts": whole(rng, 9, 9, VOCAB),
        "slots": slots_of(rng, 8, 9),
        "committed": committed,
    }
    check(get_op("count_tokens"), case, {}, EXACT)


@pytest.mark.parametrize("columns", [1, 2, 8, 16])
def test_accept_greedy(rng: torch.Generator, check: Run, columns: int) -> None:
    batch = 64
    targets = whole(rng, 3, batch, columns)
    ids = torch.cat((targets[:, :1], targets[:, :-1]), 1)
    ids[torch.rand(batch, columns, generator=rng).cuda() < 0.2] = 3
    scores = normal(rng, batch, columns, dtype=torch.float32)
    scores[::3, columns // 2], scores[1::3, 0] = torch.nan, -torch.inf
    case = {"ids": ids, "targets": targets, "scores": scores}
    case["live_drafts"] = whole(rng, columns, batch)
    check(get_op("accept_greedy"), case, {}, EXACT)


def sample_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, drafts: int, *, ties: bool
) -> dict[str, Tensor]:
    """Energies of some ten; with `ties` small whole numbers, of which many are equal."""

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = normal(rng, *shape, dtype=dtype) * scale
        return drawn.round() if ties else drawn

    heats = torch.tensor([0.0, 0.3, 1.0, 4.0]).cuda()
    ids = torch.rand(batch, drafts, 4096, generator=rng).topk(16).indices * (VOCAB // 4096)
    return {
        "candidates": ids.to(torch.int32).cuda(),
        "scores": values(batch, drafts, 16, scale=3.0).float(),
        "hidden": values(batch, drafts + 1, 256),
        "anchor": whole(rng, VOCAB, batch),
        "predecessor": values(VOCAB, 256),
        "successor": values(VOCAB, 256, scale=0.6),
        "temperature": heats[torch.arange(batch, device="cuda") % 4],
        "seed": whole(rng, 2**31 - 1, batch, 2) * 2 - 1,
        "frontier": whole(rng, 2**18, batch),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("drafts", [1, 7, 15])
def test_selector(
    rng: torch.Generator, run: Run, dtype: torch.dtype, ties: bool, drafts: int
) -> None:
    """The formula's choices from the same represented numbers, and the bits of a request alone."""
    walk, sample = get_op("selector_walk"), get_op("selector_sample")
    case = sample_case(rng, dtype, 8, drafts, ties=ties)
    plain = {name: case[name] for name in walk.inputs}
    found = run(walk, plain, {})
    expected = dict(zip(walk.outputs, walk.reference(**plain), strict=True))
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"selector_walk.{name}"
    drawn = run(sample, case, {})
    expected = dict(zip(sample.outputs, sample.reference(**case), strict=True))
    for name in ("drafts", "ranks"):
        assert torch.equal(drawn[name], expected[name]), f"selector_sample.{name}"
    torch.testing.assert_close(drawn["draft_probs"], expected["draft_probs"], rtol=1e-6, atol=0.0)
    for row in (0, 4):
        assert torch.equal(drawn["ranks"][row], found["ranks"][row]), "a row without temperature"
    books = ("predecessor", "successor")
    for row, kept in ((0, drafts), (3, drafts), (6, (drafts + 1) // 2)):
        alone = {name: v if name in books else v[row : row + 1] for name, v in case.items()}
        for name in ("candidates", "scores"):
            alone[name] = alone[name][:, :kept].contiguous()
        alone["hidden"] = alone["hidden"][:, : kept + 1].contiguous()
        for name, value in run(sample, alone, {}).items():
            assert same_bytes(value, drawn[name][row : row + 1, :kept]), f"row {row}: {name}"
