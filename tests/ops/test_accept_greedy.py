from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.accept_greedy import OP
from dflash_graph.testing import EXACT, check_op


def oracle(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loop of the paper, one request at a time."""
    found: dict[str, list] = {name: [] for name in OP.outputs}
    ids, targets, scores, live = (v.tolist() for v in case.values())
    for b, p in enumerate(live):
        out = []
        for i in range(p + 1):
            out.append(targets[b][i])
            if i == p or ids[b][i + 1] != targets[b][i]:
                break
        used = torch.tensor(scores[b][: len(out)])
        found["accepted"].append(len(out) - 1)
        found["licensed"].append(len(out))
        found["outputs"].append(out + [-1] * (len(ids[b]) - len(out)))
        found["finite"].append(int(used.isfinite().all()))
    return {name: torch.tensor(values) for name, values in found.items()}


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_accept_greedy(rng: torch.Generator, batch: int, columns: int) -> None:
    """Few ids, so that prefixes of every length occur; NaN here and there."""
    for _ in range(10):
        scores = torch.randn(batch, columns, generator=rng)
        scores[torch.rand(batch, columns, generator=rng) < 0.1] = torch.nan
        scores[torch.rand(batch, columns, generator=rng) < 0.05] = -torch.inf
        targets = torch.randint(0, 9, (batch, columns), generator=rng)
        ids = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), targets[:, :-1]), 1)
        ids[torch.rand(batch, columns, generator=rng) < 0.15] = 3
        case = {
            "ids": ids.to(torch.int32),
            "targets": targets.to(torch.int32),
            "scores": scores,
            "live_drafts": torch.randint(0, columns, (batch,), generator=rng).to(torch.int32),
        }
        check_op(OP, case, {}, EXACT, oracle=oracle(case), opcheck=False)
    check_op(OP, case, {}, EXACT, oracle=oracle(case), opcheck=batch == 3 and columns in (1, 5))


def by_hand(live: int, scores: list[float]) -> tuple[int, int, list[int], int]:
    case = {
        "ids": torch.tensor([[9, 1, 2, 3]], dtype=torch.int32),
        "targets": torch.tensor([[1, 2, 7, 8]], dtype=torch.int32),
        "scores": torch.tensor([scores]),
        "live_drafts": torch.tensor([live], dtype=torch.int32),
    }
    accepted, licensed, outputs, finite = OP(**case)
    return int(accepted), int(licensed), outputs[0].tolist(), int(finite)


def test_by_hand() -> None:
    nan = torch.nan
    assert by_hand(3, [0.0] * 4) == (2, 3, [1, 2, 7, -1], 1)  # the third draft is corrected
    assert by_hand(2, [0.0] * 4) == (2, 3, [1, 2, 7, -1], 1)  # all live drafts, and the bonus
    assert by_hand(1, [0.0] * 4) == (1, 2, [1, 2, -1, -1], 1)
    assert by_hand(0, [0.0] * 4) == (0, 1, [1, -1, -1, -1], 1)  # the anchor alone
    assert by_hand(3, [0.0, 0.0, 0.0, nan]) == (2, 3, [1, 2, 7, -1], 1)  # not looked at
    assert by_hand(3, [0.0, 0.0, nan, 0.0])[3] == 0
    assert by_hand(1, [0.0, torch.inf, 0.0, 0.0])[3] == 0


def test_a_match_after_a_miss_does_not_count() -> None:
    case = {
        "ids": torch.tensor([[9, 4, 2, 3]], dtype=torch.int32),
        "targets": torch.tensor([[1, 2, 3, 8]], dtype=torch.int32),
        "scores": torch.zeros(1, 4),
        "live_drafts": torch.tensor([3], dtype=torch.int32),
    }
    assert [v.flatten().tolist() for v in OP(**case)] == [[0], [1], [1, -1, -1, -1], [1]]


@pytest.mark.parametrize("columns", [1, 6])
def test_traces_as_one_graph(rng: torch.Generator, columns: int) -> None:
    ids = torch.randint(0, 2, (3, columns), generator=rng).to(torch.int32)
    live = torch.tensor([0, columns // 2, columns - 1], dtype=torch.int32)
    case = (ids, ids.roll(-1, 1), torch.randn(3, columns, generator=rng), live)
    traced = torch.compile(lambda *args: OP.reference(*args), fullgraph=True, backend="aot_eager")
    for found, eager in zip(traced(*case), OP.reference(*case), strict=True):
        assert torch.equal(found, eager)


def test_contract() -> None:
    block, row = (spec_of(torch.empty(s, dtype=torch.int32)) for s in ((3, 8), (3,)))
    specs = {
        "ids": block,
        "targets": block,
        "scores": spec_of(torch.empty(3, 8)),
        "live_drafts": row,
    }
    with pytest.raises(ShapeError, match=r"accept_greedy.targets: axis 1 .* must be 8 \(W .*got 7"):
        OP.infer(specs | {"targets": spec_of(torch.empty(3, 7, dtype=torch.int32))}, {})
    cost = OP.cost(specs, {})
    assert (cost.read_bytes, cost.write_bytes) == (4 * (3 * 24 + 3), 4 * (3 * 3 + 24))
