"""Rounds driven by hand: executors without the engine, every stored value visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.checkpoint import Checkpoint, draft_layout, target_layout
from dflash_graph.executors import Executor, RoundExecutor, compile_segments, new_arena
from dflash_graph.geometry import read_draft_geometry, read_target_geometry
from dflash_graph.graph import Backend
from dflash_graph.models.pair import PAGE_SIZE, ModelPair
from dflash_graph.models.round import declare_prefill, declare_round, declare_state
from dflash_graph.rounds import weight_uses
from dflash_graph.state import Capacities, StatePools, plan_state
from dflash_graph.testing import poison_
from dflash_graph.weights import WeightStore

GOLDEN = Path(__file__).parents[1] / "golden"


class Bench:
    """State for `slots` requests of one pair, and executors made on demand; the arena is poisoned
    before each run.

    Request `b` has slot `b` and every page of its own from the start, in an order that is not
    ascending.
    """

    def __init__(
        self,
        target_dir: Path,
        draft_dir: Path | None,
        backend: Backend,
        *,
        slots: int = 1,
        context: int = 256,
        columns: int = 16,
        causality: Literal["none", "sliding"] = "none",
        dtype: str = "float32",
        device: str = "cpu",
        captured: bool = False,
    ) -> None:
        target = read_target_geometry(target_dir)
        draft = read_draft_geometry(draft_dir) if draft_dir else None
        self.pair = ModelPair(target, draft, dtype, draft_causality=causality)
        self.backend: Backend = backend
        self.capacities = Capacities(slots, context)
        checkpoints = {"target": Checkpoint.open(target_dir, target_layout(target))}
        if draft is not None and draft_dir is not None:
            checkpoints["draft"] = Checkpoint.open(draft_dir, draft_layout(draft))
        self.device, self.captured = device, captured
        self.weights = WeightStore.load(checkpoints, weight_uses(self.pair, backend), device)
        self.columns = columns
        plan = plan_state(declare_state(self.pair, columns), self.capacities)
        self.pools = StatePools(plan, device)
        for pool in self.pools.tensors.values():
            poison_(pool)  # whatever is read must have been written
        for slot in range(slots):
            self.pools.reset_slot(slot)
        per_request = self.capacities.request_pages
        order = list(reversed(range(slots * per_request)))
        self.tables = [order[b::slots] for b in range(slots)]
        self._executors: dict[Any, Executor] = {}

    def _bind(self, key: Any, graphs: Sequence[Any]) -> Executor:
        if key not in self._executors:
            compiled = compile_segments(graphs, self.capacities)
            kind = RoundExecutor if len(graphs) == 2 else Executor
            arena = new_arena([compiled.plan], self.device)
            is_prefill = graphs[0].key.segment == "prefill"
            self._executors[key] = kind(
                compiled,
                arena,
                self.weights,
                self.pools.tensors,
                "eager" if is_prefill and self.backend == "triton" else self.backend,
            )
        executor = self._executors[key]
        executor.poison()
        return executor

    def prefill(
        self, slot: int, ids: Sequence[int], start: int = 0, physical: int | None = None
    ) -> dict[str, Tensor]:
        """Process a chunk; returns every stored value by name."""
        tokens = physical or len(ids)
        reference: Backend = "eager" if self.backend == "triton" else self.backend
        graph = declare_prefill(self.pair, reference, tokens=tokens)
        executor = self._bind(("prefill", tokens), [graph])
        positions = list(range(start, start + tokens))
        fields: dict[str, Any] = {
            "ids": [[*ids, *[0] * (tokens - len(ids))]],
            "positions": [[positions]] * 3,
            "slots": [slot],
            "page_table": [self.tables[slot]],
            "frontier": [start],
            "live_columns": [len(ids)],
            "context_positions": [[positions]],
        }
        return self._run(executor, 0, fields)

    def round(
        self,
        slots: Sequence[int],
        anchors: Sequence[int],
        frontiers: Sequence[int],
        *,
        draft_tokens: int,
        drafts: Sequence[Sequence[int]] | None = None,
        live_drafts: Sequence[int] | None = None,
        pending: Sequence[int] | None = None,
        scores: bool = True,
        live_block: int | None = None,
    ) -> tuple[RoundExecutor, dict[str, Tensor]]:
        """Run a forward segment; returns its executor (for `finish`) and every stored value by
        name.
        """
        batch, columns = len(slots), draft_tokens + 1
        given = drafts is not None and draft_tokens > 0
        key = ("round", batch, draft_tokens, given, scores)
        declared = declare_round(
            self.pair,
            self.backend,
            draft_tokens=draft_tokens,
            batch=batch,
            given_drafts=given,
            scores=scores,
        )
        executor = self._bind(key, declared.segments)
        assert isinstance(executor, RoundExecutor)
        live = list(live_drafts or [draft_tokens] * batch)
        waiting = list(pending or [0] * batch)
        ahead = [[f + i for i in range(columns)] for f in frontiers]
        behind = [
            [f - p + i for i in range(columns)] for f, p in zip(frontiers, waiting, strict=True)
        ]
        whole = self.pair.draft is not None and self.pair.draft.kind == "dflash2"
        fields: dict[str, Any] = {
            "slots": list(slots),
            "page_table": [self.tables[slot] for slot in slots],
            "anchor": list(anchors),
            "frontier": list(frontiers),
            "live_drafts": live,
            "live_columns": [p + 1 for p in live],
            "positions": [ahead] * 3,
            "context_frontier": [f - p for f, p in zip(frontiers, waiting, strict=True)],
            "pending": waiting,
            "context_positions": [behind],
            "draft_positions": [ahead],
            "draft_columns": [live_block or (columns if whole else p + 1) for p in live],
        }
        if given:
            fields["drafts"] = [list(row) for row in drafts or ()]
        return executor, self._run(executor, 0, fields)

    def keys(self, slot: int, name: str, length: int) -> Tensor:
        """Paged keys or values of positions [0, length), `[G, length, D]`."""
        pool = self.pools.tensors[name]
        pages = pool[self.tables[slot]]  # [M, G, page, D]
        dense = pages.permute(1, 0, 2, 3).reshape(pool.shape[1], -1, pool.shape[3])
        assert dense.shape[1] >= length and pool.shape[2] == PAGE_SIZE
        return dense[:, :length]

    def _run(self, executor: Executor, index: int, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        executor.inputs.fill(**{k: v for k, v in fields.items() if k in executor.inputs})
        stored: dict[str, Tensor] = {}
        # A captured round has no probe: it is replayed, and what is compared is what is left of it.
        if self.captured and isinstance(executor, RoundExecutor):
            if not executor.is_captured:
                snapshot = self.pools.storage.clone()
                executor.run(0)
                executor.finish([0] * executor.batch)
                executor.capture(torch.cuda.Stream())
                self.pools.storage.copy_(snapshot)
                executor.poison()
            executor.run(index)
            graph = executor.compiled.graphs[index]
            for value in graph.by_role("retained", "output"):
                stored[value.name] = executor.tensors[value.name].clone()
            return stored
        executor.run(
            index, lambda _, values: stored.update({k: v.clone() for k, v in values.items()})
        )
        return stored


@pytest.fixture(params=["eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden() -> Any:
    """`golden(case)` -> (directory, expected tensors, expected.json)."""
    import json

    def load(case: str) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        folder = GOLDEN / case
        tensors = folder / "expected.safetensors"
        return (
            folder,
            load_file(tensors) if tensors.exists() else {},
            json.loads((folder / "expected.json").read_text()),
        )

    return load


@pytest.fixture
def bench() -> type[Bench]:
    return Bench


@pytest.fixture
def close() -> Any:
    """`close(found, expected, tolerance, what)`: finite and within the golden set's absolute
    tolerance.
    """

    def check(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
        assert found.shape == expected.shape, (what, found.shape, expected.shape)
        assert bool(torch.isfinite(found).all()), f"{what}: not finite"
        error = float((found.double() - expected.double()).abs().max())
        assert error <= tolerance, f"{what}: error {error:.3e}, tolerance {tolerance:.1e}"

    return check
