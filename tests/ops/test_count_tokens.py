from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.count_tokens import OP
from dflash_graph.testing import EXACT, INTEGER_POISON, check_op


def count_case(rng: torch.Generator, batch: int, columns: int, vocab: int = 7) -> dict[str, Tensor]:
    """Few ids, so that one row holds an id several times; poison past what is committed."""
    outputs = torch.randint(0, vocab, (batch, columns), generator=rng)
    committed = torch.randint(0, columns + 1, (batch,), generator=rng)
    outputs[torch.arange(columns) >= committed.unsqueeze(1)] = -1
    counts = torch.full((batch + 2, vocab), INTEGER_POISON)
    slots = torch.randperm(batch + 2, generator=rng)[:batch]
    counts[slots] = torch.randint(0, 100, (batch, vocab), generator=rng)
    return {
        "outputs": outputs.to(torch.int32),
        "counts": counts.to(torch.int32),
        "slots": slots.to(torch.int32),
        "committed": committed.to(torch.int32),
    }


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_count_tokens(rng: torch.Generator, batch: int, columns: int) -> None:
    case = count_case(rng, batch, columns)
    expected = case["counts"].tolist()
    for b, slot in enumerate(case["slots"].tolist()):
        for token in case["outputs"][b, : case["committed"][b]].tolist():
            expected[slot][token] += 1
    oracle = {"counts": torch.tensor(expected)}
    check_op(OP, case, {}, EXACT, oracle=oracle, opcheck=batch == 3 and columns == 5)


def test_by_hand() -> None:
    counts = torch.zeros(2, 4, dtype=torch.int32)
    OP(
        outputs=torch.tensor([[3, 3, 1, 2], [0, -1, -1, -1]], dtype=torch.int32),
        counts=counts,
        slots=torch.tensor([1, 0], dtype=torch.int32),
        committed=torch.tensor([3, 0], dtype=torch.int32),
    )
    assert counts.tolist() == [[0, 0, 0, 0], [0, 1, 0, 2]]


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in count_case(rng, 3, 8).items()}
    with pytest.raises(ShapeError, match=r"count_tokens.committed: axis 0 .* must be 3 .*got 4"):
        OP.infer(specs | {"committed": spec_of(torch.empty(4, dtype=torch.int32))}, {})
    with pytest.raises(ShapeError, match="counts: expected dtype int32, got int64"):
        OP.infer(specs | {"counts": spec_of(torch.empty(5, 7, dtype=torch.int64))}, {})
    cost = OP.cost(specs, {})
    assert (cost.read_bytes, cost.write_bytes) == (4 * (24 + 3 + 3 + 24), 4 * 24)
    assert cost.flops == 0
