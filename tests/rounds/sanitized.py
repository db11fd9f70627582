"""Kernels of the demo pair's rounds over random state, uncaptured: what compute-sanitizer watches.

compute-sanitizer --tool racecheck python tests/rounds/sanitized.py dflash2

Prefill stays out: its kernels are a library's, which tunes them at the first chunk.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

import dflash_graph as dg
from dflash_graph.ahead_of_time import precompile
from dflash_graph.bench.rounds import fill_state, round_frame
from dflash_graph.executors import Executor, RoundExecutor, compile_segments, new_arena
from dflash_graph.kernels import cases_of
from dflash_graph.models.round import declare_startup, declare_state
from dflash_graph.profile_store import device_identity, lookup
from dflash_graph.state import Capacities, StatePools, plan_state

DRAFTS, BATCH, CONTEXT = 7, 2, 70


def main(draft: str) -> None:
    options = dg.EngineOptions(device="cuda", lowering="triton", dtype="bfloat16")
    model = dg.Model.load(dg.demo.target_directory(), dg.demo.draft_directory(draft), options)
    choices = lookup(device_identity(), None)
    capacities = Capacities(BATCH, 192)
    declared = declare_startup(
        model.pair, "triton", draft_tokens=DRAFTS, max_batch=BATCH, prefill_chunk=16
    )
    compiled = {
        name: compile_segments(graphs, capacities, choices)
        for name, graphs in declared.items()
        if not name.startswith("prefill")
    }
    graphs = [graph for found in compiled.values() for graph in found.graphs]
    precompile(cases_of(graphs, choices), choices.capability)
    arena = new_arena([found.plan for found in compiled.values()], "cuda")
    state = StatePools(plan_state(declare_state(model.pair, DRAFTS + 1), capacities), "cuda")
    rounds = SimpleNamespace(arena=arena, state=state, columns=DRAFTS + 1, capacities=capacities)
    fill_state(rounds)
    sampled = {"temperature": [0.0, 0.9], "top_p": [1.0, 0.9], "presence": [0.0, 0.5]}
    for name, found in compiled.items():
        parts = (found, arena, model.weights, state.tensors, "triton")
        if "B=" not in name:
            small = Executor(*parts)
            small.run()
            print(name, {field: small.outputs.read(field) for field in small.outputs.layout.fields})
            continue
        executor = RoundExecutor(*parts)
        fields = round_frame(rounds, executor.batch, CONTEXT)
        fields |= {field: values[-executor.batch :] for field, values in sampled.items()}
        executor.forward({field: v for field, v in fields.items() if field in executor.inputs})
        executor.finish([DRAFTS + 1, 3][-executor.batch :])
        torch.cuda.synchronize()
        print(name, executor.outputs.read(f"{executor.law}.accepted"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
