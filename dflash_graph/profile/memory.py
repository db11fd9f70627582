"""memory: what a start-up takes by class, as it is planned and as it was allocated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dflash_graph.executors import Compiled
from dflash_graph.profile.parts import MemoryClass
from dflash_graph.report import weight_bytes
from dflash_graph.rounds import Rounds
from dflash_graph.state import StatePlan


def planned_memory(state: StatePlan, compiled: Iterable[Compiled]) -> tuple[MemoryClass, ...]:
    """What a start-up will allocate, by class."""
    compiled = tuple(compiled)
    weights = weight_bytes(
        value.weight
        for found in compiled
        for graph in found.graphs
        for value in graph.by_role("weight")
        if value.weight is not None
    )
    kinds = {f"state.{kind}": total for kind, (_, _, total) in state.kinds().items()}
    planned: dict[str, int | None] = {
        **{f"weights.{owner}": nbytes for owner, nbytes in sorted(weights.items())},
        **kinds,
        "state.alignment": state.nbytes - sum(kinds.values()),
        "arena": max(found.plan.arena_bytes for found in compiled),
        "frames": sum(found.inputs.nbytes + found.outputs.nbytes for found in compiled),
        "graphs": None,
    }
    return tuple(MemoryClass(name=name, planned_bytes=size) for name, size in planned.items())


def actual_memory(rounds: Rounds) -> tuple[MemoryClass, ...]:
    """Plan beside what the tensors of a start-up take. Chunks of prefill are bound when they are
    needed, so frames may be fewer than planned.
    """
    planned = planned_memory(rounds.state_plan, rounds.compiled.values())
    owners: dict[str, list[Tensor]] = {}
    for use, tensor in rounds.model.weights.items():
        owners.setdefault(use.parts[0].partition("/")[0], []).append(tensor)
    actual: dict[str, Any] = {
        f"weights.{owner}": distinct_bytes(tensors) for owner, tensors in owners.items()
    }
    pools: dict[str, int] = {}
    for pool in rounds.state_plan.pools:
        tensor = rounds.state.tensors[pool.name]
        pools[f"state.{pool.kind}"] = pools.get(f"state.{pool.kind}", 0) + tensor.nbytes
    actual |= pools
    actual["state.alignment"] = rounds.state.storage.nbytes - sum(pools.values())
    actual["arena"] = rounds.arena.nbytes
    actual["frames"] = sum(
        executor.inputs.buffer.nbytes + executor.outputs.buffer.nbytes
        for executor in rounds.executors().values()
    )
    actual["graphs"] = rounds.graph_bytes
    return tuple(
        found.model_copy(update={"actual_bytes": actual.get(found.name)}) for found in planned
    )


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of contiguous tensors, where what several share counts once."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
