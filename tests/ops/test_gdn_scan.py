from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_fold import OP as FOLD
from dflash_graph.ops.gdn_recurrence import OP as RECURRENCE
from dflash_graph.ops.gdn_scan import OP
from dflash_graph.testing import F32_REDUCTION, assert_matches, check_op, same_bytes

SLOTS = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "lives", "width"),
    [([3], [1], 1), ([4, 1, 2], [2, 0, 5], 5), ([2, 0, 3], [40, 9, 33], 40)],
)
def test_matches_formula(gdn, rng, dtype, slots, lives, width):
    arguments = gdn.case(rng, dtype, slots, lives, width, counted="live")
    oracle, before = gdn.formula(arguments), arguments["state"].clone()
    y = OP(**arguments)
    assert_matches(y, oracle["y"], F32_REDUCTION)
    for slot in range(SLOTS):
        if slot in slots and lives[slots.index(slot)]:
            assert_matches(arguments["state"][slot], oracle["state"][slot], F32_REDUCTION)
        else:
            assert same_bytes(arguments["state"][slot], before[slot])


def test_registration(gdn, rng):
    arguments = gdn.case(rng, torch.bfloat16, [0, 1, 2, 3, 4], [3] * 5, 3, counted="live")
    check_op(OP, arguments, {}, F32_REDUCTION, oracle=gdn.formula(arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_has_the_bits_of_recurrence_and_fold(gdn, rng, dtype):
    arguments = gdn.case(rng, dtype, [4, 1, 2], [13, 0, 8], 13, counted="live")
    folded = arguments["state"].clone()
    expected = RECURRENCE.reference(**arguments)
    rest = {n: v for n, v in arguments.items() if n not in ("q", "state", "live")}
    FOLD.reference(**rest, state=folded, committed=arguments["live"])
    assert same_bytes(OP.reference(**arguments), expected)
    assert same_bytes(arguments["state"], folded)


@pytest.mark.parametrize("cuts", [(1, 12), (5, 8), (4, 4, 5)])
def test_cut_anywhere(gdn, rng, cuts):
    whole = gdn.case(rng, torch.bfloat16, [3], [13], 13, counted="live")
    parts = {name: value.clone() for name, value in whole.items()}
    expected, found, start = OP.reference(**whole), [], 0
    for cut in cuts:
        block = {
            n: v[:, start : start + cut] if n in ("q", "k", "v", "beta", "g") else v
            for n, v in parts.items()
        }
        found.append(OP.reference(**{**block, "live": torch.tensor([cut], dtype=torch.int32)}))
        start += cut
    assert same_bytes(torch.cat(found, dim=1), expected)
    assert same_bytes(parts["state"], whole["state"])


def test_cost_and_contract(gdn, rng):
    arguments = gdn.case(rng, torch.bfloat16, [0, 1], [3, 3], 3, counted="live")
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost, without = OP.cost(specs, {}), RECURRENCE.cost(specs, {})
    assert (cost.read_bytes, cost.flops) == (without.read_bytes, without.flops)
    assert cost.write_bytes == without.write_bytes + 4 * 2 * 4 * 60
    with pytest.raises(ShapeError, match="Hk = 3 must divide Hv = 4"):
        OP(**{**arguments, **{n: torch.zeros(2, 3, 3, 10).bfloat16() for n in "qk"}})
