from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.stage_hidden import OP
from dflash_graph.testing import same_bytes


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_stage_hidden(rng: torch.Generator, dtype: torch.dtype, columns: int) -> None:
    """Byte for byte; a request that commits nothing keeps its bytes, -0.0 and NaN too."""
    hidden = torch.randn(4, columns, 6, generator=rng).to(dtype)
    hidden[0, -1, :2] = torch.tensor([-0.0, torch.nan])
    continuation = torch.randn(6, 6, generator=rng).to(dtype)
    continuation[2, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    slots, committed = ints(3, 0, 2, 5), [columns, 1, 0, max(1, columns // 2)]
    expected = continuation.clone()
    for b in range(4):
        if committed[b] > 0:
            expected[slots[b]] = hidden[b, committed[b] - 1]
    given = hidden.clone()
    OP(hidden=hidden, continuation=continuation, slots=slots, committed=ints(*committed))
    assert same_bytes(continuation, expected)
    assert same_bytes(hidden, given)


def test_nothing_committed(rng: torch.Generator) -> None:
    continuation = torch.randn(2, 6, generator=rng)
    before = continuation.clone()
    hidden = torch.randn(1, 4, 6, generator=rng)
    OP(hidden=hidden, continuation=continuation, slots=ints(1), committed=ints(0))
    assert same_bytes(continuation, before)


def test_registration(rng: torch.Generator) -> None:
    torch.library.opcheck(
        torch.ops.dflash_graph.stage_hidden.default,
        (torch.randn(2, 4, 6, generator=rng), torch.zeros(3, 6), ints(2, 0), ints(4, 0)),
    )


def test_contract() -> None:
    specs = {
        "hidden": spec_of(torch.empty(3, 8, 6, dtype=torch.bfloat16)),
        "continuation": spec_of(torch.empty(5, 6, dtype=torch.bfloat16)),
        "slots": spec_of(ints(0, 1, 2)),
        "committed": spec_of(ints(0, 1, 2)),
    }
    with pytest.raises(ShapeError, match=r"continuation: axis 1 .* must be 6 \(H .*\), got 7"):
        wide = spec_of(torch.empty(5, 7, dtype=torch.bfloat16))
        OP.infer(specs | {"continuation": wide}, {})
    assert OP.infer(specs, {}) == {}
    cost = OP.cost(specs, {})
    assert (cost.read_bytes, cost.write_bytes) == (2 * 18 + 24, 2 * 18)
