"""Requests, checkpoints and forks in any order: nothing is lost, held twice or left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import dflash_graph as dg
from dflash_graph.contexts import Checkpoint
from dflash_graph.models.pair import PAGE_SIZE

Ids = tuple[int, ...]

#: Tokens of plain text that every prompt has in reserve.
PLENTY = 90
BUDGETS = (1, 3, 9, 20)


@dataclass(frozen=True)
class Lineage:
    """Where a text comes from: `done` tokens into what greedy decoding gives of a prompt."""

    prompt: Ids
    done: int


@dataclass
class Entry:
    """A request with what is expected of it."""

    request: dg.Request
    lineage: Lineage | None  # None once anything of it was drawn
    solo: tuple[Ids, dg.SamplingParams] | None = None


def keeps(count: int) -> Callable[[Sequence[int]], int]:
    return lambda tokens: min(len(tokens), count)


class Machine(RuleBasedStateMachine):
    """One engine, driven by rules. `shop` and `engine` are set by the test."""

    shop: Any
    engine: dg.Engine
    solo: dict[tuple[Ids, dg.SamplingParams], Ids]

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.held: list[tuple[Checkpoint, Lineage | None]] = []
        self.events: list[dg.Event] = []
        self.before = self.engine.statistics.ended.copy()

    # -- rules -------------------------------------------------------------------------------------

    @rule(
        index=st.integers(0, 3),
        budget=st.sampled_from(BUDGETS),
        seed=st.sampled_from((None, None, 1, 2)),
        stop=st.none() | st.integers(0, 15),
        few=st.none() | st.integers(1, 2),
        keep=st.booleans(),
    )
    def submit(
        self,
        index: int,
        budget: int,
        seed: int | None,
        stop: int | None,
        few: int | None,
        keep: Any,
    ) -> None:
        prompt = self._prompt(index)
        stops = () if stop is None else (self.shop.plain("golden mixed", prompt, 16)[stop],)
        params = self._params(budget, seed).replace(stop_token_ids=stops)
        preview = keeps(few) if few else None
        request = self.engine.submit(prompt, params, preview=preview, keep=keep)
        solo = (prompt, params) if seed and not few else None
        lineage = Lineage(prompt, 0) if seed is None else None
        self.entries.append(Entry(request, lineage, solo))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.events += self.engine.step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        self.engine.cancel(self.live[which % len(self.live)].request)

    @precondition(lambda self: any(e.request.is_admitted for e in self.live))
    @rule(which=st.integers(0, 99))
    def ruin(self, which: int) -> None:
        """Its state is no longer finite: it fails, and no other does."""
        running = [e for e in self.live if e.request.is_admitted]
        state = self.engine.rounds.state.tensors["target.layers.0.gdn_state"]
        state[running[which % len(running)].request.slot] = float("nan")

    @precondition(lambda self: self.decoding)
    @rule(which=st.integers(0, 99))
    def checkpoint(self, which: int) -> None:
        entry = self.decoding[which % len(self.decoding)]
        checkpoint = self.engine.checkpoint(entry.request)
        assert checkpoint.generated == entry.request.generated
        self._hold(checkpoint, entry)

    @precondition(lambda self: any(e.request.checkpoint for e in self.entries))
    @rule(which=st.integers(0, 99))
    def take_kept(self, which: int) -> None:
        ended = [e for e in self.entries if e.request.checkpoint]
        entry = ended[which % len(ended)]
        assert entry.request.checkpoint is not None
        self._hold(entry.request.checkpoint, entry)

    @precondition(lambda self: self.held)
    @rule(
        which=st.integers(0, 99),
        budget=st.sampled_from(BUDGETS),
        seed=st.sampled_from((None, None, 1)),
        few=st.none() | st.integers(1, 2),
        is_host=st.booleans(),
        keep=st.booleans(),
    )
    def fork(
        self, which: int, budget: int, seed: int | None, few: int | None, is_host: bool, keep: Any
    ) -> None:
        checkpoint, lineage = self.held[which % len(self.held)]
        preview = keeps(few) if few else None
        continued = self.engine.restore if is_host else self.engine.fork
        source = checkpoint.to_host() if is_host else checkpoint
        request = continued(source, self._params(budget, seed), preview=preview, keep=keep)
        self.entries.append(Entry(request, lineage if seed is None else None))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        del self.held[which % len(self.held)]

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def slots_and_pages(self) -> None:
        engine = self.engine
        admitted = [e.request for e in self.entries if e.request.is_admitted]
        assert all(not request.is_finished for request in admitted)
        slots = [request.slot for request in admitted]
        pages = [page for request in admitted for page in request.pages]
        assert (
            len(set(slots))
            == len(slots)
            == engine.scheduler.slots.count - engine.scheduler.slots.free
        )
        assert (
            len(set(pages))
            == len(pages)
            == engine.scheduler.pages.count - engine.scheduler.pages.free
        )
        for request in admitted:
            width = engine.rounds.columns
            assert request.frontier <= len(request.pages) * PAGE_SIZE
            assert len(request.pages) <= -(-(request.frontier + width) // PAGE_SIZE)
            assert 0 <= request.pending <= width
        for entry in self.entries:
            if entry.request.is_finished:
                assert entry.request.slot == -1 and not entry.request.pages
        assert engine.scheduler.prefixes.nbytes <= engine.scheduler.prefixes.capacity

    @invariant()
    def texts(self) -> None:
        for entry in self.entries:
            request, lineage = entry.request, entry.lineage
            if lineage is not None:
                text = self.shop.plain("golden mixed", lineage.prompt, PLENTY)[lineage.done :]
                assert tuple(request.token_ids) == text[: len(request.token_ids)]
            first = 1 if request.source is None and request.token_ids else 0
            committed = sum(record.committed for record in request.rounds)
            assert committed + first == len(request.token_ids) <= request.budget

    def teardown(self) -> None:
        while not self.engine.is_idle:
            self.step(1)
            self.slots_and_pages()
        self.texts()
        self.events += self.engine.step()
        assert self.shop.is_at_rest(self.engine)
        assert not self.engine.scheduler.events
        for entry in self.entries:
            request = entry.request
            mine = [event for event in self.events if event.request_id == request.id]
            reasons = [event.finish_reason for event in mine if event.finish_reason]
            assert reasons == [request.finish_reason] and mine[-1].finish_reason
            assert [token for event in mine for token in event.token_ids] == request.token_ids
            assert (request.error is not None) == (request.finish_reason == "error")
            if request.finish_reason == "length":
                assert len(request.token_ids) == request.budget
            elif request.finish_reason == "stop":
                assert request.token_ids[-1] in request.stops
            if request.checkpoint is not None:
                assert request.keep and request.finish_reason in ("stop", "length")
                history = (*request.checkpoint.tokens, request.checkpoint.anchor)
                assert history[request.given :] == tuple(request.token_ids)
            self._compare_solo(entry)
        ended = self.engine.statistics.ended
        total = sum(ended.values()) - sum(self.before.values())
        assert total == len(self.entries)

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def live(self) -> list[Entry]:
        return [e for e in self.entries if not e.request.is_finished]

    @property
    def decoding(self) -> list[Entry]:
        return [e for e in self.live if e.request.is_admitted and e.request.is_decoding]

    def _prompt(self, index: int) -> Ids:
        """Three short prompts, and one that ends just before a page does."""
        if index < 3:
            return self.shop.prompt("golden mixed", index)
        long = self.shop.prompt("golden mixed", 2) + self.shop.prompt("golden mixed", 1)
        return (long * 3)[: PAGE_SIZE - 3]

    def _params(self, budget: int, seed: int | None) -> dg.SamplingParams:
        greedy = dg.SamplingParams(max_new_tokens=budget, ignore_eos=True)
        if seed is None:
            return greedy
        return greedy.replace(temperature=0.3, presence_penalty=0.2, seed=seed)

    def _hold(self, checkpoint: Checkpoint, entry: Entry) -> None:
        """Keep a checkpoint of finite state, while the plain text of its prompt reaches further."""
        state = checkpoint.images["target.layers.0.gdn_state"]
        lineage = entry.lineage
        if lineage is not None:
            lineage = Lineage(lineage.prompt, len(checkpoint.generated))
            if lineage.done + max(BUDGETS) > PLENTY:
                return
        if bool(state.isfinite().all()) and len(checkpoint.tokens) < 200:
            self.held.append((checkpoint, lineage))

    def _compare_solo(self, entry: Entry) -> None:
        """A seeded request has the text it has alone, in another engine, as far as it came."""
        if entry.solo is None:
            return
        if entry.solo not in self.solo:
            prompt, params = entry.solo
            with self.shop.load("golden mixed", max_batch=1, draft_tokens=4) as engine:
                self.solo[entry.solo] = engine.generate([prompt], params)[0].token_ids
        count = len(entry.request.token_ids)
        assert tuple(entry.request.token_ids) == self.solo[entry.solo][:count]


@pytest.mark.parametrize("prefix_cache_bytes", [0, 400_000])
def test_conservation(shop: Any, prefix_cache_bytes: int) -> None:
    engine = shop.load(
        "golden mixed",
        max_batch=3,
        draft_tokens=4,
        prefill_chunk=16,
        prefix_cache_bytes=prefix_cache_bytes,
    )

    class Rules(Machine):
        pass

    Rules.shop, Rules.engine, Rules.solo = shop, engine, {}
    checks = settings(
        max_examples=8,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(Rules, settings=checks)
    engine.close()
