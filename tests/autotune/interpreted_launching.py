"""Checks of candidates in Triton's interpreter, on the CPU; see `test_launching.py`.

The interpreter multiplies the bit patterns of bfloat16 operands, so products are right in float32
and wrong in bfloat16: both are used.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_graph.autotune import find_tasks, launching
from dflash_graph.autotune.inputs import Inputs, cut_batch, cut_columns
from dflash_graph.autotune.launching import check, compute, oracle
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.ops import get_op
from dflash_graph.profiles import load_preset

torch.set_num_threads(1)


def tasks(dtype, preset="demo-dflash2"):
    found = load_preset(preset)
    pair = ModelPair(
        target_geometry_from_config(found["target"], "target"),
        draft_geometry_from_config(found["draft"], "draft"),
        dtype=dtype,
    )
    return find_tasks(pair, draft_tokens=2, max_batch=2)


CALLS = [(task, call) for task in tasks("float32") for call in task.calls]
PAGED = [(t, c) for t in tasks("float32", "demo-dflash") for c in t.calls if "paged" in c.op]


def one(op, dtype="float32"):
    return next((t, c) for t in tasks(dtype) for c in t.calls if c.op == op)


@pytest.mark.parametrize(("task", "call"), CALLS + PAGED, ids=lambda v: getattr(v, "label", ""))
def test_what_runs_now_is_right(task, call):
    """Inputs, oracle and cuts of every tuned op: a kernel that is right passes."""
    arguments = Inputs("cpu", 100).make(call, {})
    before = {n: v.clone() for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    expected = oracle(call, arguments)
    assert check(call, task.space, task.incumbent(None), arguments, expected) == ""
    for name, value in before.items():
        assert torch.equal(arguments[name], value), f"{name} was changed"


def test_a_wrong_product_is_found():
    task, call = one("linear_norm", "bfloat16")
    arguments = Inputs("cpu", 100).make(call, {})
    wrong = check(call, task.space, task.incumbent(None), arguments, oracle(call, arguments))
    assert wrong.startswith("linear_norm.n: worst error")


def test_a_wrong_id_is_found(monkeypatch):
    task, call = one("head_argmax")
    arguments = Inputs("cpu", 100).make(call, {})
    expected = oracle(call, arguments)

    def spoiled(*given):
        found = compute(*given)
        found["ids"][0, 0] = (found["ids"][0, 0] + 1) % call.sizes.public_vocab
        return found

    monkeypatch.setattr(launching, "compute", spoiled)
    wrong = check(call, task.space, task.incumbent(None), arguments, expected)
    assert wrong.startswith("head_argmax: scores of its ids")


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (2, "other bits in a second run"),
        (3, "other bits with 1 of 2 requests"),
        (4, "other bits with 1 of 3 columns"),
    ],
)
def test_bits_that_differ_are_found(when, said, monkeypatch):
    """The bits of one run are changed by less than any bound: the second, or one of a cut."""
    task, call = one("linear_norm")
    arguments = Inputs("cpu", 100).make(call, {})
    expected = oracle(call, arguments)
    runs = []

    def spoiled(*given):
        found = compute(*given)
        runs.append(1)
        if len(runs) == when:
            found["n"].view(-1)[0] = torch.nextafter(found["n"].view(-1)[0], torch.tensor(9.0))
        return found

    monkeypatch.setattr(launching, "compute", spoiled)
    wrong = check(call, task.space, task.incumbent(None), arguments, expected)
    assert wrong == f"linear_norm.n: {said}"


def test_another_order_of_sums_is_right_too_but_has_other_bits():
    """So that the comparison of bits above is of a kernel whose bits depend on its tiles."""
    task, call = one("linear_norm")
    held = task.incumbent(None)
    tiles = {**dict(held.tiles), "SPLIT": 3}
    other = dataclasses.replace(held, tiles=tuple(sorted(tiles.items())))
    arguments = Inputs("cpu", 100).make(call, {})
    assert check(call, task.space, other, arguments, oracle(call, arguments)) == ""
    assert not torch.equal(
        compute(call, held, arguments)["n"], compute(call, other, arguments)["n"]
    )


def test_state_is_updated_in_a_copy():
    task, call = one("gdn_commit")
    arguments = Inputs("cpu", 100).make(call, {})
    before = [state.clone() for state in arguments["states"]]
    found = compute(call, task.incumbent(None), arguments)
    for state, old, new in zip(arguments["states"], before, found["states"], strict=True):
        assert torch.equal(state, old) and not torch.equal(new, old)


def test_calls_share_weights_and_have_rows_of_their_own():
    _, call = one("linear_norm")
    inputs, weights = Inputs("cpu", 100), {}
    first, second = inputs.make(call, weights), inputs.make(call, weights)
    assert first["weight"] is second["weight"]
    assert not torch.equal(first["x"], second["x"])


@pytest.mark.parametrize(("task", "call"), CALLS, ids=lambda v: getattr(v, "label", ""))
def test_cuts_are_calls_of_the_op(task, call):
    arguments = Inputs("cpu", 100).make(call, {})
    op = get_op(call.op)
    cuts = [(cut_batch(call, arguments, 1), 1, call.sizes.W)]
    if task.space.prefix:
        cuts.append((cut_columns(call, arguments, 2), call.sizes.B, 2))
    for cut, batch, columns in cuts:
        symbols, _ = op.bind(launching.specs_of(cut), call.attributes, model_dtype=call.dtype)
        sizes = symbols.sizes()
        assert (sizes["B"], sizes["W"]) == (batch, columns)
