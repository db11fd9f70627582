"""Choices held against whole rounds: moved one at a time, kept where rounds get faster.

    python benchmarks/refine.py refined.json --batch 1 --budget 200s
    python benchmarks/refine.py refined.json --batch 8 --turns 60 --margin 0.002

`autotune run` times launches among their own kind. In a round a launch begins and ends beside
others, and the next one waits for it or comes in early. So this goes on from the choices in use:
for the row tile of one batch it changes stages, warps or what may vary of tiles in one entry at a
time. A move stays if the round is faster twice, by more than the margin, at the median of
differences of rounds that take turns; results and state must have the bits they had. The file is a
profile, written at every gain; an interrupted run goes on from it with `--profile`.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dflash_graph.autotune.budget import seconds
from dflash_graph.bench import fill_state, play_round, round_with
from dflash_graph.bench.timing import interleaved
from dflash_graph.choices import Choices, Entry, Variation, choices_document, may_vary
from dflash_graph.errors import DFlashGraphError
from dflash_graph.executors import RoundExecutor
from dflash_graph.kernels import row_bucket
from dflash_graph.models.pair import preset_pair
from dflash_graph.options import EngineOptions
from dflash_graph.profile_store import document_text, write_whole
from dflash_graph.profiles import preset_names
from dflash_graph.rounds import Model, Rounds, compile_rounds

#: Values of tiles that leave sums alone where `may_vary` says so.
VALUES = {
    "TRIGGER": (0, 1, 2),
    "PREFETCH": (0, 128, 256, 512),
    "BLOCK_O": (64, 128),
    "BLOCK_I": (64, 128),
    "HALVES": (0, 1),
}
#: Bytes of a pool that are compared.
COMPARED = 1 << 20


def moves(entry: Entry, rows: int) -> Iterator[tuple[str, Entry]]:
    """What one row tile of an entry can be changed to, one change each, and how it is called."""
    now = entry.choice(rows)

    def staged(stages: int, of: Entry = entry) -> Entry:
        return replace(of, num_stages={**of.num_stages, rows: stages})

    def varied(tiles: dict[str, int], warps: int | None = None) -> Entry:
        own = entry.variations.get(rows, Variation({}, None))
        own = Variation({**own.tiles, **tiles}, warps or own.num_warps)
        return replace(entry, variations={**entry.variations, rows: own})

    for stages in (now.num_stages - 1, now.num_stages + 1, now.num_stages + 2):
        if stages > 0:
            yield f"{stages} stages", staged(stages)
    if not may_vary(now.tiles, entry.dtype):
        return
    for name, values in VALUES.items():
        for value in values if name in now.tiles else ():
            made = varied({name: value})
            if value == now.tiles[name] or not may_vary(made.choice(rows).tiles, entry.dtype):
                continue
            yield f"{name} = {value}", made
            # Tiles of another size with as many bytes under way.
            stages = max(1, round(now.num_stages * now.tiles[name] / value)) if value else 0
            if name.startswith("BLOCK") and stages != now.num_stages:
                yield f"{name} = {value}, {stages} stages", staged(stages, made)
    for warps in (4, 8):
        if warps != now.num_warps:
            yield f"{warps} warps", varied({}, warps)


def descend(
    choices: Choices,
    rows: int,
    ops: Sequence[str],
    is_faster: Callable[[str, Choices], bool],
    goes_on: Callable[[], bool],
) -> Choices:
    """Choices after every move that makes rounds faster, one entry after another.

    Args:
        rows: the row tile.
        ops: whose entries are moved, the first first; all if none is named.
        is_faster: what a move is called, choices with it -> whether it stays.
        goes_on: whether there is time for another move.
    """
    order = ops or list(dict.fromkeys(entry.op for entry in choices.entries))
    for key in [e.key for op in order for e in choices.entries if e.op == op]:
        tried: set[str] = set()
        moved = True
        while moved:
            moved = False
            (entry,) = (e for e in choices.entries if e.key == key)
            for name, made in moves(entry, rows):
                if str(made) in tried:
                    continue
                if not goes_on():
                    return choices
                tried.add(str(made))
                changed = tuple(made if e is entry else e for e in choices.entries)
                candidate = replace(choices, entries=changed)
                if is_faster(f"{key}: {name}", candidate):
                    choices, moved = candidate, True
                    break
    return choices


class Held:
    """Rounds of one batch that candidates are held against."""

    def __init__(
        self, rounds: Rounds, model: Model, batch: int, context: int, turns: int, margin: float
    ) -> None:
        self.rounds, self.model, self.batch, self.context = rounds, model, batch, context
        self.turns, self.margin = turns, margin
        assert rounds.choices is not None
        self.now, self.bits = self._made(rounds.choices)

    def is_faster(self, name: str, choices: Choices) -> bool:
        """Whether a round with these choices is faster twice; it is then what others are held
        against.
        """
        try:
            made, bits = self._made(choices)
        except (DFlashGraphError, RuntimeError) as error:  # of templates, of the compiler
            print(f"{name}: {type(error).__name__}", flush=True)
            return False
        if bits != self.bits:
            print(f"{name}: other bits", flush=True)
            return False
        for turns in (self.turns, 2 * self.turns):
            base, gain = self._gain(made, turns)
            print(f"{name}: {base:.1f} us, {-gain:+.1f}", flush=True)
            if gain <= self.margin * base:
                return False
        self.now = made
        return True

    def _made(self, choices: Choices) -> tuple[RoundExecutor, str]:
        made = round_with(choices, self.rounds, self.model, self.batch, self.context)
        fill_state(self.rounds)
        play_round(made, self.rounds, self.batch, self.context)
        torch.cuda.synchronize()
        found = hashlib.sha256()
        for name in made.outputs.layout.fields:
            found.update(memoryview(made.outputs[name].numpy()).cast("B"))
        for _, tensor in sorted(self.rounds.state.tensors.items()):
            found.update(tensor.view(torch.uint8).flatten()[:COMPARED].cpu().numpy())
        return made, found.hexdigest()

    def _gain(self, made: RoundExecutor, turns: int) -> tuple[float, float]:
        bodies = [lambda r=r, i=i: r.run_queued(i) for r in (self.now, made) for i in range(2)]
        times = interleaved(bodies, turns)
        now, then = ([sum(parts) for parts in zip(*times[i : i + 2], strict=True)] for i in (0, 2))
        return statistics.median(now), statistics.median(
            a - b for a, b in zip(now, then, strict=True)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="the profile to write")
    parser.add_argument("--preset", default="qwen3.5-27b-dflash2", choices=preset_names())
    parser.add_argument("--profile", help="goes before the choices in use")
    parser.add_argument(
        "--op", action="append", default=[], help="only this op; repeat for several"
    )
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument(
        "--turns", type=int, default=12, help="of the first look; the second: twice"
    )
    parser.add_argument("--margin", type=float, default=0.0002, help="the least gain that counts")
    parser.add_argument(
        "--budget", type=seconds, default=seconds("10m"), help="begin no move after"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("refine: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    options = EngineOptions(
        draft_tokens=given.draft_tokens,
        max_batch=given.batch,
        device="cuda",
        lowering="triton",
        max_context=given.context + 1024,
        profile=given.profile,
    )
    try:
        model = Model.random(preset_pair(given.preset), options)
        rounds = compile_rounds(model, options)
    except DFlashGraphError as error:
        print(f"refine: {error}", file=sys.stderr)
        return 1
    if rounds.choices is None:
        print("refine: expected choices in use, got none; begin with autotune run", file=sys.stderr)
        return 1
    held = Held(rounds, model, given.batch, given.context, given.turns, given.margin)
    end = time.monotonic() + given.budget

    def is_faster(name: str, choices: Choices) -> bool:
        if stays := held.is_faster(name, choices):
            write_whole(Path(given.out), document_text(choices_document(choices)))
        return stays

    rows = row_bucket(given.batch * rounds.columns)
    descend(rounds.choices, rows, given.op, is_faster, lambda: time.monotonic() < end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
