"""A bound segment: steps with their tensors resolved, ready to run again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_graph.graph import Node
from dflash_graph.passes.schedule import Schedule, Step

#: Called after a step with the step and what it stored, by value name.
Probe = Callable[[Step, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Launch:
    """One bound step: `run()` returns what to store, in the order of `stored`, or None where it has
    stored it itself.
    """

    step: Step
    run: Callable[[], Sequence[Tensor] | None]
    stored: tuple[str, ...]
    views: tuple[Tensor, ...]


class Segment:
    """Bound steps of one schedule.

    Args:
        schedule: what runs.
        launches: its steps, bound.
    """

    def __init__(self, schedule: Schedule, launches: Sequence[Launch]) -> None:
        self.schedule = schedule
        self.launches = tuple(launches)

    @torch.no_grad()
    def run(self, probe: Probe | None = None) -> None:
        """Run all steps in order; `probe` sees each step's stored values before a later step reuses
        their bytes.
        """
        for launch in self.launches:
            results = launch.run()
            if results is not None:
                for view, value in zip(launch.views, results, strict=True):
                    view.copy_(value)
            if probe is not None:
                probe(launch.step, dict(zip(launch.stored, launch.views, strict=True)))


def bind_op(node: Node, tensors: Mapping[str, Tensor]) -> Callable[[], Sequence[Tensor]]:
    """A call of the op's reference with its arguments resolved."""
    arguments: dict[str, Any] = {
        argument: tensors[names] if isinstance(names, str) else [tensors[name] for name in names]
        for argument, names in node.inputs.items()
    }
    arguments.update(node.attributes)
    reference = node.contract.reference

    def run() -> Sequence[Tensor]:
        results = reference(**arguments)
        if results is None:
            return ()
        return results if isinstance(results, tuple) else (results,)

    return run


def bind_step(schedule: Schedule, index: int, tensors: Mapping[str, Tensor]) -> Launch:
    """Bind a single-op step."""
    step = schedule.steps[index]
    (node,) = step.nodes
    stored = tuple(node.outputs.values())
    return Launch(step, bind_op(node, tensors), stored, tuple(tensors[name] for name in stored))
