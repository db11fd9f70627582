"""Whole rounds of the triton lowering in Triton's interpreter, beside the references.

`test_interpreter.py` runs this file in a process of its own, since triton decides when it is
imported whether it interprets.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor

from dflash_graph.testing import Tolerance, assert_matches

DRAFTS = 3
PROMPTS = ([(7 * i + 3) % 97 for i in range(61)], [(7 * i + 3) % 97 for i in range(20)])
#: Float32 sums in another order, through every layer of target and draft.
ROUND = Tolerance(5e-4, 5e-4, 1e-4)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Everything alike, and integers equal; what is dead is NaN on both sides and left out."""
    assert found.keys() & expected.keys()
    for name in found.keys() & expected.keys():
        left, right = found[name], expected[name]
        if left.is_floating_point():
            dead = left.isnan() & right.isnan()
            left, right = left[~dead], right[~dead]
        assert_matches(left, right, ROUND, name)


class Trace:
    """Two rounds of two requests, in rows that are not their slots, and what they leave."""

    def __init__(self, bench: Any, target: Any, draft: Any, backend: str) -> None:
        made = bench(target, draft, backend, slots=2, columns=DRAFTS + 1)
        for slot, prompt in enumerate(PROMPTS):
            made.prefill(slot, prompt)
        self.stored: list[dict[str, Tensor]] = []
        self.results: list[dict[str, Tensor]] = []
        slots, frontiers, pending = [1, 0], [len(PROMPTS[1]), len(PROMPTS[0])], None
        for lives in ([DRAFTS, DRAFTS], [1, DRAFTS]):
            executor, stored = made.round(
                slots,
                [3, 5],
                frontiers,
                draft_tokens=DRAFTS,
                live_drafts=lives,
                pending=pending,
            )
            self.stored.append(stored)
            fields = executor.outputs.layout.fields
            self.results.append({name: executor.outputs[name].clone() for name in fields})
            committed = [1, lives[1] + 1]
            executor.finish(committed)
            frontiers = [f + n for f, n in zip(frontiers, committed, strict=True)]
            pending = committed
        self.state = {name: pool.clone() for name, pool in made.pools.tensors.items()}
        self.steps = [len(schedule.steps) for schedule in executor.compiled.schedules]


def test_this_process_interprets() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(
    ("target", "draft"),
    [("target_dense_2x", "dflash2_g16"), ("target_dense_3x", "dflash_mixed_w6")],
)
def test_rounds_are_those_of_the_references(
    bench: Any, golden: Any, target: str, draft: str
) -> None:
    folders = (golden(target)[0], golden(draft)[0])
    eager, triton = (Trace(bench, *folders, backend) for backend in ("eager", "triton"))
    assert all(few < many for few, many in zip(triton.steps, eager.steps, strict=True))
    # In the second round some columns are dead, and hold what each side left there.
    assert_same(triton.stored[0], eager.stored[0])
    for found, expected in zip(triton.results, eager.results, strict=True):
        assert found.keys() == expected.keys()
        assert_same(found, expected)
    assert triton.state.keys() == eager.state.keys()
    assert_same(triton.state, eager.state)
