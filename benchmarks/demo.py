"""Tokens per second of plain decoding, DFlash and DFlash2 on the demo pair, eager and inductor.

    python benchmarks/demo.py --prompts 20 --repeats 3

One request at a time, greedy, float32 on the CPU. Engines are loaded and warmed first; then every
repeat runs all variants on each prompt in turn, so that a change of the machine's speed meets them
alike. The figures are medians over repeats of each variant's total. Texts of all variants are
compared token for token before anything is printed: a variant that differs gets no time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import dflash_graph as dg


@dataclass
class Variant:
    """One engine and what it measured."""

    lowering: str
    draft: str
    engine: dg.Engine
    start_up: float
    seconds: list[float] = field(default_factory=list)
    results: dict[int, dg.Generation] = field(default_factory=dict)

    @property
    def rounds(self) -> list[dg.RoundRecord]:
        return [record for result in self.results.values() for record in result.rounds]

    def facts(self) -> dict[str, object]:
        """The line of the table."""
        tokens = sum(len(result.token_ids) for result in self.results.values())
        records = self.rounds
        proposed = sum(record.proposed for record in records)
        return {
            "lowering": self.lowering,
            "decoding": self.draft,
            "tokens": tokens,
            "rounds": len(records),
            "tokens_per_round": round(sum(r.committed for r in records) / len(records), 3),
            "accepted_share": round(sum(r.accepted for r in records) / proposed, 3)
            if proposed
            else None,
            "tokens_per_second": round(tokens / statistics.median(self.seconds), 1),
            "spread": round(
                (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds), 3
            ),
            "start_up_seconds": round(self.start_up, 1),
        }


def load(lowering: str, draft: str, draft_tokens: int) -> Variant:
    """A warmed engine; `draft` is "plain", "dflash" or "dflash2"."""
    options = dg.EngineOptions(
        device="cpu",
        dtype="float32",
        lowering=lowering,
        max_batch=1,
        max_context=1024,
        draft_tokens=draft_tokens,
        speculative=draft != "plain",
    )
    started = time.perf_counter()
    engine = dg.Engine.demo(options, draft="dflash" if draft == "dflash" else "dflash2")
    elapsed = time.perf_counter() - started
    engine.generate([[5, 6, 7]], dg.SamplingParams(max_new_tokens=16))
    return Variant(lowering, draft, engine, elapsed)


def measure(variants: Sequence[Variant], prompts: Sequence[str], tokens: int, repeats: int) -> None:
    """Run all variants on all prompts, interleaved."""
    params = dg.SamplingParams(max_new_tokens=tokens)
    for repeat in range(repeats):
        total = [0.0] * len(variants)
        for index, prompt in enumerate(prompts):
            for place, variant in enumerate(variants):
                started = time.perf_counter()
                variant.results[index] = variant.engine.generate([prompt], params)[0]
                total[place] += time.perf_counter() - started
        for variant, seconds in zip(variants, total, strict=True):
            variant.seconds.append(seconds)
        print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr, flush=True)


def differences(variants: Sequence[Variant]) -> list[str]:
    """Variants whose text differs from the first one's anywhere."""
    reference = variants[0]
    return [
        f"{variant.lowering}/{variant.draft}: prompt {index}"
        for variant in variants[1:]
        for index, result in variant.results.items()
        if result.token_ids != reference.results[index].token_ids
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, help="demo prompts, 1..20")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=7, help="K, 1..15")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lowerings", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    variants = [
        load(lowering, draft, arguments.draft_tokens)
        for lowering in arguments.lowerings
        for draft in ("plain", "dflash", "dflash2")
    ]
    prompts = dg.demo.prompts()[: arguments.prompts]
    measure(variants, prompts, arguments.max_new_tokens, arguments.repeats)
    wrong = differences(variants)
    if wrong:
        print("texts differ, no times: " + "; ".join(wrong), file=sys.stderr)
        return 1

    rows = [variant.facts() for variant in variants]
    plain = {str(row["lowering"]): row for row in rows if row["decoding"] == "plain"}
    for row in rows:
        base = plain[str(row["lowering"])]["tokens_per_second"]
        row["speedup"] = round(float(str(row["tokens_per_second"])) / float(str(base)), 2)
    report = {
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "prompts": len(prompts),
        "draft_tokens": arguments.draft_tokens,
        "variants": rows,
    }
    print(
        f"{len(prompts)} prompts, K={arguments.draft_tokens}, {arguments.threads} thread(s), "
        f"torch {torch.__version__}, median of {arguments.repeats}; every text equal"
    )
    print("lowering  decoding  tokens/s  speed-up  rounds  tokens/round  accepted  start-up s")
    for row in rows:
        accepted = "" if row["accepted_share"] is None else f"{row['accepted_share']:.0%}"
        print(
            f"{row['lowering']:<9} {row['decoding']:<9} {row['tokens_per_second']:>7} "
            f"{row['speedup']:>8}x {row['rounds']:>7} {row['tokens_per_round']:>13} {accepted:>9} "
            f"{row['start_up_seconds']:>11}"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
