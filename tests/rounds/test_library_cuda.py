"""Prefill through torch's and fla-core's kernels on a CUDA device, against the references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph import demo
from dflash_graph.executors import Executor, compile_segments, new_arena
from dflash_graph.lowering import gdn_chunks, library
from dflash_graph.lowering.rules import RULES, Chunk
from dflash_graph.op import dtype_of, get_op
from dflash_graph.state import StatePools
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    Tolerance,
    assert_matches,
    poison_,
)

pytestmark = pytest.mark.gpu

#: Relative L2 error of float32 kernels over all layers.
LAYERS = 5e-4
#: In bfloat16 a chunk may be this much further from float32 than the references in bfloat16 are:
#: the scan's products and outputs are rounded, and these are exact.
ROUNDING = 2.0
#: Chunked products in bfloat16 with a float32 state: six roundings on the way of a value. A model
#: of them gives a relative L2 error of 4.7e-3, and 0.6% of the largest value for the worst one.
SCAN_L2, SCAN_WORST = 1e-2, 1.5e-2
SIZES = (45, 1, 2, 70, 13)


@pytest.fixture
def cuda_bench(bench: Any) -> Any:
    """A bench whose state, weights and arena are on the device, and whose chunks run there."""

    class CudaBench(bench):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weights = {use: self.weights[use].cuda() for use in self.weights}
            self.pools = StatePools(self.pools.plan, "cuda")
            for pool in self.pools.tensors.values():
                poison_(pool)
            for slot in range(self.capacities.slots):
                self.pools.reset_slot(slot)

        def _bind(self, key: Any, graphs: Sequence[Any]) -> Executor:
            if key not in self._executors:
                compiled = compile_segments(graphs, self.capacities)
                arena, pools = new_arena([compiled.plan], "cuda"), self.pools.tensors
                executor = Executor(compiled, arena, self.weights, pools, "eager")
                executor.segments = tuple(
                    library.bind(schedule, executor.tensors) for schedule in compiled.schedules
                )
                self._executors[key] = executor
            executor = self._executors[key]
            executor.poison()
            return executor

    return CudaBench


def prefilled(b: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """Prefill slot 1 in chunks of `SIZES`: hidden and features of all columns, and all state."""
    start, names = 0, ("prefill/final_norm", "context/join_features")
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    for size in SIZES:
        physical = 1 << (size - 1).bit_length()
        stored = b.prefill(1, ids[start : start + size], start, physical)
        start += size
        for name in names:
            kept[name].append(stored[name][:, :size].cpu())
    columns = {name: torch.cat(parts, 1) for name, parts in kept.items()}
    return columns | {name: pool.cpu() for name, pool in b.pools.tensors.items()}


def relative(found: Tensor, expected: Tensor, what: str) -> float:
    """Relative L2 error where something was written, which must be the same places."""
    written = ~expected.isnan()
    assert torch.equal(~found.isnan(), written), f"{what}: other places were written"
    expected = expected[written].double()
    error, norm = (found[written].double() - expected).norm(), expected.norm()
    return float(error / norm) if norm else float(error)


@pytest.mark.parametrize("which", ["dense_2x", "dense_3x", "demo"])
def test_prefill(
    which: str, golden: Any, bench: Any, cuda_bench: Any, rng: torch.Generator
) -> None:
    folders = {
        "dense_2x": (golden("target_dense_2x")[0], golden("dflash2_g16")[0]),
        "dense_3x": (golden("target_dense_3x")[0], golden("dflash_mixed_w6")[0]),
        "demo": (demo.target_directory(), demo.draft_directory("dflash2")),
    }[which]
    made = {
        (kind, dtype): make(*folders, "eager", slots=2, dtype=dtype)
        for kind, make in (("references", bench), ("kernels", cuda_bench))
        for dtype in ("float32", "bfloat16")
    }
    vocab = made["kernels", "float32"].pair.target.vocab
    ids = torch.randint(0, vocab, (sum(SIZES),), generator=rng).tolist()
    results = {key: prefilled(b, ids) for key, b in made.items()}
    for name, exact in results["references", "float32"].items():
        error = relative(results["kernels", "float32"][name], exact, name)
        assert error <= LAYERS, f"{name}: relative error {error:.3e} in float32"
        bound = ROUNDING * relative(results["references", "bfloat16"][name], exact, name)
        error = relative(results["kernels", "bfloat16"][name], exact, name)
        assert error <= bound, f"{name}: relative error {error:.3e} in bfloat16, bound {bound:.3e}"


def test_one_wait(golden: Any, cuda_bench: Any) -> None:
    """After the chunk's place is read, nothing waits for the device."""
    b = cuda_bench(
        golden("target_dense_2x")[0], golden("dflash2_g16")[0], "eager", dtype="bfloat16"
    )
    b.prefill(0, list(range(40)), 0, 64)  # tunes and compiles
    b.prefill(0, list(range(40)), 40, 64)
    (executor,) = b._executors.values()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for launch in executor.segments[0].launches:
                launch.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("live", [1, 64, 261])
@pytest.mark.parametrize("kernels", ["fla", "torch"])
def test_scan_of_27b(kernels: str, live: int, rng: torch.Generator) -> None:
    """One Gated DeltaNet layer of the 27B target; fla-core must be installed where this runs."""
    key_heads, heads, dim, columns = 16, 48, 128, 300
    made = {
        "q": torch.randn(1, columns, key_heads, dim, generator=rng),
        "k": torch.randn(1, columns, key_heads, dim, generator=rng),
        "v": torch.randn(1, columns, heads, dim, generator=rng),
    }
    gates = {
        "beta": torch.rand(1, columns, heads, generator=rng),
        # Heads that forget at once, and heads that hardly do.
        "g": -torch.rand(1, columns, heads, generator=rng)
        * torch.logspace(-3, 1, heads)[torch.randperm(heads, generator=rng)],
    }
    state = 0.1 * torch.randn(3, heads, dim, dim, generator=rng)
    given = {name: x.bfloat16().cuda() for name, x in made.items()}
    given |= {name: x.cuda() for name, x in gates.items()}
    wide = {name: x.double() for name, x in given.items()} | {"state": state.double().cuda()}
    place = {
        name: torch.tensor([n], dtype=torch.int32, device="cuda")
        for name, n in (("slots", 1), ("live", live))
    }
    oracle = get_op("gdn_scan").reference(**wide, **place)
    for x in given.values():
        poison_(x[:, live:])
    if kernels == "fla":
        assert gdn_chunks._fla() is not None, "install dflash-graph[cuda]"
    else:
        given = {name: x.float() for name, x in given.items()}
    mine = state.cuda()
    y = torch.full((1, columns, heads, dim), torch.nan, device="cuda")
    RULES["gdn_scan"](Chunk(live=live, slot=1), **given, state=mine, **place, y=y)
    assert not y[:, live:].any()
    assert torch.equal(mine[[0, 2]].cpu(), state[[0, 2]])
    for found, exact, what in (
        (y[:, :live], oracle[:, :live], "y"),
        (mine[1], wide["state"][1], "state"),
    ):
        if kernels == "torch":
            assert_matches(found, exact, F32_REDUCTION, what)
            continue
        error = found.double() - exact
        l2, worst = float(error.norm() / exact.norm()), float(error.abs().max() / exact.abs().max())
        assert l2 <= SCAN_L2, f"{what}: relative L2 error {l2:.3e}"
        assert worst <= SCAN_WORST, f"{what}: worst error is {worst:.3e} of the largest value"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", BF16_REDUCTION), ("float32", F32_REDUCTION)]
)
@pytest.mark.parametrize(("start", "live"), [(0, 300), (1000, 261), (1000, 1)])
def test_attention_of_27b(
    start: int, live: int, dtype: str, tolerance: Tolerance, rng: torch.Generator
) -> None:
    """Full attention of the 27B target; pages hold NaN wherever no live column may look."""
    columns, pages, page_size = 300, 32, 64
    q = torch.randn(1, columns, 24, 256, generator=rng)
    table = torch.randperm(pages, generator=rng)[None, : pages - 4].int()
    pools = [torch.full((pages, 4, page_size, 256), torch.nan) for _ in "kv"]
    position = torch.arange(start + live)
    where = (table[0].long()[position // page_size], slice(None), position % page_size)
    for pool in pools:
        pool[where] = torch.randn(start + live, 4, 256, generator=rng)
    q, k, v = (x.to("cuda", dtype_of(dtype)) for x in (q, *pools))
    call = {
        "page_table": table.cuda(),
        "start": torch.tensor([start], dtype=torch.int32, device="cuda"),
        "live": torch.tensor([live], dtype=torch.int32, device="cuda"),
    }
    oracle = get_op("paged_attention").reference(
        q.double(), torch.nan_to_num(k.double()), torch.nan_to_num(v.double()), **call
    )
    poison_(q[:, live:])
    o = torch.full((1, columns, 24 * 256), torch.nan, device="cuda", dtype=dtype_of(dtype))
    RULES["paged_attention"](Chunk(start, live, 0), q, k, v, **call, o=o)
    assert not o[:, live:].any()
    assert_matches(o[:, :live], oracle[:, :live], tolerance)


def test_products_of_27b(rng: torch.Generator) -> None:
    """The widest sums of the 27B target, and the product that is not rounded."""
    chunk, columns = Chunk(live=201), 256
    for name, width, rows in (("linear", 17408, 5120), ("context_kv", 5120, 2048)):
        x = torch.randn(1, columns, width, generator=rng).bfloat16().cuda()
        weight = (torch.randn(rows, width, generator=rng) * width**-0.5).bfloat16().cuda()
        if name == "linear":
            call: dict[str, Any] = {"x": x, "weight": weight, "tiled": False}
            outputs = {"y": torch.empty(1, columns, rows, device="cuda", dtype=torch.bfloat16)}
        else:
            angle = torch.rand(1, columns, 64, generator=rng).cuda()
            norm = torch.rand(128, generator=rng).bfloat16().cuda()
            call = {"c": x, "weight": weight, "k_norm": norm}
            call |= {"cos": angle.cos(), "sin": angle.sin(), "kv_heads": 8, "head_dim": 128}
            call |= {"rotary_half": 64, "eps": 1e-6, "tiled": False}
            made = torch.empty(2, 1, columns, 8, 128, device="cuda", dtype=torch.bfloat16)
            outputs = dict(zip("kv", made, strict=True))
        wide = {n: v.double() if isinstance(v, Tensor) else v for n, v in call.items()}
        results = get_op(name).reference(**wide)
        results = results if isinstance(results, tuple) else (results,)
        with library._full_sums():
            RULES[name](chunk, **call, **outputs)
        for found, oracle in zip(outputs.values(), results, strict=True):
            assert_matches(found[:, :201], oracle[:, :201], BF16_REDUCTION, name)
