"""Rounds of the demo pair with random arrivals, cancellations and forks; memory must stay flat.

    python benchmarks/soak.py --rounds 10000

Requests of random prompts, laws and lengths come and go; some are cancelled, some forked on the
device, through a host replica, or from the context they ended with. When a tenth of the rounds has
warmed everything up, resident memory and the objects that Python's collector knows are sampled, and
with `--trace` the bytes that Python holds. Compared are the medians of the first and the last fifth
of the samples.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import dflash_graph as dg
from dflash_graph.contexts import Checkpoint

#: Contexts that are held at once for later forks.
HELD = 4


@dataclass
class Soak:
    """What a soak did and measured.

    Args:
        seed: of the schedule.
    """

    seed: int
    rounds: int = 0
    requests: int = 0
    forks: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    resident: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    traced: list[int] = field(default_factory=list)

    def facts(self) -> dict[str, object]:
        """The figures, in bytes and seconds."""
        resident, objects = ends(self.resident), ends(self.objects)
        facts: dict[str, object] = {
            "seed": self.seed,
            "rounds": self.rounds,
            "requests": self.requests,
            "forks": self.forks,
            "ended": self.ended,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "resident_first": resident[0],
            "resident_last": resident[1],
            "objects_first": objects[0],
            "objects_last": objects[1],
        }
        if self.traced:
            facts["traced_first"], facts["traced_last"] = ends(self.traced)
        return facts


def ends(samples: Sequence[int]) -> tuple[int, int]:
    """Medians of the first and of the last fifth."""
    size = max(1, len(samples) // 5)
    return int(statistics.median(samples[:size])), int(statistics.median(samples[-size:]))


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(engine: dg.Engine, rounds: int, seed: int) -> Soak:
    """Drive an engine for `rounds` rounds (steps that commit), then let everything end.

    Samples are taken every hundredth of the rounds, and traced bytes where `tracemalloc` runs.
    """
    result = Soak(seed)
    chance = random.Random(seed)
    live: list[dg.Request] = []
    held: list[Checkpoint] = []
    vocab = engine.rounds.model.pair.emitted_vocab
    started = time.perf_counter()

    def params() -> dg.SamplingParams:
        drawn = chance.random() < 0.5
        return dg.SamplingParams(
            temperature=0.8 if drawn else 0.0,
            presence_penalty=0.2 if drawn else 0.0,
            seed=chance.getrandbits(64),
            max_new_tokens=chance.randint(1, 60),
            stop_token_ids=[chance.randrange(vocab)],
        )

    def hold(checkpoint: Checkpoint) -> None:
        if checkpoint.frontier < 120:
            held.append(checkpoint)
            del held[:-HELD]

    def arrive() -> None:
        keep = chance.random() < 0.3
        if held and chance.random() < 0.4:
            checkpoint = chance.choice(held)
            source = checkpoint.to_host() if chance.random() < 0.5 else checkpoint
            live.append(engine.restore(source, params(), keep=keep))
            result.forks += 1
        else:
            prompt = [chance.randrange(vocab) for _ in range(chance.randint(1, 100))]
            live.append(engine.submit(prompt, params(), keep=keep))
        result.requests += 1

    # Executors of prefill chunks are bound at their first use: bind all before the first sample.
    for tokens in range(1, engine.rounds.options.prefill_chunk + 1):
        engine.rounds.prefill(tokens)
    warm = rounds // 10
    every = max(1, (rounds - warm) // 100)
    steps = 0
    while steps < rounds or not engine.is_idle:
        if steps < rounds and len(live) < 6 and chance.random() < 0.5:
            arrive()
        if live and chance.random() < 0.02:
            engine.cancel(chance.choice(live))
        decoding = [r for r in live if r.is_admitted and r.is_decoding]
        if decoding and chance.random() < 0.05:
            hold(engine.checkpoint(chance.choice(decoding)))
        before = engine.statistics.rounds
        for event in engine.step():
            result.tokens += len(event.token_ids)
        for request in live:
            if request.checkpoint is not None:
                hold(request.checkpoint)
        live = [request for request in live if not request.is_finished]
        if engine.statistics.rounds == before:
            continue
        steps += 1
        if warm < steps <= rounds and steps % every == 0:
            gc.collect()
            result.resident.append(resident_bytes())
            result.objects.append(len(gc.get_objects()))
            if tracemalloc.is_tracing():
                result.traced.append(tracemalloc.get_traced_memory()[0])
    result.rounds = steps
    result.seconds = time.perf_counter() - started
    result.ended = {str(reason): count for reason, count in engine.statistics.ended.items()}
    return result


def load(draft: str) -> dg.Engine:
    """The engine that is soaked: eager, four rows, a prefix cache that overflows."""
    options = dg.EngineOptions(
        device="cpu",
        lowering="eager",
        max_batch=4,
        max_context=256,
        prefill_chunk=64,
        speculative=draft != "plain",
        prefix_cache_bytes=2**23,
    )
    return dg.Engine.demo(options, draft="dflash" if draft == "dflash" else "dflash2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--draft", choices=["dflash", "dflash2", "plain"], default="dflash2")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trace", action="store_true", help="also what Python holds; slower")
    parser.add_argument("--growth", type=int, default=2**23, help="bytes the medians may differ")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.trace:
        tracemalloc.start()
    engine = load(arguments.draft)
    result = soak(engine, arguments.rounds, arguments.seed)
    engine.close()
    facts = result.facts()
    text = json.dumps(facts, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    grown = {"resident": result.resident, "traced": result.traced}
    failed = 0
    for what, samples in grown.items():
        if not samples:
            continue
        first, last = ends(samples)
        if last - first > arguments.growth:
            print(f"{what} memory grew by {last - first} bytes", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
