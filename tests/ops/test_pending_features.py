from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.pending_features import OP
from dflash_graph.testing import EXACT, check_op, poison_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[2], [3, 0, 1]])
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_pending_features(
    rng: torch.Generator, dtype: torch.dtype, slots: list[int], columns: int
) -> None:
    pending = poison_(torch.empty(5, columns, 12, dtype=dtype))
    for slot in slots:
        pending[slot] = torch.randn(columns, 12, generator=rng).to(dtype)
    expected = torch.stack([pending[slot] for slot in slots])
    case = {"pending": pending, "slots": torch.tensor(slots, dtype=torch.int32)}
    check_op(OP, case, {}, EXACT, oracle={"features": expected.double()}, opcheck=columns == 5)


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = torch.randn(4, 5, 6, generator=rng), torch.tensor([3, 1], dtype=torch.int32)
    traced = torch.compile(lambda *args: OP.reference(*args), fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(*case), OP.reference(*case))


def test_contract() -> None:
    specs = {
        "pending": spec_of(torch.empty(7, 8, 12, dtype=torch.bfloat16)),
        "slots": spec_of(torch.empty(3, dtype=torch.int32)),
    }
    with pytest.raises(ShapeError, match="slots: expected dtype int32, got int64"):
        OP.infer(specs | {"slots": spec_of(torch.empty(3, dtype=torch.int64))}, {})
    cost = OP.cost(specs, {})
    assert (cost.read_bytes, cost.write_bytes) == (2 * 3 * 8 * 12 + 12, 2 * 3 * 8 * 12)
