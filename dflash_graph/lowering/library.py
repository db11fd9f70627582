"""library: prefill as calls of torch's (and fla-core's) own kernels, in the model dtype with
float32 accumulation.

For graphs of one request, whose products run over hundreds of rows. Where a run's columns lie is
read from the frame once, at its start; everything after is launched without looking at the device.
An op without a rule, or one that promises row-invariant bits (`tiled`), runs its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash_graph.graph import Graph, Node
from dflash_graph.lowering.rules import RULES, Chunk
from dflash_graph.lowering.segment import Launch, Probe, Segment, bind_step
from dflash_graph.passes.schedule import Schedule

#: Arguments that say where a run's columns lie, and the field of `Chunk` that each fills.
_PLACES: Final = {"start": "start", "live": "live", "committed": "live", "slots": "slot"}
#: cuDNN is left out: it builds a plan for every new length.
_ATTENTION: Final = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class LibrarySegment(Segment):
    """A segment that learns where its columns lie before its first step.

    Args:
        schedule: what runs.
        launches: its steps, bound to `chunk`.
        chunk: what they ask.
        places: int32 `[1]`, the frame field behind each field of `chunk`.
    """

    def __init__(
        self,
        schedule: Schedule,
        launches: Sequence[Launch],
        chunk: Chunk,
        places: Mapping[str, Tensor],
    ) -> None:
        super().__init__(schedule, launches)
        self._chunk = chunk
        self._places = dict(places)

    def run(self, probe: Probe | None = None) -> None:
        if self._places:
            # The one wait for the device.
            numbers = torch.cat(tuple(self._places.values())).tolist()
            for field, number in zip(self._places, numbers, strict=True):
                setattr(self._chunk, field, number)
        with _full_sums(), sdpa_kernel(_ATTENTION):
            super().run(probe)


def bind(schedule: Schedule, tensors: Mapping[str, Tensor]) -> Segment:
    """Bind a schedule of single ops over one request.

    Args:
        tensors: every value of the graph that is stored: arena views, frame fields, weights, state.
    """
    key = schedule.graph.key
    assert key.batch == 1, f"the library lowering runs one request at a time, got {key}"
    chunk = Chunk(live=key.columns)
    places = {field: tensors[name] for field, name in _places(schedule.graph).items()}
    launches = [_bind_step(schedule, i, tensors, chunk) for i in range(len(schedule.steps))]
    return LibrarySegment(schedule, launches, chunk, places)


def _places(graph: Graph) -> dict[str, str]:
    """The value behind each field of a chunk; all rules of a graph mean the same columns."""
    names: dict[str, str] = {}
    for node in graph.nodes:
        if _rule(node) is None:
            continue
        for argument, field in _PLACES.items():
            name = node.inputs.get(argument)
            if isinstance(name, str):
                known = names.setdefault(field, name)
                assert known == name, f"{node.name}.{argument}: {name!r}, elsewhere {known!r}"
    return names


def _bind_step(
    schedule: Schedule, index: int, tensors: Mapping[str, Tensor], chunk: Chunk
) -> Launch:
    step = schedule.steps[index]
    (node,) = step.nodes
    rule = _rule(node)
    if rule is None:
        return bind_step(schedule, index, tensors)
    stored = tuple(node.outputs.values())
    views = tuple(tensors[name] for name in stored)
    call = partial(
        rule,
        chunk,
        **{
            argument: tensors[names] if isinstance(names, str) else [tensors[n] for n in names]
            for argument, names in node.inputs.items()
        },
        **dict(zip(node.outputs, views, strict=True)),
        **node.attributes,
    )
    return Launch(step, call, stored, views)


def _rule(node: Node) -> Callable[..., None] | None:
    """The rule of a node, or None if its reference runs."""
    if node.op in ("linear", "context_kv") and node.attributes["tiled"]:
        return None
    return RULES.get(node.op)


@contextmanager
def _full_sums() -> Iterator[None]:
    """cuBLAS adds the parts of a split bfloat16 product in float32."""
    matmul = torch.backends.cuda.matmul
    kept = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = kept
