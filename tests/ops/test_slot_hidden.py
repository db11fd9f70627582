from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.slot_hidden import OP
from dflash_graph.testing import EXACT, check_op, poison_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[2], [3, 0, 1]])
def test_slot_hidden(rng: torch.Generator, dtype: torch.dtype, slots: list[int]) -> None:
    continuation = poison_(torch.empty(5, 12, dtype=dtype))
    for slot in slots:
        continuation[slot] = torch.randn(12, generator=rng).to(dtype)
    expected = torch.stack([continuation[slot : slot + 1] for slot in slots])
    case = {"continuation": continuation, "slots": torch.tensor(slots, dtype=torch.int32)}
    check_op(OP, case, {}, EXACT, oracle={"hidden": expected.double()})


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = torch.randn(4, 6, generator=rng), torch.tensor([3, 1], dtype=torch.int32)
    traced = torch.compile(lambda *args: OP.reference(*args), fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(*case), OP.reference(*case))


def test_contract() -> None:
    specs = {
        "continuation": spec_of(torch.empty(7, 12, dtype=torch.bfloat16)),
        "slots": spec_of(torch.empty(3, dtype=torch.int32)),
    }
    with pytest.raises(ShapeError, match=r"slots: expected 1 axes \[B\], got 2"):
        OP.infer(specs | {"slots": spec_of(torch.empty(3, 1, dtype=torch.int32))}, {})
    cost = OP.cost(specs, {})
    assert (cost.read_bytes, cost.write_bytes) == (2 * 36 + 12, 2 * 36)
