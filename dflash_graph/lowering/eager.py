"""eager: every op runs its reference; results go to their place in the arena. The oracle, on CPU
and GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dflash_graph.lowering.segment import Segment, bind_step
from dflash_graph.passes.schedule import Schedule


def bind(schedule: Schedule, tensors: Mapping[str, Tensor]) -> Segment:
    """Bind a schedule of single ops.

    Args:
        tensors: every value of the graph that is stored: arena views, frame fields, weights, state.
    """
    return Segment(schedule, [bind_step(schedule, i, tensors) for i in range(len(schedule.steps))])
