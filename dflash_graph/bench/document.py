"""One benchmark of a pair's rounds as a JSON-ready document, and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dflash_graph.bench.floor import floor_bytes, read_ceiling
from dflash_graph.bench.rounds import RoundTimes, fill_state, measure_round, require_context
from dflash_graph.errors import OptionError
from dflash_graph.rounds import Rounds


def bench_document(
    rounds: Rounds,
    *,
    batches: Sequence[int],
    context: int,
    turns: int = 30,
    ops: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Time rounds of some exact batches beside the read ceiling of the same run.

    Args:
        rounds: compiled on a CUDA device.
        batches: each B to time.
        context: tokens before the block.
        turns: rounds that are timed.
        ops: also a table of each op's launches.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        OptionError: there is no CUDA device, or the context does not fit the engine's or lies
            before the first block.
    """
    if not rounds.arena.is_cuda:
        raise OptionError("bench: expected device 'cuda' (rounds are timed on it), got 'cpu'")
    require_context(rounds, context)
    fill_state(rounds)
    ceiling = read_ceiling()
    times = []
    for done, batch in enumerate(batches):
        if progress is not None:
            progress("time", done, len(batches))
        times.append(measure_round(rounds, batch, context, turns=turns, ops=ops))
    floor = floor_bytes(rounds[1].compiled.graphs[0])
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "choices": rounds.choices.source if rounds.choices is not None else "default",
        "lowering": rounds.backend,
        "captured": rounds[1].is_captured,
        "draft_tokens": rounds.draft_tokens,
        "turns": turns,
        "read_ceiling_tb_per_s": ceiling,
        "floor_bytes": floor,
        "floor_us": floor / ceiling / 1e6,
        "rounds": [{**asdict(found), "ratio": _ratio(found, floor, ceiling)} for found in times],
        "startup_seconds": dict(rounds.startup),
        "arena_bytes": rounds.arena.numel(),
        "graph_bytes": rounds.graph_bytes,
        "state_bytes": rounds.state_plan.nbytes,
    }


def bench_text(document: dict[str, Any]) -> str:
    """The document for people."""
    lines = [
        f"{document['device']}, torch {document['torch']}; {document['lowering']}, choices: "
        f"{document['choices']}; K = {document['draft_tokens']}",
        f"read ceiling {document['read_ceiling_tb_per_s']:.2f} TB/s; weights of a round "
        f"{document['floor_bytes'] / 1e9:.2f} GB: floor {document['floor_us'] / 1e3:.3f} ms",
        "B  context  forward ms  finish ms  round ms  +-     of floor",
    ]
    for row in document["rounds"]:
        lines.append(
            f"{row['batch']}  {row['context']:>7}  {row['forward'] / 1e3:>10.3f}  "
            f"{row['finish'] / 1e3:>9.3f}  {row['total'] / 1e3:>8.3f}  "
            f"{row['spread'] / 1e3:.3f}  {row['ratio']:>8.3f}"
        )
    for row in document["rounds"]:
        if row["ops"]:
            lines.append(f"B = {row['batch']}: launches of each op alone, us")
            lines += [f"  {time:>9.1f}  {count:>4} x  {name}" for name, count, time in row["ops"]]
    stages = ", ".join(f"{name} {took:.1f} s" for name, took in document["startup_seconds"].items())
    lines.append(f"start-up: {stages}")
    sizes = {name: document[f"{name}_bytes"] / 2**20 for name in ("arena", "graph", "state")}
    lines.append(", ".join(f"{name} {size:.1f} MiB" for name, size in sizes.items()))
    return "\n".join(lines) + "\n"


def _ratio(times: RoundTimes, floor: int, ceiling: float) -> float:
    """Time of the round over the time its weights take at the read ceiling."""
    return times.total * ceiling * 1e6 / floor
