"""Decision: whether what was measured is enough to replace what runs now."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_graph.autotune.journal import Outcome
from dflash_graph.autotune.spaces import Candidate
from dflash_graph.autotune.tasks import Task

Result = Literal["won", "kept", "not resolved", "unfinished", "failed"]


@dataclass(frozen=True)
class Decision:
    """What tuning a task came to.

    Args:
        result: ``"won"``: the winner replaces the incumbent; ``"kept"``: the incumbent is the
            fastest; ``"not resolved"``: the fastest is not faster than the incumbent by more than
            the noise, so the incumbent stays; ``"unfinished"``: the budget ended before;
            ``"failed"``: the processes that measured it died.
        incumbent: what ran before.
        winner: the fastest candidate; None where nothing was measured to the end.
        runner_up: the next; None where there is none.
        microseconds: of a round's launches, all row tiles together: of the three.
        margin: share of the incumbent's time that the winner saves; of the runner-up's time where
            the incumbent is the fastest.
        noise: half the distance between the quartiles of that share over repeats.
        lead: share of the runner-up's time that the winner saves.
        turns: repeats.
        tried, failed: candidates that were measured, and those that failed or were wrong.
        message: why, where the result is ``"failed"``.
    """

    task: Task
    result: Result
    incumbent: Candidate
    winner: Candidate | None = None
    runner_up: Candidate | None = None
    microseconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    margin: float = 0.0
    noise: float = 0.0
    lead: float = 0.0
    turns: int = 0
    tried: int = 0
    failed: int = 0
    message: str = ""

    @property
    def chosen(self) -> Candidate:
        """What is to run from now on."""
        return self.winner if self.result == "won" and self.winner else self.incumbent

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        winner, runner_up, incumbent = self.microseconds
        return {
            "task": self.task.name,
            "result": self.result,
            "incumbent": self.incumbent.document(),
            "winner": self.winner.document() if self.winner else None,
            "runner_up": self.runner_up.document() if self.runner_up else None,
            "winner_us": winner,
            "runner_up_us": runner_up,
            "incumbent_us": incumbent,
            "margin": self.margin,
            "noise": self.noise,
            "lead": self.lead,
            "turns": self.turns,
            "tried": self.tried,
            "failed": self.failed,
            "message": self.message,
        }

    def evidence(self) -> dict[str, Any]:
        """What a store keeps beside a winner."""
        kept = ("winner_us", "runner_up_us", "incumbent_us", "margin", "noise", "lead", "turns")
        document = self.document()
        return {
            **{name: round(v, 4) if isinstance(v := document[name], float) else v for name in kept},
            "runner_up": document["runner_up"],
        }


def turn_totals(task: Task, samples: Mapping[str, Sequence[float]]) -> list[float]:
    """Microseconds of a round's launches, all calls together, turn by turn."""
    weighted = [[call.launches * t for t in samples[call.label]] for call in task.calls]
    return [sum(turn) for turn in zip(*weighted, strict=True)]


def total(task: Task, samples: Mapping[str, Sequence[float]]) -> float:
    """The same from the median of each call."""
    return sum(call.launches * statistics.median(samples[call.label]) for call in task.calls)


def decide(
    task: Task,
    incumbent: Candidate,
    finalists: Sequence[Candidate],
    outcomes: Sequence[Outcome],
    *,
    tried: int,
    failed: int,
) -> Decision:
    """Choose among finalists that were measured turn by turn.

    Args:
        finalists: candidates; the incumbent is one of them, if it runs at all.
        outcomes: of each.
    """
    good = [(c, o) for c, o in zip(finalists, outcomes, strict=True) if o.status == "ok"]
    good.sort(key=lambda pair: total(task, pair[1].samples))
    failed += len(finalists) - len(good)
    if not good:
        return Decision(task, "kept", incumbent, tried=tried, failed=failed)
    turns = {c: turn_totals(task, o.samples) for c, o in good}
    winner = good[0][0]
    runner_up = good[1][0] if len(good) > 1 else None
    lead, lead_noise = _saved(turns[winner], turns[runner_up]) if runner_up else (0.0, 0.0)
    times = {c: statistics.median(t) for c, t in turns.items()}
    made: dict[str, Any] = {
        "winner": winner,
        "runner_up": runner_up,
        "microseconds": (
            times[winner],
            times[runner_up] if runner_up else 0.0,
            times.get(incumbent, 0.0),
        ),
        "lead": lead,
        "turns": len(turns[winner]),
        "tried": tried,
        "failed": failed,
    }
    if winner == incumbent:
        return Decision(task, "kept", incumbent, margin=lead, noise=lead_noise, **made)
    if incumbent not in turns:
        # What runs now is wrong or fails here: anything that is right is better.
        return Decision(task, "won", incumbent, margin=lead, noise=lead_noise, **made)
    margin, noise = _saved(turns[winner], turns[incumbent])
    result: Result = "won" if margin > noise else "not resolved"
    return Decision(task, result, incumbent, margin=margin, noise=noise, **made)


def _saved(fast: Sequence[float], slow: Sequence[float]) -> tuple[float, float]:
    """The median share of `slow` that `fast` saves, and half the distance of its quartiles."""
    shares = [1.0 - a / b for a, b in zip(fast, slow, strict=True)]
    if len(shares) < 2:
        return shares[0], float("inf")
    low, _, high = statistics.quantiles(shares, n=4)
    return statistics.median(shares), (high - low) / 2
