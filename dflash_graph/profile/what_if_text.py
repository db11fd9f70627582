"""what_if_text: what-ifs as plain tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dflash_graph.profile.text import narrowed
from dflash_graph.profile.what_if import Fits, Scenario
from dflash_graph.report import size_text


def scenarios_text(found: Iterable[Scenario]) -> str:
    """What-ifs, a line each; what only trees have is there if one of them is a tree."""
    found = tuple(found)
    has_trees = any(one.tree_width > 1 for one in found)
    rows = [
        (
            str(one.draft_tokens),
            str(one.tree_width) if has_trees else "",
            str(one.columns),
            str(one.max_batch),
            str(one.max_context),
            size_text(one.weights),
            size_text(one.state),
            size_text(one.arena),
            size_text(one.frames),
            size_text(one.total),
            size_text(one.round_bytes),
            f"{one.round_flops / 1e9:.1f}",
            f"{one.round_floor_us / 1e3:.3f}",
            f"{one.break_even:.4f}" if one.tree_width > 1 else "",
            f"{one.most_chain_tokens:.3f}" if one.tree_width > 1 else "",
        )
        for one in found
    ]
    memory = ("weights", "state", "arena", "frames", "total")
    round_ = ("moved", "GFLOP", "floor ms", "break even", "chain at most")
    return narrowed(("K", "width", "W", "B", "context", *memory, *round_), rows)


def break_even_text(found: Iterable[Scenario], tokens: Mapping[int, float]) -> str:
    """What a round of each chain publishes, and what a tree must publish to be as fast.

    Args:
        found: what-ifs.
        tokens: K -> tokens a round of the chain.
    """
    rows = []
    for one in found:
        chain = tokens[one.draft_tokens]
        needed = one.needed_tokens(chain)
        of_tree = ("never",) * 2 if needed is None else (f"{needed:.3f}", f"{needed - 1:.3f}")
        rows.append(
            (
                *map(str, (one.draft_tokens, one.tree_width, one.max_batch, one.max_context)),
                f"{chain:.3f}",
                f"{chain - 1:.3f}",
                *(of_tree if one.tree_width > 1 else ("", "")),
            )
        )
    chain_head = ("chain tokens", "chain accepts")
    head = ("K", "width", "B", "context", *chain_head, "tree needs tokens", "tree must accept")
    return narrowed(head, rows)


def fits_text(fits: Fits) -> str:
    """What fits a device with one K and tree width."""
    width = f", width {fits.tree_width}" if fits.tree_width > 1 else ""
    lines = [f"K = {fits.draft_tokens}{width} on {size_text(fits.memory_bytes)}"]
    for batch, tokens in fits.by_batch.items():
        most = "does not fit" if tokens is None else f"up to {tokens} tokens of context"
        lines.append(f"  B = {batch}: {most}")
    for context, requests in fits.by_context.items():
        most = "does not fit" if requests is None else f"up to B = {requests}"
        lines.append(f"  {context} tokens of context: {most}")
    return "\n".join(lines) + "\n"
