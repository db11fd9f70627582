"""bench: how long a round takes beside the floor that memory bandwidth sets."""

from dflash_graph.bench.document import bench_document, bench_text
from dflash_graph.bench.floor import floor_bytes, read_ceiling
from dflash_graph.bench.rounds import (
    RoundTimes,
    fill_state,
    measure_round,
    play_round,
    require_context,
    require_launches,
    round_frame,
    round_with,
)

__all__ = [
    "RoundTimes",
    "bench_document",
    "bench_text",
    "fill_state",
    "floor_bytes",
    "measure_round",
    "play_round",
    "read_ceiling",
    "require_context",
    "require_launches",
    "round_frame",
    "round_with",
]
