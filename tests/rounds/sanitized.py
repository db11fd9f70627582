"""A few rounds of the demo pair by kernels, uncaptured: what compute-sanitizer watches.

compute-sanitizer --tool racecheck python tests/rounds/sanitized.py dflash2
"""

from __future__ import annotations

import sys

import dflash_graph as dg


def main(draft: str) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    greedy = dg.SamplingParams(max_new_tokens=8, ignore_eos=True)
    sampled = greedy.replace(temperature=0.9, top_p=0.9, seed=4)
    options = dg.EngineOptions(
        device="cuda",
        lowering="triton",
        dtype="bfloat16",
        max_batch=2,
        max_context=128,
        prefill_chunk=16,
        cuda_graphs=False,
    )
    with dg.Engine.demo(options, draft=draft) as engine:  # type: ignore[arg-type]
        for laws in ([greedy, greedy], [greedy, sampled]):
            print([r.token_ids for r in engine.generate(prompts, laws)], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
