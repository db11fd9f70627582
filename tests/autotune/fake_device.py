"""A measurer whose times are a formula: what is fastest is known, noise repeats exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

from dflash_graph.autotune import Candidate, DeviceLost, Limits, Outcome, Task

LIMITS = Limits(shared=227 * 1024, processors=8, has_pdl=True)


def microseconds(candidate: Candidate, rows: int) -> float:
    """Least for BLOCK_O = 64, eight warps, pdl with TRIGGER, and more stages for fewer rows.

    PREFETCH costs a little.
    """
    choice = candidate.choice(rows)
    tiles, stages = choice.tiles, choice.num_stages
    time = 100.0 + abs(tiles.get("BLOCK_O", 64) - 64) + 5.0 * abs(choice.num_warps - 8)
    time += 0.01 * abs(tiles.get("BLOCK_I", 64) - 64) + 3.0 * (tiles.get("SPLIT", 1) - 1)
    time += 2.0 * abs(stages - (4 if rows <= 16 else 2))
    time += 0.001 * tiles.get("PREFETCH", 0)
    return time - (4.0 if candidate.pdl else 0.0) - (2.0 * (tiles.get("TRIGGER") == 1))


class FakeDevice:
    """Times by `microseconds`, times `noise`; notes what it is asked.

    Args:
        noise: share by which samples differ, by candidate and turn.
        spoil: what is wrong with a candidate, if anything.
        time: another formula.
    """

    def __init__(
        self,
        noise: float = 0.0,
        spoil: Callable[[Candidate], Outcome | None] = lambda candidate: None,
        time: Callable[[Candidate, int], float] = microseconds,
    ) -> None:
        self.limits = LIMITS
        self.asked: list[tuple[str, Candidate]] = []
        self.compiled: list[Candidate] = []
        self.interrupt_after: int | None = None
        self.lose: Candidate | None = None
        self._noise, self._spoil, self._time = noise, spoil, time

    def compile(self, task: Task, candidates: Sequence[Candidate]) -> None:
        self.compiled += candidates

    def measure(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
        found = []
        for candidate in candidates:
            if len(self.asked) == self.interrupt_after:
                raise KeyboardInterrupt
            if candidate == self.lose:
                raise DeviceLost(candidate, "an illegal memory access was encountered")
            self.asked.append((task.name, candidate))
            found.append(self._spoil(candidate) or self._sampled(task, candidate, turns))
        return found

    def _sampled(self, task: Task, candidate: Candidate, turns: int) -> Outcome:
        samples = {
            call.label: [
                self._time(candidate, call.rows) * (1 + self._noise * _jitter(candidate, turn))
                for turn in range(turns)
            ]
            for call in task.calls
        }
        return Outcome("ok", "", samples)


def _jitter(candidate: Candidate, turn: int) -> float:
    """Some number -1..1 that is always the same."""
    digest = sha256(f"{candidate} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**31 - 1.0
