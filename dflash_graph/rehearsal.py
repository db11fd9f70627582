"""rehearsal: the host's part of a round, played over stand-ins while the device works.

What the host does between two rounds runs once in a round. By then other work has taken the
processor's caches, and the same code takes two to five times as long as right after itself. A
rehearsal runs it shortly before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_graph.options import SamplingParams
from dflash_graph.request import Request
from dflash_graph.rounds import Rounds
from dflash_graph.scheduler import Scheduler


class Rehearsals:
    """Rehearsals by batch size and law, each made when it is first asked for.

    Nothing of the engine's own requests, frames and state is touched.

    Args:
        rounds: what the engine runs.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._made: dict[tuple[int, bool], Callable[[], None]] = {}

    def __call__(self, batch: int, is_greedy: bool) -> None:
        """Play what follows a round of `batch` requests."""
        self.of(batch, is_greedy)()

    def of(self, batch: int, is_greedy: bool) -> Callable[[], None]:
        """The rehearsal of `batch` requests."""
        key = batch, is_greedy
        if key not in self._made:
            self._made[key] = self._make(batch, is_greedy)
        return self._made[key]

    def _make(self, batch: int, is_greedy: bool) -> Callable[[], None]:
        rounds = self._rounds.still(batch)
        scheduler = Scheduler(rounds)
        executor = (rounds if is_greedy else rounds.sampling)[batch]
        accepted = rounds.columns // 2
        fields = {"accepted": accepted, "licensed": accepted + 1, "finite": 1}
        executor.outputs.fill(**{f"{executor.law}.{name}": fields[name] for name in fields})
        params = SamplingParams(temperature=0.0 if is_greedy else 1.0, seed=0)
        requests = [
            Request(index, (0,), params, frozenset(), rounds.capacities.context)
            for index in range(batch)
        ]
        for request in requests:
            request.slot = scheduler.slots.take()
        scheduler.active = requests

        def play() -> None:
            for request in requests:
                request.history[1:] = [0]  # an anchor
                request.frontier = request.context_frontier = 1
                request.token_ids.clear()
                request.rounds.clear()
            scheduler.events.clear()
            scheduler.advance()

        return play
