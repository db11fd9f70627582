from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.verify_ids import OP
from dflash_graph.testing import EXACT, INTEGER_POISON, check_op


@pytest.mark.parametrize("drafts", [1, 4, 7, 15])
def test_verify_ids(rng: torch.Generator, drafts: int) -> None:
    live = [0, drafts // 2, drafts]
    ids = torch.randint(0, 100, (3, drafts), generator=rng).to(torch.int32)
    expected = [
        [a, *row[:p], *[a] * (drafts - p)]
        for a, row, p in zip((5, 6, 7), ids.tolist(), live, strict=True)
    ]
    for b, p in enumerate(live):
        ids[b, p:] = INTEGER_POISON
    case = {
        "anchor": torch.tensor([5, 6, 7], dtype=torch.int32),
        "drafts": ids,
        "live_drafts": torch.tensor(live, dtype=torch.int32),
    }
    check_op(OP, case, {}, EXACT, oracle={"ids": torch.tensor(expected)}, opcheck=drafts == 4)
    traced = torch.compile(lambda *args: OP.reference(*args), fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(*case.values()), OP.reference(**case))


def test_contract() -> None:
    specs = {
        "anchor": spec_of(torch.empty(3, dtype=torch.int32)),
        "drafts": spec_of(torch.empty(3, 7, dtype=torch.int32)),
        "live_drafts": spec_of(torch.empty(2, dtype=torch.int32)),
    }
    with pytest.raises(ShapeError, match=r"live_drafts: axis 0 .* must be 3 \(B .*\), got 2"):
        OP.infer(specs, {})
    cost = OP.cost(specs | {"live_drafts": specs["anchor"]}, {})
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (4 * 27, 4 * 24, 0)
