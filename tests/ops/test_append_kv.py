from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.append_kv import OP
from dflash_graph.testing import EXACT, check_op, poison_, same_bytes

PAGES, HEADS, PAGE_SIZE, DIM = 11, 2, 4, 6


def case(rng, dtype, starts, lives, width):
    batch = len(starts)
    table = torch.full((batch, 5), -1, dtype=torch.int32)
    order = torch.randperm(PAGES, generator=rng, dtype=torch.int32).tolist()
    for b, (start, live) in enumerate(zip(starts, lives, strict=True)):
        for page in range(start // PAGE_SIZE, -(-(start + live) // PAGE_SIZE)):
            table[b, page] = order.pop()

    def random(*shape):
        return torch.randn(shape, generator=rng).to(dtype)

    return {
        "k": random(batch, width, HEADS, DIM),
        "v": random(batch, width, HEADS, DIM),
        "k_pages": random(PAGES, HEADS, PAGE_SIZE, DIM),
        "v_pages": random(PAGES, HEADS, PAGE_SIZE, DIM),
        "page_table": table,
        "start": torch.tensor(starts, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }


def stored(arguments):
    """Both pools after one assignment per column."""
    pools = {name: arguments[f"{name}_pages"].clone() for name in "kv"}
    for b, (start, live) in enumerate(
        zip(arguments["start"].tolist(), arguments["live"].tolist(), strict=True)
    ):
        for i in range(live):
            page = int(arguments["page_table"][b, (start + i) // PAGE_SIZE])
            for name, pool in pools.items():
                pool[page, :, (start + i) % PAGE_SIZE] = arguments[name][b, i]
    return {f"{name}_pages": pool for name, pool in pools.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("starts", "lives", "width"),
    [([7], [1], 1), ([0], [8], 8), ([3, 0, 8], [5, 0, 3], 5), ([2, 4, 0], [16, 1, 7], 16)],
)
def test_places(rng, dtype, starts, lives, width):
    arguments = case(rng, dtype, starts, lives, width)
    opcheck = width == 5
    check_op(OP, arguments, {}, EXACT, oracle=stored(arguments), opcheck=opcheck)


def test_touches_no_other_byte(rng):
    arguments = case(rng, torch.bfloat16, [3, 0, 8], [5, 0, 3], 5)
    for name in ("k_pages", "v_pages"):
        poison_(arguments[name])
    for name in ("k", "v"):
        poison_(arguments[name][1])
        poison_(arguments[name][2, 3:])
    expected = stored(arguments)
    OP(**arguments)
    for name, pool in expected.items():
        assert same_bytes(arguments[name], pool)
        assert int(pool.isfinite().all(-1).sum()) == 8 * HEADS


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [2, 2], [5, 5], 5)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {}, context=6)  # positions 6..10: pages 1 and 2
    block = 2 * 5 * HEADS * DIM
    assert cost.read_bytes == 2 * 2 * block + 4 * (2 * 2 + 4)
    assert (cost.write_bytes, cost.flops) == (2 * 2 * block, 0)
    with pytest.raises(ShapeError, match=r"axis 3 of v_pages must be 6 \(D from axis 3 of k\)"):
        OP(**{**arguments, "v_pages": torch.zeros(PAGES, 2, 4, 5, dtype=torch.bfloat16)})
