"""inductor: traced steps are compiled by `torch.compile(fullgraph=True, dynamic=False)`.

A traced step becomes a small Python function over its references, one line an op. Its text, with
the specs of its arguments, is the key: layers that are alike share one compiled function and differ
only in the tensors bound to it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from dflash_graph.graph import Node
from dflash_graph.lowering.segment import Launch, Segment, bind_step
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op, op_names
from dflash_graph.passes.schedule import Schedule


def bind(schedule: Schedule, tensors: Mapping[str, Tensor]) -> Segment:
    """Bind a fused schedule; compilation itself happens at the first run: the warm-up of
    `Rounds`.

    Args:
        tensors: every value of the graph that is stored: arena views, frame fields, weights, state.
    """
    launches = [
        _bind_traced(schedule, index, tensors)
        if step.kind == "traced"
        else bind_step(schedule, index, tensors)
        for index, step in enumerate(schedule.steps)
    ]
    return Segment(schedule, launches)


def step_source(schedule: Schedule, index: int, tensors: Mapping[str, Tensor]) -> str:
    """Python text of a traced step; equal for steps that differ only in which tensors they bind."""
    inputs, stored = schedule.inputs(index), schedule.escapes(index)
    names = {value: f"a{position}" for position, value in enumerate(inputs)}
    lines = [f"# {name}: {spec_of(tensors[value])}" for value, name in names.items()]
    lines.append(f"def step({', '.join(names.values())}):")
    for node in schedule.steps[index].nodes:
        for value in node.outputs.values():
            names[value] = f"v{len(names)}"
        lines.append(f"    {_call(node, names)}")
    lines.append(f"    return ({', '.join(names[value] for value in stored)},)")
    return "\n".join(lines) + "\n"


def _call(node: Node, names: Mapping[str, str]) -> str:
    arguments = [
        f"{argument}={names[value]}"
        if isinstance(value, str)
        else f"{argument}=[{', '.join(names[one] for one in value)}]"
        for argument, value in node.inputs.items()
    ]
    arguments += [f"{name}={value!r}" for name, value in node.attributes.items()]
    results = ", ".join(names[value] for value in node.outputs.values())
    return f"{results} = {node.op}({', '.join(arguments)})"


@cache
def _compile(source: str) -> Callable[..., Sequence[Tensor]]:
    """The compiled function of a step's text; one per process and text."""
    name = f"<dflash_graph step {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = _References()
    exec(compile(source, name, "exec"), scope)
    compiled: Callable[..., Sequence[Tensor]] = torch.compile(
        scope["step"],
        fullgraph=True,
        dynamic=False,
        options={"cpp.enable_floating_point_contract_flag": "off"},
    )
    return compiled


class _References(dict[str, Any]):
    """Globals of a step's text: an op's name stands for its reference."""

    def __init__(self) -> None:
        super().__init__({name: get_op(name).reference for name in op_names()})


def _bind_traced(schedule: Schedule, index: int, tensors: Mapping[str, Tensor]) -> Launch:
    stored = schedule.escapes(index)
    function = _compile(step_source(schedule, index, tensors))
    arguments = tuple(tensors[name] for name in schedule.inputs(index))
    return Launch(
        schedule.steps[index],
        lambda: function(*arguments),
        stored,
        tuple(tensors[name] for name in stored),
    )
