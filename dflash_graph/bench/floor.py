"""The floor of a round: the bytes of its weights over what this device's memory gives to reads."""

from __future__ import annotations

from functools import partial

import torch

from dflash_graph.bench.timing import captured, medians
from dflash_graph.graph import Graph
from dflash_graph.report import storages

_CEILING_BYTES = 4 << 30


def floor_bytes(forward: Graph) -> int:
    """Bytes of weights that a forward segment must read: each once for every use, gathered tables
    not counted, nor a weight that another use holds.

    For the 27B with DFlash2: 51.25 GB of verify and 6.13 GB of materialize and propose, where the
    head counts in both, and the draft's key and value weights once for context and block.
    """
    read = []
    for node in forward.nodes:
        reads = node.contract.reads
        for argument, name in node.operands():
            value = forward.values[name]
            # Tables are read by rows: their contract says how many.
            is_table = argument in reads and not node.op.startswith("head_")
            if value.weight is not None and not is_table:
                read.append(value.weight)
    stored = set(storages(read))
    return sum(use.spec.nbytes() for use in read if use in stored)


def read_ceiling(turns: int = 20) -> float:
    """TB/s of a kernel that only reads 4 GiB, median."""
    from dflash_graph.bench.read_kernel import BLOCK, read_all

    source = torch.zeros(_CEILING_BYTES // 4, dtype=torch.int32, device="cuda")
    sums = torch.empty(source.numel() // BLOCK.value, dtype=torch.int32, device="cuda")
    graph = captured(partial(read_all, source, sums))
    return _CEILING_BYTES / medians([graph.replay], turns)[0] / 1e6
