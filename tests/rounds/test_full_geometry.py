"""Rounds at the widths of the 27B, a few layers deep, on a device: a row's bits in every company.

Random weights and random state; eight requests at different frontiers. Plain decoding gives each
request's tokens and scores; the same tokens as drafts must give the same scores in any round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.ahead_of_time import precompile
from dflash_graph.choices import choices_for
from dflash_graph.executors import RoundExecutor, compile_segments, new_arena
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.kernels import cases_of
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round, declare_state
from dflash_graph.profiles import load_preset
from dflash_graph.rounds import weight_uses
from dflash_graph.state import Capacities, StatePools, plan_state
from dflash_graph.testing import same_bytes
from dflash_graph.weights import random_weights

pytestmark = pytest.mark.gpu

LAYERS = 4
STEPS = 17
FRONTIERS = (40, 63, 64, 127, 300, 511, 700, 1000)


class Wide:
    """A pair cut to a few layers, its state, and rounds of any K and B over given drafts."""

    def __init__(self) -> None:
        preset = load_preset("qwen3.5-27b-dflash2")
        target = {**preset["target"], "num_hidden_layers": LAYERS}
        target["layer_types"] = preset["target"]["layer_types"][:LAYERS]
        draft = {**preset["draft"], "num_hidden_layers": 1, "num_target_layers": LAYERS}
        draft["layer_types"] = preset["draft"]["layer_types"][:1]
        draft["dflash_config"] = {**draft["dflash_config"], "target_layer_ids": [0, 1, 2, 3]}
        self.pair = ModelPair(
            target_geometry_from_config(target, "target"),
            draft_geometry_from_config(draft, "draft"),
            dtype="bfloat16",
        )
        major, minor = torch.cuda.get_device_capability()
        self.capability = 10 * major + minor
        self.choices = choices_for(torch.cuda.get_device_name(), self.capability)
        self.weights = random_weights(weight_uses(self.pair, "triton"), 0, "cuda")
        self.capacities = Capacities(8, 1152)
        self.pools = StatePools(plan_state(declare_state(self.pair, 16), self.capacities), "cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        for name, pool in self.pools.tensors.items():
            if pool.is_floating_point():
                pool.normal_(0.0, 0.02 if "gdn" in name else 1.0, generator=generator)
        self.start = self.pools.storage.clone()
        self._executors: dict[Any, RoundExecutor] = {}

    def _state(self, columns: int) -> dict[str, Tensor]:
        """The pools, with pending features of a round's own width: no request has any."""
        pending = "draft.pending_features"
        wide = self.pools.tensors[pending]
        return {**self.pools.tensors, pending: wide[:, :columns].contiguous()}

    def executor(self, draft_tokens: int, batch: int, captured: bool) -> RoundExecutor:
        key = (draft_tokens, batch, captured)
        if key not in self._executors:
            declared = declare_round(
                self.pair,
                "triton",
                draft_tokens=draft_tokens,
                batch=batch,
                given_drafts=draft_tokens > 0,
                scores=True,
            )
            compiled = compile_segments(declared.segments, self.capacities, self.choices)
            precompile(cases_of(compiled.graphs, self.choices), self.capability)
            arena = new_arena([compiled.plan], "cuda")
            state = self._state(draft_tokens + 1)
            made = RoundExecutor(compiled, arena, self.weights, state, "triton")
            if captured:
                before = self.pools.storage.clone()
                made.run(0)
                made.finish([0] * batch)
                made.capture(torch.cuda.Stream())
                self.pools.storage.copy_(before)
            self._executors[key] = made
        self._executors[key].poison()
        return self._executors[key]

    def round(
        self,
        rows: Sequence[int],
        anchors: Sequence[int],
        ahead: int,
        drafts: Sequence[Sequence[int]] = (),
        *,
        captured: bool = False,
    ) -> tuple[RoundExecutor, Tensor]:
        """A round of some requests, `ahead` tokens after their start; its executor and scores."""
        draft_tokens = len(drafts[0]) if drafts else 0
        width, batch = draft_tokens + 1, len(rows)
        executor = self.executor(draft_tokens, batch, captured)
        frontier = [FRONTIERS[row] + ahead for row in rows]
        pages = self.capacities.request_pages
        positions = [[f + i for i in range(width)] for f in frontier]
        fields = {
            "slots": list(rows),
            "page_table": [[row * pages + i for i in range(pages)] for row in rows],
            "anchor": list(anchors),
            "frontier": frontier,
            "live_drafts": [draft_tokens] * batch,
            "live_columns": [width] * batch,
            "positions": [positions] * 3,
            "context_frontier": frontier,
            "pending": [0] * batch,
            "context_positions": [positions],
            **({"drafts": [list(row) for row in drafts]} if drafts else {}),
        }
        executor.inputs.fill(**{k: v for k, v in fields.items() if k in executor.inputs})
        executor.run(0)
        return executor, executor.tensors["verify/scores"]


@pytest.fixture(scope="module")
def wide() -> Wide:
    return Wide()


@pytest.fixture(scope="module")
def plain(wide: Wide) -> tuple[list[list[int]], list[list[Tensor]], list[Tensor]]:
    """Tokens, scores and state of every request by plain decoding, one request at a time."""
    tokens, scores, states = [], [], []
    for row in range(len(FRONTIERS)):
        wide.pools.storage.copy_(wide.start)
        mine, seen = [1 + row], []
        for step in range(STEPS):
            executor, found = wide.round([row], [mine[-1]], step)
            seen.append(found[0, 0].clone())
            assert bool(seen[-1].isfinite().all())
            mine.append(int(executor.outputs["accept/greedy.outputs"][0, 0]))
            executor.finish([1])
        tokens.append(mine)
        scores.append(seen)
        states.append(wide.pools.tensors["target.layers.0.gdn_state"][row].clone())
    return tokens, scores, states


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("draft_tokens", [1, 3, 7, 15])
def test_scores_in_every_company(draft_tokens: int, captured: bool, wide: Wide, plain: Any) -> None:
    """Every column of every row for B = 1..8, rows in turn, equals plain decoding bit for bit."""
    tokens, scores, _ = plain
    for batch in range(1, 9):
        rows = [(batch + i) % 8 for i in range(batch)]
        wide.pools.storage.copy_(wide.start)
        drafts = [tokens[row][1 : draft_tokens + 1] for row in rows]
        executor, found = wide.round(
            rows, [tokens[row][0] for row in rows], 0, drafts, captured=captured
        )
        assert executor.outputs["accept/greedy.accepted"].tolist() == [draft_tokens] * batch
        for index, row in enumerate(rows):
            for column in range(draft_tokens + 1):
                same = same_bytes(found[index, column], scores[row][column])
                assert same, f"B = {batch}, request {row} in row {index}, column {column}"


@pytest.mark.parametrize("draft_tokens", [7, 15])
def test_state_after_a_commit(draft_tokens: int, wide: Wide, plain: Any) -> None:
    """The state after N columns, then one token on, for every N."""
    tokens, scores, _ = plain
    for committed in range(draft_tokens + 2):
        wide.pools.storage.copy_(wide.start)
        drafts = [tokens[row][1 : draft_tokens + 1] for row in (5, 2)]
        executor, _ = wide.round([5, 2], [tokens[5][0], tokens[2][0]], 0, drafts)
        executor.finish([committed, draft_tokens + 1 - committed])
        for row, count in ((5, committed), (2, draft_tokens + 1 - committed)):
            _, found = wide.round([row], [tokens[row][count]], count)
            assert same_bytes(found[0, 0], scores[row][count]), f"request {row} after {count}"
