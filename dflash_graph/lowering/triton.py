"""triton: every op is its kernel, bound to arena views once; a run launches and allocates nothing.

An op without a kernel has no place in a captured round: binding one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dflash_graph.errors import GraphError
from dflash_graph.graph import Graph, Node
from dflash_graph.kernels import required_case
from dflash_graph.lowering.segment import Launch, Segment
from dflash_graph.passes.schedule import Schedule


def bind(schedule: Schedule, tensors: Mapping[str, Tensor]) -> Segment:
    """Bind a schedule of single ops.

    Args:
        tensors: every value of the graph that is stored, and the workspace of each step.

    Raises:
        OptionError: a node has no kernel.
        GraphError: a kernel reads ahead what a launch of the segment writes.
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
    case = required_case(schedule.graph, node, schedule.choices)
    bound: dict[str, Any] = {
        argument: tensors[names] if isinstance(names, str) else [tensors[name] for name in names]
        for argument, names in node.inputs.items()
    }
    bound.update({output: tensors[name] for output, name in node.outputs.items()})
    module = case.module()
    check_ahead(schedule.graph, node, getattr(module, "AHEAD", ()))
    if hasattr(module, "prepare"):
        bound.update(module.prepare(**bound))
    bound.update({name: node.attributes[name] for name in case.scalars})
    if case.workspace:
        assert workspace is not None, f"{node.name}: its workspace was not planned"
        bound["workspace"] = workspace
    bound.update(num_warps=case.num_warps, num_stages=case.num_stages)
    launch: Callable[..., None] = module.launch
    return lambda: launch(**bound)


def check_ahead(graph: Graph, node: Node, ahead: Sequence[str]) -> None:
    """Refuse a node that would read, before it waits, what may still be on its way.

    A launch is let in once all launches before the last one are done. So weights may be read ahead
    anywhere; inputs and state where nothing in the segment writes them, but for its first launch:
    what ended the segment before may still run then.

    Args:
        ahead: arguments of the op that its kernels read ahead; those it was not given are skipped.

    Raises:
        GraphError: names the node and the value.
    """
    for argument, name in node.operands():
        if argument not in ahead or graph.values[name].role == "weight":
            continue
        is_first = node.name == graph.nodes[0].name
        if is_first or name in graph.updated or graph.values[name].role not in ("input", "state"):
            raise GraphError(
                f"{node.name}.{argument}: its kernel reads {name!r} before it waits, which needs a "
                "weight, or an input or state that no launch of the segment writes"
            )
