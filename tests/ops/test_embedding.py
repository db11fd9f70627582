from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.embedding import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    EXACT,
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
    same_bytes,
)

VOCAB, HIDDEN = 37, 24


def case(rng, dtype, batch=3, width=8):
    return {
        "ids": torch.randint(VOCAB, (batch, width), generator=rng, dtype=torch.int32),
        "table": torch.randn(VOCAB, HIDDEN, generator=rng).to(dtype),
    }


@pytest.mark.parametrize("shape", [(1, 1), (3, 16)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_scaled_rows(rng, dtype, tolerance, shape):
    arguments = case(rng, dtype, *shape)
    arguments["ids"][0, 0] = VOCAB - 1
    ids, table = arguments["ids"].tolist(), arguments["table"].double()
    oracle = {"x": torch.stack([torch.stack([0.7 * table[i] for i in row]) for row in ids])}
    check_op(OP, arguments, {"scale": 0.7}, tolerance, oracle=oracle, opcheck=shape == (3, 16))


def test_scale_one_copies_bytes(rng):
    arguments = case(rng, torch.bfloat16)
    arguments["table"][3, 0] = -0.0
    arguments["ids"][1, 2] = 3
    found = check_op(OP, arguments, {"scale": 1.0}, EXACT)
    assert same_bytes(found["x"][1, 2], arguments["table"][3])


def test_row_invariant_and_traceable(rng):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = case(rng, dtype)
        assert_row_invariant(OP, arguments, {"scale": 1.7}, ["ids"])
    assert_traceable(OP, arguments, {"scale": 1.7})


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 5)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {"scale": 1.0})
    assert (cost.read_bytes, cost.write_bytes) == (4 * 10 + 2 * 240, 2 * 240)
    with pytest.raises(ShapeError, match="expected dtype int32, got int64"):
        OP(ids=arguments["ids"].long(), table=arguments["table"], scale=1.0)
