"""Sampled acceptance at the vocabulary of the 27B preset, on a device, against the reference there.

The reference in float32, not in float64: a law's one rounding is part of the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels import kernel_case
from dflash_graph.op import Op, spec_of
from dflash_graph.ops import get_op
from dflash_graph.testing import poison_, same_bytes

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Tensor]]
ONE_HOT, SPARSE = get_op("accept_one_hot"), get_op("accept_sparse")
VOCAB, PUBLIC = 248320, 248077
#: (temperature, top_k, top_p, min_p, presence, frequency) of a row.
ROWS = (
    (1.0, 0, 1.0, 0.0, 0.0, 0.0),
    (0.6, 20, 0.95, 0.0, 0.0, 0.0),
    (0.0, 0, 1.0, 0.0, 1.5, 0.0),
    (0.7, 0, 0.8, 0.0, 1.5, 0.1),
    (5.0, 0, 0.999, 0.0, 0.0, 0.0),
    (1.0, 4000, 1.0, 0.05, 0.0, 0.0),
    (1000.0, 0, 1.0, 0.0, 0.0, 0.2),
    (1.3, 100_000, 0.5, 0.0, -0.5, 0.0),
)


def integers(rng: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=rng).to(torch.int32)


def round_case(rng: torch.Generator, columns: int, *, tied: bool) -> dict[str, Tensor]:
    """A row of every kind; drafts that are often accepted; poison where nothing may look."""
    batch = len(ROWS)
    scores = torch.randn(batch, columns, VOCAB, generator=rng) * 2.5
    scores[..., :40] += 9.0
    if tied:
        scores = scores.round()
    live = integers(rng, max(columns - 2, 0), columns, batch)
    dead = torch.arange(columns) > live.unsqueeze(1)
    # A draft by a Gumbel maximum: it has the law of a sample.
    noise = -torch.log(-torch.log(torch.rand(batch, columns, PUBLIC, generator=rng)))
    drafts = (scores[..., :PUBLIC] + noise).argmax(-1)
    ids = torch.cat((torch.full((batch, 1), -7), drafts[:, :-1]), 1).to(torch.int32)
    ids[dead] = -(2**30)
    scores[dead] = torch.nan
    scores[..., PUBLIC:] = torch.nan
    counts = torch.full((batch + 1, VOCAB), -(2**30), dtype=torch.int32)
    slots = torch.randperm(batch + 1, generator=rng)[:batch].to(torch.int32)
    counts[slots.long(), :PUBLIC] = integers(rng, 0, 40, batch, PUBLIC).sub(36).clamp(min=0)
    controls = torch.tensor(ROWS)
    case = {
        "ids": ids,
        "scores": scores,
        "counts": counts,
        "slots": slots,
        "live_drafts": live,
        "frontier": integers(rng, 0, 40_000, batch),
        "temperature": controls[:, 0],
        "top_p": controls[:, 2],
        "min_p": controls[:, 3],
        "presence": controls[:, 4],
        "frequency": controls[:, 5],
        "top_k": controls[:, 1].to(torch.int32),
        "seed": integers(rng, -(2**31), 2**31 - 1, batch, 2),
    }
    return {name: value.contiguous().cuda() for name, value in case.items()}


def with_laws(rng: torch.Generator, case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arguments of accept_sparse: each draft among 16 candidates with probabilities."""
    batch, columns = case["ids"].shape
    dead = torch.arange(columns - 1) >= case["live_drafts"].cpu().unsqueeze(1)
    drafts = case["ids"][:, 1:].cpu().masked_fill(dead, 0)
    candidates = torch.arange(16).expand(batch, columns - 1, 16).contiguous() * 3
    known = (candidates == drafts.unsqueeze(2)).any(-1)
    candidates[..., 7] = torch.where(known, candidates[..., 7], drafts)
    q = torch.rand(batch, columns - 1, 16, generator=rng) * 0.02
    q[..., 7] = 0.3
    candidates[dead], q[dead] = -(2**30), torch.nan
    law = {"candidates": candidates.to(torch.int32).cuda(), "draft_probs": q.cuda()}
    return {"ids": case["ids"], **law, **{n: v for n, v in case.items() if n != "ids"}}


def compare(run: Run, op: Op, case: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> None:
    found = run(op, case, attributes)
    for name, value in zip(op.outputs, op.reference(**case, **attributes), strict=True):
        assert torch.equal(found[name], value), f"{name}: {found[name]} is not {value}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("columns", [1, 8, 16])
def test_accept_one_hot(rng: torch.Generator, run: Run, columns: int, tied: bool) -> None:
    case = round_case(rng, columns, tied=tied)
    for purpose in (0, 1):
        compare(run, ONE_HOT, case, {"public_vocab": PUBLIC, "purpose": purpose})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("columns", [2, 8, 16])
def test_accept_sparse(rng: torch.Generator, run: Run, columns: int, tied: bool) -> None:
    case = with_laws(rng, round_case(rng, columns, tied=tied))
    compare(run, SPARSE, case, {"public_vocab": PUBLIC})


def test_one_score_for_all(rng: torch.Generator, run: Run) -> None:
    """Rank order is the order of ids: a search goes down to single ids."""
    case = round_case(rng, 2, tied=False)
    case["scores"] = torch.full_like(case["scores"], 3.5)
    compare(run, ONE_HOT, case, {"public_vocab": PUBLIC, "purpose": 1})


def test_rows_that_are_not_finite(rng: torch.Generator, run: Run) -> None:
    case = round_case(rng, 4, tied=False)
    case["live_drafts"].fill_(3)
    case["ids"].clamp_(min=0)
    case["scores"] = case["scores"].nan_to_num()
    case["scores"][::2, 0, 1000] = torch.nan
    case["scores"][1::4, 0] = -torch.inf
    attributes = {"public_vocab": PUBLIC, "purpose": 1}
    found = run(ONE_HOT, case, attributes)
    expected = dict(zip(ONE_HOT.outputs, ONE_HOT.reference(**case, **attributes), strict=True))
    ends = expected["finite"] == 0
    assert int(ends.sum()) == 6
    for name in ("accepted", "licensed", "finite"):
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["outputs"][~ends], expected["outputs"][~ends])
    assert bool(((found["outputs"][ends, 0] >= 0) & (found["outputs"][ends, 0] < PUBLIC)).all())


@pytest.mark.parametrize("op", [ONE_HOT, SPARSE], ids=lambda op: op.name)
def test_choices_do_not_depend_on_company(rng: torch.Generator, run: Run, op: Op) -> None:
    case = round_case(rng, 8, tied=False)
    attributes: dict[str, Any] = {"public_vocab": PUBLIC}
    if op is SPARSE:
        case = with_laws(rng, case)
    else:
        attributes["purpose"] = 1
    whole = run(op, case, attributes)
    turned = {n: v if n == "counts" else v.flip(0) for n, v in case.items()}
    for name, found in run(op, turned, attributes).items():
        assert same_bytes(found.flip(0), whole[name]), name
    for b in range(len(ROWS)):
        kept = int(case["live_drafts"][b]) + 1
        alone = {n: v if n == "counts" else v[b : b + 1] for n, v in case.items()}
        alone |= {n: alone[n][:, :kept] for n in ("ids", "scores")}
        if op is SPARSE:
            alone |= {n: alone[n][:, : kept - 1] for n in ("candidates", "draft_probs")}
        alone = {n: v.contiguous() for n, v in alone.items()}
        for name, found in run(op, alone, attributes).items():
            same = whole[name][b : b + 1]
            assert same_bytes(found, same[:, :kept] if name == "outputs" else same), name


def test_captured(rng: torch.Generator, run: Run, tmp_path: Path) -> None:
    """A graph replayed with other data chooses as a launch does: nothing is read on the host."""
    first, second = (with_laws(rng, round_case(rng, 8, tied=False)) for _ in range(2))
    attributes = {"public_vocab": PUBLIC}
    expected = run(SPARSE, second, attributes)
    specs = {name: spec_of(value) for name, value in first.items()}
    case = kernel_case(SPARSE.name, specs, attributes)
    assert case is not None
    module = case.module(tmp_path)
    workspace = torch.empty(case.workspace, dtype=torch.uint8, device="cuda")
    outputs = {name: poison_(torch.empty_like(value)) for name, value in expected.items()}

    def launch() -> None:
        module.launch(
            **first,
            **outputs,
            workspace=workspace,
            num_warps=case.num_warps,
            num_stages=case.num_stages,
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for name, value in second.items():
        first[name].copy_(value)
    for value in (workspace, *outputs.values()):
        poison_(value)
    graph.replay()
    torch.cuda.synchronize()
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name
