from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.block_ids import OP
from dflash_graph.testing import EXACT, check_op


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 16])
def test_block_ids(columns: int) -> None:
    anchor = torch.tensor([7, 0, 151], dtype=torch.int32)
    expected = torch.tensor([[a] + [99] * (columns - 1) for a in (7, 0, 151)])
    check_op(
        OP,
        {"anchor": anchor},
        {"columns": columns, "mask_token_id": 99},
        EXACT,
        oracle={"ids": expected},
        opcheck=columns in (1, 8),
    )


def test_traces_as_one_graph() -> None:
    anchor = torch.tensor([7, 0, 151], dtype=torch.int32)
    traced = torch.compile(
        lambda a: OP.reference(a, columns=8, mask_token_id=3), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(traced(anchor), OP.reference(anchor, columns=8, mask_token_id=3))


def test_contract() -> None:
    specs = {"anchor": spec_of(torch.zeros(3, dtype=torch.int32))}
    with pytest.raises(ShapeError, match="at least the anchor's column, got columns 0"):
        OP.infer(specs, {"columns": 0, "mask_token_id": 1})
    with pytest.raises(ShapeError, match="mask_token_id must not be negative, got -1"):
        OP.infer(specs, {"columns": 8, "mask_token_id": -1})
    cost = OP.cost(specs, {"columns": 8, "mask_token_id": 1})
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (12, 96, 0)
