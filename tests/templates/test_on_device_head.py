"""Kernels of the output head at the shapes of the 27B preset, on a device: formula and bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_graph.head import lowest_argmax, stable_topk
from dflash_graph.kernels import ROW_BUCKETS, row_bucket
from dflash_graph.ops import get_op
from dflash_graph.testing import (
    F32_REDUCTION,
    TENSOR_CORE_REDUCTION,
    assert_matches,
    same_bytes,
)

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Tensor]]
SCORES, ARGMAX, TOPK = (get_op(name) for name in ("head_scores", "head_argmax", "head_topk"))
VOCAB, PUBLIC, HIDDEN = 248320, 248077, 5120
PLAIN = {"multiplier": 1.0, "softcap": 0.0}
LAWS = (PLAIN, {"multiplier": 0.4, "softcap": 1.5})


def head_case(rng: torch.Generator, batch: int, columns: int) -> dict[str, Tensor]:
    """Rows of the head that recur in other tiles, so that the greatest scores are ties; rows that
    are not public are NaN.
    """
    device = torch.Generator("cuda").manual_seed(
        int(torch.randint(2**31, (), generator=rng).item())
    )
    weight = torch.randn(VOCAB, HIDDEN, generator=device, device="cuda", dtype=torch.bfloat16)
    weight *= HIDDEN**-0.5
    weight[PUBLIC - 60_000 : PUBLIC] = weight[:60_000]
    weight[PUBLIC:] = torch.nan
    x = torch.randn(batch, columns, HIDDEN, generator=rng).bfloat16().cuda()
    return {"x": x, "weight": weight}


def selections(
    run: Run, case: dict[str, Tensor], law: dict[str, float], skip: int, **changes: object
) -> dict[str, Tensor]:
    """Outputs of head_argmax and head_topk by name."""
    given = {**law, "skip": skip, "public_vocab": PUBLIC}
    best = run(ARGMAX, case, given, **changes)
    first = run(TOPK, case, given | {"top_k": 16}, **changes)
    return {f"best.{n}": v for n, v in best.items()} | {f"first.{n}": v for n, v in first.items()}


@pytest.mark.parametrize("law", LAWS, ids=["plain", "capped"])
def test_head(rng: torch.Generator, run: Run, law: dict[str, float]) -> None:
    """Scores against float64; selections are exactly those from the scores."""
    case = head_case(rng, 8, 16)
    scores = run(SCORES, case, {**law, "tiled": True})["scores"][..., :PUBLIC]
    for start in range(0, PUBLIC, 32768):
        part = case["weight"][start : min(start + 32768, PUBLIC)].double()
        oracle = law["multiplier"] * (case["x"].double() @ part.t())
        if law["softcap"]:
            oracle = law["softcap"] * torch.tanh(oracle / law["softcap"])
        found = scores[..., start : start + 32768]
        assert_matches(found, oracle, TENSOR_CORE_REDUCTION, f"scores from {start}")
    for skip in (0, 1):
        kept = scores[:, skip:]
        found = selections(run, case, law, skip)
        best, first = lowest_argmax(kept), stable_topk(kept, 16)
        assert torch.equal(found["best.ids"].long(), best)
        assert same_bytes(found["best.scores"], kept.gather(-1, best.unsqueeze(-1)).squeeze(-1))
        assert torch.equal(found["first.ids"].long(), first)
        assert same_bytes(found["first.scores"], kept.gather(-1, first))


def test_bits_do_not_depend_on_company(rng: torch.Generator, run: Run) -> None:
    case = head_case(rng, 1, 128)
    given = {**PLAIN, "tiled": True}
    whole = run(SCORES, case, given)["scores"][..., :PUBLIC]
    chosen = selections(run, case, PLAIN, 0)
    for rows in (1, 8, 15, 16, 17, 32, 56, 64, 120):
        cut = case | {"x": case["x"][:, :rows].contiguous()}
        for bucket in (b for b in ROW_BUCKETS if b >= row_bucket(rows)):
            holes = {"BLOCK_R": bucket}
            found = run(SCORES, cut, given, holes=holes)["scores"][..., :PUBLIC]
            assert same_bytes(found, whole[:, :rows]), f"{rows} rows in tiles of {bucket}"
            for name, value in selections(run, cut, PLAIN, 0, holes=holes).items():
                assert same_bytes(value, chosen[name][:, :rows]), f"{name}: {rows} in {bucket}"
    for row in (0, 77, 127):
        alone = case | {"x": case["x"][:, row : row + 1].contiguous()}
        for name, value in selections(run, alone, PLAIN, 0).items():
            assert same_bytes(value, chosen[name][:, row : row + 1]), f"{name}: row {row} alone"
    turned = case | {"x": case["x"].flip(1)}
    for name, value in selections(run, turned, PLAIN, 0).items():
        assert same_bytes(value.flip(1), chosen[name]), f"{name}: rows in reverse"
    blocks = case | {"x": case["x"].view(8, 16, HIDDEN)}
    for name, value in selections(run, blocks, PLAIN, 1).items():
        expected = chosen[name].view(8, 16, *chosen[name].shape[2:])[:, 1:]
        assert same_bytes(value, expected), f"{name}: 8 requests, the anchors left out"


def test_a_row_that_is_not_finite(rng: torch.Generator, run: Run) -> None:
    case = head_case(rng, 1, 8)
    clean = selections(run, case, PLAIN, 0)
    case["x"][0, 3] = torch.nan
    for name, value in selections(run, case, PLAIN, 0).items():
        for rows in (slice(0, 3), slice(4, 8)):
            assert same_bytes(value[:, rows], clean[name][:, rows]), name
        if value.is_floating_point():
            assert bool(value[0, 3].isnan().all())
        else:
            assert bool(((value[0, 3] >= 0) & (value[0, 3] < PUBLIC)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 1), (300, 257), (2048, 256)])
@pytest.mark.parametrize("rows", [3, 16, 100])
def test_odd_widths(
    rng: torch.Generator,
    run: Run,
    check: Run,
    dtype: torch.dtype,
    vocab: int,
    hidden: int,
    rows: int,
) -> None:
    case = {
        "x": torch.randn(1, rows, hidden, generator=rng).to(dtype).cuda(),
        "weight": (torch.randn(vocab, hidden, generator=rng) * hidden**-0.5).to(dtype).cuda(),
    }
    public = max(1, vocab - 43)
    tolerance = F32_REDUCTION if dtype is torch.float32 else TENSOR_CORE_REDUCTION
    scores = check(SCORES, case, {**PLAIN, "tiled": True}, tolerance)["scores"][..., :public]
    given = {**PLAIN, "skip": 0, "public_vocab": public}
    assert torch.equal(run(ARGMAX, case, given)["ids"].long(), lowest_argmax(scores))
    count = min(16, public)
    first = run(TOPK, case, given | {"top_k": count})
    assert torch.equal(first["ids"].long(), stable_topk(scores, count))
    assert same_bytes(first["scores"], scores.gather(-1, first["ids"].long()))
