from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.accept_greedy import OP as GREEDY
from dflash_graph.ops.accept_one_hot import OP
from dflash_graph.testing import EXACT, check_op

GOLDEN = Path(__file__).parents[1] / "golden"
PREFILL, PLAIN, ACCEPT, CORRECTION, BONUS = range(5)
DRAWS = 200_000

#: Every filter and penalty alone, then together.
SETTINGS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "presence": {"presence": 0.8},
    "frequency": {"frequency": 0.4},
    "boost": {"presence": -0.5, "frequency": -0.3},
    "filters": {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.05, "presence": 0.5,
            "frequency": 0.3},
}  # fmt: skip


def expected(sampling, case: dict[str, Tensor], public_vocab: int, purpose: int) -> dict:
    """The oracle, with what the op chose where a row has no valid choice."""
    oracle = sampling.accept(case, public_vocab, purpose)
    outputs = OP(**case, public_vocab=public_vocab, purpose=purpose)[2].long()
    free = oracle["outputs"] == -2
    assert bool(((outputs[free] >= 0) & (outputs[free] < public_vocab)).all())
    oracle["outputs"] = torch.where(free, outputs, oracle["outputs"])
    return oracle


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_accept_one_hot(sampling, rng: torch.Generator, batch: int, columns: int) -> None:
    """Rows of every kind beside each other, some with columns that are not finite."""
    for repeat in range(4):
        case = sampling.mixed(rng, batch, columns, vocab=11, public_vocab=9)
        if repeat % 2:
            spoiled = torch.rand(batch, columns, 11, generator=rng) < 0.03
            values = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf])
            chosen = values[torch.randint(4, case["scores"].shape, generator=rng)]
            case["scores"] = torch.where(spoiled, chosen, case["scores"])
        attributes = {"public_vocab": 9, "purpose": repeat // 2}
        oracle = expected(sampling, case, *attributes.values())
        opcheck = batch == 3 and columns in (1, 5) and repeat == 3
        check_op(OP, case, attributes, EXACT, oracle=oracle, opcheck=opcheck)


def by_hand(sampling, ids: list[int], scores: list[list[float]], **given: Tensor) -> list:
    case = sampling.neutral(torch.tensor([ids]), torch.tensor([scores]), **given)
    found = OP(**case, public_vocab=len(scores[0]), purpose=PLAIN)
    return [v[0].tolist() for v in found]


def test_greedy_by_hand(sampling) -> None:
    zero, penalty = torch.zeros(1), torch.tensor([1.5])
    rows = [[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [2.0, 2.0, 1.0]]
    greedy = {"temperature": zero}
    assert by_hand(sampling, [0, 1, 1], rows, **greedy) == [2, 3, [1, 1, 0], 1]
    assert by_hand(sampling, [0, 1, 2], rows, **greedy) == [1, 2, [1, 1, -1], 1]
    # 1 was drafted: it is worth 0.5 in column 1, where 2 is confirmed; both cost in column 2
    assert by_hand(sampling, [0, 1, 2], rows, **greedy, presence=penalty) == [2, 3, [1, 2, 0], 1]
    seen = torch.tensor([[0, 2, 0]], dtype=torch.int32)  # 2 - 2 * 1.5 < 0
    counted = greedy | {"counts": seen, "frequency": penalty}
    assert by_hand(sampling, [0, 1, 2], rows, **counted) == [0, 1, [2, -1, -1], 1]
    live = {"live_drafts": torch.ones(1, dtype=torch.int32)}
    assert by_hand(sampling, [0, 1, 1], rows, **greedy, **live) == [1, 2, [1, 1, -1], 1]


def test_finite_by_hand(sampling) -> None:
    nan, inf = torch.nan, torch.inf
    fine = [0.0, 9.0, 0.0]
    for heat in (0.0, 1e-3):
        given = {"temperature": torch.tensor([heat])}
        assert by_hand(sampling, [0, 1, 1], [fine, fine, fine], **given)[3] == 1
        assert by_hand(sampling, [0, 1, 1], [fine, [-inf, 9.0, 0.0], fine], **given)[3] == 1
        assert by_hand(sampling, [0, 2, 1], [fine, [nan] * 3, fine], **given)[3] == 1  # not reached
        for bad in ([nan, 9.0, 0.0], [0.0, inf, 0.0], [-inf] * 3):
            found = by_hand(sampling, [0, 1, 1], [fine, bad, fine], **given)
            assert (found[0], found[1], found[3]) == (1, 2, 0)
            assert found[2][0] == 1
            assert found[2][1] in (0, 1, 2)
            assert found[2][2] == -1


def test_greedy_rows_equal_accept_greedy(rng: torch.Generator, sampling) -> None:
    case = sampling.mixed(rng, 64, 6, vocab=11, public_vocab=9)
    for name in ("temperature", "presence", "frequency"):
        case[name] = torch.zeros(64)
    public = case["scores"][..., :9].nan_to_num(nan=0.0)
    targets = torch.tensor([[row.index(max(row)) for row in b] for b in public.tolist()])
    best = public.amax(-1)
    found = OP(**case, public_vocab=9, purpose=PLAIN)
    expected = GREEDY(
        ids=case["ids"],
        targets=targets.to(torch.int32),
        scores=best,
        live_drafts=case["live_drafts"],
    )
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


def test_numbers_come_from_their_counters(sampling, rng: torch.Generator) -> None:
    """A flat law of 256 ids shows the number that drew: 1, 2 drafts live, none, W = 1."""
    batch, width = 50, 256
    seed, frontier = sampling.random_seeds(rng, batch), torch.arange(batch, dtype=torch.int32) * 31
    scores = torch.zeros(batch, 3, width)
    live = torch.arange(batch, dtype=torch.int32) % 3
    case = sampling.neutral(
        torch.zeros(batch, 3), scores, live_drafts=live, seed=seed, frontier=frontier
    )
    accepted, _, outputs, _ = OP(**case, public_vocab=width, purpose=PREFILL)
    single = sampling.neutral(torch.zeros(batch, 1), scores[:, :1], seed=seed, frontier=frontier)
    for b in range(batch):
        f, key = int(frontier[b]), seed[b].tolist()
        for i in range(int(live[b]) + 1):
            if i < live[b]:
                passes = sampling.uniform(key, f + i + 1, ACCEPT) < 1 / width
                assert passes is (int(accepted[b]) > i)
                if passes:
                    continue
                u = sampling.uniform(key, f + i + 1, CORRECTION) * (width - 1) + 1  # id 0 is out
            else:
                u = sampling.uniform(key, f + i + 1, BONUS) * width
            if abs(u - round(u)) > 1e-3:  # else rounding decides
                assert int(outputs[b, i]) == int(u)
            break
    for purpose in (PREFILL, PLAIN):
        outputs = OP(**single, public_vocab=width, purpose=purpose)[2]
        for b in range(batch):
            u = sampling.uniform(seed[b].tolist(), int(frontier[b]) + 1, purpose)
            assert int(outputs[b, 0]) == int(u * width)


def test_choices_do_not_depend_on_company(sampling, rng: torch.Generator) -> None:
    case = sampling.mixed(rng, 24, 16, vocab=301, public_vocab=300)
    case["scores"][..., :300] += torch.randn(24, 16, 300, generator=rng)
    attributes = {"public_vocab": 300, "purpose": PLAIN}
    whole = OP.reference(**case, **attributes)
    flipped = {n: v if n == "counts" else v.flip(0) for n, v in case.items()}
    for found, all_rows in zip(OP.reference(**flipped, **attributes), whole, strict=True):
        assert torch.equal(found.flip(0), all_rows)
    for b in range(24):
        live = int(case["live_drafts"][b])
        for columns in {max(live + 1, 2), min(live + 2, 16), 16}:
            part = {n: v if n == "counts" else v[b : b + 1] for n, v in case.items()}
            part |= {n: part[n][:, :columns] for n in ("ids", "scores")}
            alone = OP.reference(**part, **attributes)
            for name, found, all_rows in zip(OP.outputs, alone, whole, strict=True):
                same = all_rows[b : b + 1]
                assert torch.equal(found, same[:, :columns] if name == "outputs" else same)


def emitted_counts(outputs: Tensor, licensed: Tensor, vocab: int) -> list[Tensor]:
    """Counts of the tokens at each position, over the rows that emit it."""
    return [
        torch.bincount(outputs[licensed > i, i].long(), minlength=vocab)
        for i in range(outputs.shape[1])
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_law_of_filters_and_penalties(sampling, name: str) -> None:
    """Two drafts of which some are accepted, and plain decoding, against all paths enumerated."""
    generator = torch.Generator().manual_seed(1000 + list(SETTINGS).index(name))
    controls = sampling.neutral_controls | SETTINGS[name]
    vocab, public = 12, 10
    scores = torch.randint(-4, 5, (3, vocab), generator=generator) / 2 + 0.125
    scores[:, public:] = 50.0
    counts = torch.tensor([[9] * vocab, [0, 3, 0, 1, 0, 2, 0, 0, 1, 0, 9, 9]], dtype=torch.int32)
    drafts = [int(scores[i, :public].topk(2).indices[i]) for i in range(2)]
    case = sampling.neutral(
        torch.tensor([[1, *drafts]]).expand(DRAWS, 3),
        scores.expand(DRAWS, 3, vocab),
        counts=counts,
        slots=torch.ones(DRAWS, dtype=torch.int32),
        seed=sampling.random_seeds(generator, DRAWS),
        frontier=torch.randint(0, 9000, (DRAWS,), generator=generator).to(torch.int32),
        **{
            n: torch.full((DRAWS,), v).to(torch.int32 if n == "top_k" else torch.float32)
            for n, v in controls.items()
        },
    )
    seen = counts[1, :public].tolist()
    table = scores[:, :public].tolist()
    count_law, laws = sampling.chain_laws(table, seen, controls, [{d: 1.0} for d in drafts])
    accepted, licensed, outputs, finite = OP(**case, public_vocab=public, purpose=PLAIN)
    assert bool(finite.all())
    sampling.assert_law(torch.bincount(accepted, minlength=3), count_law, "accepted")
    for i, cells in enumerate(emitted_counts(outputs, licensed, public)):
        sampling.assert_law(cells, laws[i], f"position {i}")

    plain = case | {n: case[n][:, :1] for n in ("ids", "scores")}
    plain["live_drafts"] = torch.zeros(DRAWS, dtype=torch.int32)
    accepted, licensed, outputs, finite = OP(**plain, public_vocab=public, purpose=PREFILL)
    cells = torch.bincount(outputs[:, 0].long(), minlength=public)
    sampling.assert_law(cells, laws[0], "plain")


@pytest.mark.parametrize("case", ["P0", "P1", "P2", "P3", "P4"])
def test_golden_laws(sampling, case: str) -> None:
    """Accepted count, the token at each position, and the token after a given count."""
    numbers = load_file(GOLDEN / "rejection_chain" / "expected.safetensors")
    length = int(case[1:])
    name = f"{'P1' if length == 0 else case}.onehot"
    generator = torch.Generator().manual_seed(2000 + length)
    p = numbers[f"{name}.p"][: length + 1]
    drafts = numbers[f"{name}.q_ids"][:length, 0]
    ids = torch.cat((torch.zeros(1, dtype=torch.int64), drafts))
    # Wider than what is live, so that no draft is the last column's.
    block = torch.nn.functional.pad(ids, (0, 1), value=-1)
    scores = torch.nn.functional.pad(p.log().float(), (0, 0, 0, 1), value=torch.nan)
    arguments = sampling.neutral(
        block.expand(DRAWS, -1),
        scores.expand(DRAWS, -1, -1),
        live_drafts=torch.full((DRAWS,), length, dtype=torch.int32),
        seed=sampling.random_seeds(generator, DRAWS),
    )
    accepted, licensed, outputs, _ = OP(**arguments, public_vocab=p.shape[1], purpose=PLAIN)
    count_law = numbers[f"{name}.accepted_count_law"] if length else torch.ones(1)
    sampling.assert_law(torch.bincount(accepted, minlength=length + 1), count_law, "accepted")
    for i, cells in enumerate(emitted_counts(outputs, licensed, p.shape[1])[: length + 1]):
        sampling.assert_law(cells, p[i], f"position {i}")
        ends = outputs[accepted == i, i].long()
        law = p[0] if not length else numbers[f"{name}.fixed.next_token_law"][i]
        if len(ends):
            cells = torch.bincount(ends, minlength=p.shape[1])
            sampling.assert_law(cells, law, f"after {i} accepted")


def test_contract(sampling, rng: torch.Generator) -> None:
    case = sampling.mixed(rng, 3, 8, vocab=20, public_vocab=18)
    specs = {n: spec_of(v) for n, v in case.items()}
    attributes = {"public_vocab": 18, "purpose": PLAIN}
    with pytest.raises(ShapeError, match=r"public_vocab must be in 1..20 \(V, .*\), got 21"):
        OP.infer(specs, attributes | {"public_vocab": 21})
    with pytest.raises(ShapeError, match=r"purpose must be 0 \(prefill\) or 1 .*, got 4"):
        OP.infer(specs, attributes | {"purpose": BONUS})
    with pytest.raises(ShapeError, match=r"counts: axis 1 .* must be 20 \(V from .*got 19"):
        OP.infer(specs | {"counts": spec_of(torch.empty(5, 19, dtype=torch.int32))}, attributes)
    with pytest.raises(ShapeError, match="scores: expected dtype float32, got bfloat16"):
        block = spec_of(torch.empty(3, 8, 20, dtype=torch.bfloat16))
        OP.infer(specs | {"scores": block}, attributes)
    cost = OP.cost(specs, attributes)
    assert cost.read_bytes == 4 * (24 + 24 * 18 + 3 * 18 + 9 * 3 + 6)
    assert cost.write_bytes == 4 * (3 * 3 + 24)
    assert cost.flops == 3 * 18 * (8 * 8 + 1)
