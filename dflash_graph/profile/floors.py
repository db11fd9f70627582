"""floors: what a node needs at least, and what limits it."""

from __future__ import annotations

from typing import Final

from dflash_graph.profile.parts import Bound, Ceiling, NodeProfile

#: A floor below what one launch takes says nothing: latency bounds such a node.
LAUNCH_US: Final = 2.0

#: A node that takes more than this many times its floor is bound by neither memory nor arithmetic.
SLACK: Final = 3.0


def floor_us(nbytes: int, flops: int, ceiling: Ceiling) -> float:
    """Microseconds that traffic and operations need at the ceiling."""
    return max(_memory_us(nbytes, ceiling), _compute_us(flops, ceiling))


def node_floor_us(node: NodeProfile, ceiling: Ceiling) -> float:
    """A node's floor at another ceiling than its profile's."""
    return floor_us(node.read_bytes + node.write_bytes, node.flops, ceiling)


def bound_of(nbytes: int, flops: int, ceiling: Ceiling, measured_us: float | None) -> Bound:
    """What limits a node: memory, arithmetic, or neither."""
    floor = floor_us(nbytes, flops, ceiling)
    is_slow = measured_us is not None and measured_us > SLACK * floor
    if is_slow or (measured_us is None and floor < LAUNCH_US):
        return "latency"
    is_compute = _compute_us(flops, ceiling) > _memory_us(nbytes, ceiling)
    return "compute" if is_compute else "memory"


def _memory_us(nbytes: int, ceiling: Ceiling) -> float:
    return nbytes / ceiling.read_tb_per_s / 1e6


def _compute_us(flops: int, ceiling: Ceiling) -> float:
    return flops / ceiling.tflop_per_s / 1e6 if ceiling.tflop_per_s else 0.0
