"""The kernels that graphs need: of one node, of a pair's rounds, of the presets that ship."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from dflash_graph.choices import Choices
from dflash_graph.errors import OptionError
from dflash_graph.graph import Graph, Node
from dflash_graph.kernels.registry import KernelCase, kernel_case
from dflash_graph.models.pair import ModelPair, preset_pair
from dflash_graph.models.round import declare_startup
from dflash_graph.options import MAX_BATCH, MAX_DRAFT_TOKENS
from dflash_graph.passes.combine import combine
from dflash_graph.profiles import preset_names


def node_case(graph: Graph, node: Node, choices: Choices | None = None) -> KernelCase | None:
    """The kernel of a node, or None where it has no template."""
    return kernel_case(
        node.op, graph.specs(node), node.attributes, choices=choices, model_dtype=graph.key.dtype
    )


def required_case(graph: Graph, node: Node, choices: Choices | None = None) -> KernelCase:
    """The kernel of a node; raises OptionError where it has no template."""
    case = node_case(graph, node, choices)
    if case is None:
        raise OptionError(
            f"lowering: {node.name} ({node.op}) has no Triton kernel for "
            f"{', '.join(f'{name}={value}' for name, value in node.attributes.items()) or 'it'}; "
            "use 'eager' or 'inductor'"
        )
    return case


def kernel_cases(
    pair: ModelPair,
    choices: Choices | None = None,
    *,
    draft_tokens: int = MAX_DRAFT_TOKENS,
    max_batch: int = MAX_BATCH,
) -> tuple[KernelCase, ...]:
    """Every distinct kernel of a pair's rounds, in order of first use.

    Kernels follow the rows of a round by their row tile alone, so those of the largest K and batch
    are the kernels of every smaller choice too.
    """
    return cases_of(_graphs(pair, draft_tokens, max_batch), choices)


def shipped_cases(choices: Choices | None = None) -> tuple[KernelCase, ...]:
    """Every distinct kernel of the presets that ship: bfloat16, and float32 for the demo pairs.

    Args:
        choices: of one device; the templates' defaults if None.
    """
    return cases_of(shipped_graphs(), choices)


@cache
def shipped_graphs() -> tuple[Graph, ...]:
    """The combined graphs of the presets that ship.

    Declared once: defaults and the choices of each device are looked up in the same graphs.
    """
    return tuple(
        graph for pair in _shipped_pairs() for graph in _graphs(pair, MAX_DRAFT_TOKENS, MAX_BATCH)
    )


def _graphs(pair: ModelPair, draft_tokens: int, max_batch: int) -> Iterator[Graph]:
    """The combined graphs of a pair's rounds."""
    segments = declare_startup(
        pair, "triton", draft_tokens=draft_tokens, max_batch=max_batch, prefill_chunk=1
    )
    for group in segments.values():
        for graph in group:
            if graph.key.backend == "triton":
                yield combine(graph)


def cases_of(graphs: Iterable[Graph], choices: Choices | None) -> tuple[KernelCase, ...]:
    """Every distinct kernel of the nodes of combined graphs, in order of first use."""
    cases = (node_case(graph, node, choices) for graph in graphs for node in graph.nodes)
    return tuple(dict.fromkeys(case for case in cases if case is not None))


def _shipped_pairs() -> Iterator[ModelPair]:
    for name in preset_names():
        for dtype in ("bfloat16", "float32") if name.startswith("demo") else ("bfloat16",):
            yield preset_pair(name, dtype)
