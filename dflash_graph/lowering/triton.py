"""triton: every op is its kernel, bound to arena views once; a run launches and allocates nothing.

An op without a kernel has no place in a captured round: binding one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dflash_graph.errors import OptionError
from dflash_graph.graph import Node
from dflash_graph.kernels import node_case
from dflash_graph.lowering.segment import Launch, Segment
from dflash_graph.passes.schedule import Schedule


def bind(schedule: Schedule, tensors: Mapping[str, Tensor]) -> Segment:
    """Bind a schedule of single ops.

    Args:
        tensors: every value of the graph that is stored, and the workspace of each step.

    Raises:
        OptionError: a node has no kernel.
    """
    launches = []
    for index, step in enumerate(schedule.steps):
        (node,) = step.nodes
        workspace = tensors.get(schedule.workspace_name(index))
        run = bind_kernel(schedule, node, tensors, workspace)
        stored = tuple(node.outputs.values())
        launches.append(Launch(step, run, stored, tuple(tensors[name] for name in stored)))
    return Segment(schedule, launches)


def bind_kernel(
    schedule: Schedule, node: Node, tensors: Mapping[str, Tensor], workspace: Tensor | None
) -> Callable[[], None]:
    """A launch of the node's kernels with everything resolved."""
    case = node_case(schedule.graph, node, schedule.choices)
    if case is None:
        raise OptionError(
            f"lowering: {node.name} ({node.op}) has no Triton kernel; use 'eager' or 'inductor'"
        )
    bound: dict[str, Any] = {
        argument: tensors[names] if isinstance(names, str) else [tensors[name] for name in names]
        for argument, names in node.inputs.items()
    }
    bound.update({output: tensors[name] for output, name in node.outputs.items()})
    module = case.module()
    if hasattr(module, "prepare"):
        bound.update(module.prepare(**bound))
    bound.update({name: node.attributes[name] for name in case.scalars})
    if case.workspace:
        assert workspace is not None, f"{node.name}: its workspace was not planned"
        bound["workspace"] = workspace
    bound.update(num_warps=case.num_warps, num_stages=case.num_stages)
    launch: Callable[..., None] = module.launch
    return lambda: launch(**bound)
