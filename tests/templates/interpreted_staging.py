"""Kernels that move rows, in Triton's interpreter: exact copies, and nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.kernels import kernel_case
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.testing import EXACT, F32_ELEMENTWISE, INTEGER_POISON, same_bytes

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 16, 24, 130]


def normal(rng, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=rng).to(dtype)


def whole(rng, high, *shape):
    return torch.randint(high, shape, generator=rng, dtype=torch.int32)


def slots_of(rng, batch, capacity):
    return torch.randperm(capacity, generator=rng)[:batch].to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_embedding(rng, check, dtype, width):
    case = {"ids": whole(rng, 40, 2, 3), "table": normal(rng, 40, width, dtype=dtype)}
    case["ids"][0, 0], case["ids"][0, 1] = 0, 39
    check(get_op("embedding"), case, {"scale": 1.0}, EXACT)


def test_embedding_scales(rng, check):
    case = {"ids": whole(rng, 40, 2, 3), "table": normal(rng, 40, 24)}
    check(get_op("embedding"), case, {"scale": 5120**0.5}, F32_ELEMENTWISE)


def test_ids_and_slots_outside_their_tables(rng, run):
    """Such an id reads some row of the table; such a slot is written nowhere."""
    table, wild = normal(rng, 40, 24), torch.tensor([[-1, 40, INTEGER_POISON, 2**31 - 1]])
    case = {"ids": wild.to(torch.int32), "table": table}
    found = run(get_op("embedding"), case, {"scale": 1.0})["x"]
    assert torch.equal(found[0], table[[0, 39, 0, 39]])
    slots = torch.tensor([-1, 7], dtype=torch.int32)
    state = normal(rng, 3, 24)
    found = run(get_op("slot_hidden"), {"continuation": state, "slots": slots}, {})["hidden"]
    assert torch.equal(found[:, 0], state[[0, 2]])
    case = {
        "hidden": normal(rng, 2, 3, 24),
        "continuation": state,
        "slots": slots,
        "committed": torch.tensor([2, 1], dtype=torch.int32),
    }
    assert same_bytes(run(get_op("stage_hidden"), case, {})["continuation"], state)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("columns", [1, 2, 8, 16, 17])
def test_block_ids(rng, check, batch, columns):
    attributes = {"columns": columns, "mask_token_id": 248319}
    check(get_op("block_ids"), {"anchor": whole(rng, 40, batch)}, attributes, EXACT)


@pytest.mark.parametrize("drafts", [1, 7, 15, 16])
def test_verify_ids(rng, check, drafts):
    live = torch.tensor([0, 1, drafts, whole(rng, drafts + 1, 1)[0]], dtype=torch.int32)
    case = {"anchor": whole(rng, 40, 4), "drafts": whole(rng, 40, 4, drafts), "live_drafts": live}
    check(get_op("verify_ids"), case, {}, EXACT)


@pytest.mark.parametrize(
    ("half", "theta", "sections"),
    [(1, 1e4, ()), (20, 5e6 / 3, ()), (64, 1e7, ()), (32, 1e7, (11, 11, 10)), (8, 1e4, (3, 3, 2))],
)
def test_rotary_table(rng, check, half, theta, sections):
    """Every quadrant, of both signs, up to positions past any context."""
    positions = whole(rng, 2**20, 3 if sections else 1, 2, 9)
    positions[:, 0] = torch.arange(-4, 5)
    attributes = {"rotary_half": half, "theta": theta, "sections": sections}
    check(get_op("rotary_table"), {"positions": positions}, attributes, F32_ELEMENTWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_slot_rows(rng, check, dtype, width):
    slots = slots_of(rng, 3, 5)
    case = {"pending": normal(rng, 5, 4, width, dtype=dtype), "slots": slots}
    check(get_op("pending_features"), case, {}, EXACT)
    case = {"continuation": normal(rng, 5, width, dtype=dtype), "slots": slots}
    check(get_op("slot_hidden"), case, {}, EXACT)


def feature_case(rng, dtype, blocks, width):
    """Three requests that commit nothing, some and all of four columns; the rest is not finite."""
    features = [normal(rng, 3, 4, width, dtype=dtype) for _ in range(blocks)]
    committed = torch.tensor([0, int(whole(rng, 3, 1)) + 1, 4], dtype=torch.int32)
    pending = normal(rng, 5, 4, blocks * width, dtype=dtype)
    for feature in features:
        for row, count in enumerate(committed.tolist()):
            feature[row, count:] = torch.nan
    slots = slots_of(rng, 3, 5)
    return {"features": features, "pending": pending, "slots": slots, "committed": committed}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("blocks", [1, 5])
def test_features(rng, check, dtype, width, blocks):
    case = feature_case(rng, dtype, blocks, width)
    check(get_op("stage_features"), case, {"blocks": blocks}, EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_stage_hidden(rng, check, dtype, width):
    features = feature_case(rng, dtype, 1, width)
    case = {
        "hidden": features["features"][0],
        "continuation": normal(rng, 5, width, dtype=dtype),
        "slots": features["slots"],
        "committed": features["committed"],
    }
    check(get_op("stage_hidden"), case, {}, EXACT)


@pytest.mark.parametrize("width", [1, 8, 16, 17])
def test_count_tokens(rng, check, width):
    """Ids repeat; what is not committed is no id at all."""
    committed = torch.tensor([0, 1, width], dtype=torch.int32)
    outputs = whole(rng, 3, 3, width)
    column = torch.arange(width)
    outputs[column >= committed.unsqueeze(1)] = INTEGER_POISON
    case = {
        "outputs": outputs,
        "counts": whole(rng, 9, 5, 40),
        "slots": slots_of(rng, 3, 5),
        "committed": committed,
    }
    check(get_op("count_tokens"), case, {}, EXACT)


def test_count_tokens_leaves_ids_outside_the_vocabulary(rng, run):
    case = {
        "outputs": torch.tensor([[-1, 40, 2, 2]], dtype=torch.int32),
        "counts": whole(rng, 9, 2, 40),
        "slots": torch.tensor([1], dtype=torch.int32),
        "committed": torch.tensor([4], dtype=torch.int32),
    }
    expected = case["counts"].clone()
    expected[1, 2] += 2
    assert same_bytes(run(get_op("count_tokens"), case, {})["counts"], expected)


def test_theta_is_a_hole_and_scale_is_data(rng):
    """Theta to the last bit."""
    positions = {"positions": spec_of(whole(rng, 9, 1, 1, 2))}
    cases = {
        kernel_case("rotary_table", positions, {"rotary_half": 8, "theta": t, "sections": ()})
        for t in (1e7, math.nextafter(1e7, 2e7))
    }
    assert len(cases) == 2
    specs = {"ids": spec_of(whole(rng, 9, 1, 2)), "table": spec_of(normal(rng, 9, 24))}
    assert len({kernel_case("embedding", specs, {"scale": s}) for s in (1.0, 2.0)}) == 1
