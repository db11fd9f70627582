"""A few rounds of the demo pair by kernels, uncaptured: what compute-sanitizer watches.

compute-sanitizer --tool racecheck python tests/rounds/sanitized.py
"""

from __future__ import annotations

import dflash_graph as dg


def main() -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = [
        dg.SamplingParams(max_new_tokens=12, ignore_eos=True),
        dg.SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4),
    ]
    for draft in ("dflash", "dflash2"):
        options = dg.EngineOptions(
            device="cuda",
            lowering="triton",
            dtype="bfloat16",
            max_batch=2,
            max_context=128,
            prefill_chunk=16,
            cuda_graphs=False,
        )
        with dg.Engine.demo(options, draft=draft) as engine:
            for law in ([params[0]] * 2, params):
                print([r.token_ids for r in engine.generate(prompts, law)])


if __name__ == "__main__":
    main()
