"""what_if: memory and floor of other K, trees, B and contexts, and what fits a device; no weights.

Graphs are declared and planned once for the largest batch; a smaller one uses some of its
executors, another context only changes pools and page tables. `tree` says what stands for a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dflash_graph.choices import Choices
from dflash_graph.errors import OptionError
from dflash_graph.graph import Backend
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_startup, declare_state
from dflash_graph.op import Cost
from dflash_graph.profile.floors import floor_us
from dflash_graph.profile.parts import Ceiling
from dflash_graph.profile.tree import declare_wide, frame_layout, round_costs, tree_columns
from dflash_graph.report import MemoryReport, startup_memory
from dflash_graph.state import Capacities, plan_state


@dataclass(frozen=True)
class Scenario:
    """One configuration: its memory by class in bytes, and what its largest round takes at least.

    Args:
        draft_tokens: K.
        tree_width: nodes that are verified at each of K depths; 1 is a chain.
        columns: W.
        max_batch: B.
        max_context: tokens that a request may hold.
        context: tokens before the block that the round is for.
        weights, state, arena, frames: bytes.
        round_bytes, round_flops: read and written, and operations, of a greedy round of B requests.
        round_floor_us: of that round.
        chain_floor_us: of the same round with a chain.
    """

    draft_tokens: int
    tree_width: int
    columns: int
    max_batch: int
    max_context: int
    context: int
    weights: int
    state: int
    arena: int
    frames: int
    round_bytes: int
    round_flops: int
    round_floor_us: float
    chain_floor_us: float

    @property
    def total(self) -> int:
        """Bytes in all; captured graphs and the driver's own come on top."""
        return self.weights + self.state + self.arena + self.frames

    @property
    def break_even(self) -> float:
        """How many times the chain's tokens a round must publish to be as fast, by the floors."""
        return self.round_floor_us / self.chain_floor_us

    @property
    def most_chain_tokens(self) -> float:
        """Tokens a round of a chain above which a tree of this K cannot be faster: it publishes at
        most K + 1.
        """
        return (self.draft_tokens + 1) / self.break_even

    def needed_tokens(self, chain_tokens: float) -> float | None:
        """Tokens a round that break even with a chain that publishes so many; None where that is
        more than a round can publish.
        """
        needed = self.break_even * chain_tokens
        return needed if needed <= self.draft_tokens + 1 else None


@dataclass(frozen=True)
class Fits:
    """What fits a device with one K and tree width; None where nothing does.

    Args:
        draft_tokens: K.
        tree_width: as in `Scenario`.
        memory_bytes: of the device.
        by_batch: B -> the most tokens of context of each request.
        by_context: context -> the most requests.
    """

    draft_tokens: int
    tree_width: int
    memory_bytes: int
    by_batch: dict[int, int | None]
    by_context: dict[int, int | None]


class Footprint:
    """Memory of one K and tree width for every B up to a largest one, at any context.

    The arena of a tree is planned with a draft of W columns; its peak lies in verify or accept.

    Args:
        pair: target and draft.
        backend: the lowering of rounds.
        draft_tokens: K.
        tree_width: nodes that are verified at each of K depths; 1 is a chain.
        max_batch: the largest B that is asked for.
        prefill_chunk: tokens of a prefill pass.
        choices: of the device that kernels are for.

    Raises:
        OptionError: a number is out of range.
    """

    def __init__(
        self,
        pair: ModelPair,
        backend: Backend,
        *,
        draft_tokens: int,
        tree_width: int = 1,
        max_batch: int,
        prefill_chunk: int,
        choices: Choices | None = None,
    ) -> None:
        if not draft_tokens:
            pair = replace(pair, draft=None)
        self.draft_tokens = draft_tokens
        self.tree_width = tree_width
        self.columns = tree_columns(pair, draft_tokens, tree_width)
        self.max_batch = max_batch
        self._segments = declare_startup(
            pair,
            backend,
            draft_tokens=draft_tokens,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
        )
        self._wide = dict(self._segments)
        if tree_width > 1:
            self._wide |= declare_wide(pair, self._segments, self.columns)
        self._state = declare_state(pair, draft_tokens + 1)
        self._whole = startup_memory(
            pair, self._wide, draft_tokens + 1, Capacities(max_batch, 1), choices
        )

    def memory(self, max_batch: int, max_context: int) -> MemoryReport:
        """The report of a start-up, equal to `report.plan_memory` of the same numbers."""
        if not 1 <= max_batch <= self.max_batch:
            raise OptionError(f"max_batch: expected 1..{self.max_batch}, got {max_batch}")
        capacities = Capacities(max_batch, max_context)
        numbers = capacities.bindings()
        executors = []
        for executor in self._whole.executors:
            chain, wide = self._segments[executor.name], self._wide[executor.name]
            if chain[0].key.batch <= max_batch:
                frames = (
                    frame_layout(chain, wide, "input", numbers).nbytes,
                    frame_layout(chain, wide, "output", numbers).nbytes,
                )
                executors.append(replace(executor, frames=frames))
        return replace(
            self._whole,
            state=plan_state(self._state, capacities),
            capacities=capacities,
            executors=tuple(executors),
        )

    def scenario(
        self, max_batch: int, max_context: int, context: int, ceiling: Ceiling
    ) -> Scenario:
        """Memory and floor of one configuration."""
        memory = self.memory(max_batch, max_context)
        name = f"round B={max_batch}"
        chain = costs = tuple(round_costs(self._segments[name], self._segments[name], context))
        if self.tree_width > 1:
            costs = tuple(round_costs(self._segments[name], self._wide[name], context))
        return Scenario(
            self.draft_tokens,
            self.tree_width,
            self.columns,
            max_batch,
            max_context,
            context,
            sum(memory.weights.values()),
            memory.state.nbytes,
            memory.arena_bytes,
            memory.frame_bytes,
            sum(cost.bytes for cost in costs),
            sum(cost.flops for cost in costs),
            _floor_us(costs, ceiling),
            _floor_us(chain, ceiling),
        )

    def largest_context(self, max_batch: int, memory_bytes: int, limit: int) -> int | None:
        """The most tokens a request may hold with B requests on a device; None where not one
        fits, `limit` where all do.
        """
        return _largest(
            lambda context: self.memory(max_batch, context).total_bytes <= memory_bytes, limit
        )

    def fits(
        self, memory_bytes: int, max_batches: Sequence[int], max_contexts: Sequence[int], limit: int
    ) -> Fits:
        """What fits a device, for each of some B and contexts; contexts are searched to `limit`."""
        return Fits(
            self.draft_tokens,
            self.tree_width,
            memory_bytes,
            {batch: self.largest_context(batch, memory_bytes, limit) for batch in max_batches},
            {context: self.largest_batch(context, memory_bytes) for context in max_contexts},
        )

    def largest_batch(self, max_context: int, memory_bytes: int) -> int | None:
        """The most requests of a context on a device, up to this footprint's; None where not one
        fits.
        """
        return _largest(
            lambda batch: self.memory(batch, max_context).total_bytes <= memory_bytes,
            self.max_batch,
        )


def scenarios_of(
    footprints: Sequence[Footprint],
    max_batches: Sequence[int],
    max_contexts: Sequence[int],
    context: int,
    ceiling: Ceiling,
) -> tuple[Scenario, ...]:
    """Every combination of a footprint's K and tree width with B and context.

    Args:
        footprints: one of each K and tree width.
        max_batches, max_contexts: as in `Scenario`.
        context: tokens before the block that floors are for.
        ceiling: what floors stand on.

    Raises:
        OptionError: `context` and a block do not fit one of the contexts.
    """
    columns = max(footprint.columns for footprint in footprints)
    room = min(max_contexts) - columns
    if context > room:
        raise OptionError(
            f"context: expected at most {room} tokens (max_context {min(max_contexts)} less a "
            f"block of {columns}), got {context}"
        )
    return tuple(
        footprint.scenario(batch, tokens, context, ceiling)
        for footprint in footprints
        for batch in max_batches
        for tokens in max_contexts
    )


def _floor_us(costs: Iterable[Cost], ceiling: Ceiling) -> float:
    """Sum of the floors of nodes."""
    return sum(floor_us(cost.bytes, cost.flops, ceiling) for cost in costs)


def _largest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The largest of 1..limit that fits, where all below it fit too."""
    if not fits(1):
        return None
    low, high = 1, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
