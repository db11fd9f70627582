"""tree: what a round costs that verifies a tree of drafts, by the columns of declared graphs.

No graph declares such a round yet. A tree of N nodes at each of K depths is verified in W = 1 + K N
columns: the anchor, the main chain, and (N - 1) K side columns. Its draft is the chain's own, since
a tree is drawn from the same lattice, and it commits a path, which has at most the chain's columns.
So verify and accept are those of a declared round of W columns, and materialize, propose and commit
those of the round of K drafts. Left out is what only a tree does: picking its nodes, recurrent
states that wait at a branch, the copy of accepted side columns onto the main chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dflash_graph.errors import OptionError
from dflash_graph.frame import FrameLayout, layout
from dflash_graph.graph import Graph, Node, Role, Value
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round
from dflash_graph.op import Cost
from dflash_graph.options import MAX_DRAFT_TOKENS
from dflash_graph.passes.combine import combine

#: Leaves that a tree may have; with N nodes at the last depth it has at least N.
MAX_LEAVES: Final = 8

_VERIFY: Final = ("verify", "accept")

Segments = tuple[Graph, ...]


def tree_columns(pair: ModelPair, draft_tokens: int, width: int) -> int:
    """W of a round that verifies `width` nodes at each of K depths; K + 1 for a chain (width 1).

    Raises:
        OptionError: no graph can be declared for it, or the draft has no candidates to draw from.
    """
    most = 1
    if not draft_tokens:
        why = "plain decoding has no drafts"
    elif pair.draft is None or pair.draft.selector is None:
        why = f"a tree is drawn from a dflash2 draft's candidates, got {pair.draft_name}"
    else:
        candidates = pair.draft.selector.top_k
        most = max(1, min(MAX_DRAFT_TOKENS // draft_tokens, MAX_LEAVES, candidates))
        why = (
            f"graphs are declared for at most {MAX_DRAFT_TOKENS + 1} columns; a tree has at most "
            f"{MAX_LEAVES} leaves and {candidates} candidates"
        )
    if not 1 <= width <= most:
        raise OptionError(
            f"tree_width: expected {f'1..{most}' if most > 1 else 1} with K = {draft_tokens} "
            f"({why}), got {width} (W = {1 + draft_tokens * width})"
        )
    return 1 + draft_tokens * width


def declare_wide(
    pair: ModelPair, chain: Mapping[str, Segments], columns: int
) -> dict[str, Segments]:
    """Rounds of W columns in the place of a start-up's rounds, by the same names."""
    wide: dict[str, Segments] = {}
    for name, graphs in chain.items():
        key = graphs[0].key
        if key.segment == "forward":
            wide[name] = declare_round(
                pair,
                key.backend,
                draft_tokens=columns - 1,
                batch=key.batch,
                sampling=name.startswith("sampling"),
            ).segments
    return wide


def round_costs(chain: Segments, wide: Segments, context: int) -> Iterator[Cost]:
    """Costs of the nodes that run: verify and accept of `wide`, the others of `chain`."""
    for graphs, is_wide in ((chain, False), (wide, True)):
        for graph in map(combine, graphs):
            costs = graph.cost(context=context)
            yield from (costs[n.name] for n in graph.nodes if _is_verify(n) is is_wide)


def frame_layout(
    chain: Segments, wide: Segments, role: Role, capacities: Mapping[str, int]
) -> FrameLayout:
    """A frame whose fields are as wide as those who read or write them."""
    return layout(list(_fields(chain, wide, role)), capacities)


def _fields(chain: Sequence[Graph], wide: Sequence[Graph], role: Role) -> Iterator[Value]:
    for narrow, other in zip(chain, wide, strict=True):
        seen = {
            name
            for node in other.nodes
            if _is_verify(node)
            for name in (*(name for _, name in node.operands()), *node.outputs.values())
        }
        for value in narrow.by_role(role):
            yield other.values[value.name] if value.name in seen else value


def _is_verify(node: Node) -> bool:
    return node.region.partition("/")[0] in _VERIFY
