"""`profile what-if`: memory and floor of other K, trees, B and contexts, from configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, write
from dflash_graph.cli.profile_acceptance import read_counts
from dflash_graph.cli.profile_build import Context, FlopCeiling, ceiling_of, finite
from dflash_graph.cli.selection import (
    DeviceProfile,
    Draft,
    Dtype,
    GraphBackend,
    GraphDtype,
    Lowering,
    PrefillChunk,
    Preset,
    Target,
    select_choices,
    select_pair,
)
from dflash_graph.errors import OptionError
from dflash_graph.options import MAX_BATCH, MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from dflash_graph.profile.what_if import Scenario

WHAT_IF: Final = """\b
Examples:
  dflash-graph profile what-if --preset qwen3.5-27b-dflash2 --draft-tokens 3 --draft-tokens 7
  dflash-graph profile what-if --preset qwen3.5-27b-dflash2 --max-batch 4 --memory 80GB
  dflash-graph profile what-if --preset qwen3.5-27b-dflash2 --tree-width 1 --tree-width 2
  dflash-graph profile what-if --preset demo-dflash2 --tree-width 2 --acceptance rounds.json"""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def what_if(
    preset: Preset = None,
    target: Target = None,
    draft: Draft = None,
    draft_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0, max=MAX_DRAFT_TOKENS, metavar="N", help="K; repeat for several. Default: 7."
        ),
    ] = None,
    tree_width: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Branches at each of K depths of a tree: W = 1 + K N columns are verified. Repeat "
            "for several. Default: 1, a chain.",
        ),
    ] = None,
    max_batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=MAX_BATCH, metavar="N", help="B; repeat for several. Default: 1, 2, 4, 8."
        ),
    ] = None,
    max_context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of a request; repeat for several. Default: 8192."
        ),
    ] = None,
    context: Context = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of a device, such as 80GB: what fits it is searched."
        ),
    ] = None,
    context_limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="The longest context that is searched.")
    ] = 1 << 20,
    prefill_chunk: PrefillChunk = 1024,
    backend: GraphBackend = Lowering.eager,
    dtype: GraphDtype = Dtype.bfloat16,
    device_profile: DeviceProfile = None,
    ceiling: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            callback=finite,
            metavar="TB/S",
            help="What memory gives to reads. Default: 4.6.",
        ),
    ] = None,
    tflops: FlopCeiling = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A profile with counts, or what generate --json printed: what chains publish, and "
            "what trees must.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print memory and floor of other K, trees, B and contexts, and what fits a device. Reads no
    weights.

    A tree of N nodes at each of K depths is verified in W = 1 + K N columns: weights are read once
    as for a chain; keys, values, scratch, records and scores grow with W. It is drawn from the
    chain's own draft, and commits at most K + 1 columns. What only a tree does (picking its nodes,
    states that wait at a branch, moving accepted side columns) is not counted: it comes on top.

    break even: how many times the chain's tokens a round must publish to be as fast, by the floors.
    chain at most: where the chain publishes more than this, no tree of this K can be faster.

    Captured graphs and the driver's own memory come on top; leave room for them in --memory.
    """
    given = sorted(set(draft_tokens or ()))
    pair, columns = select_pair(preset, target, draft, max(given, default=None), dtype)
    found_k = given or [columns]
    batches = sorted(set(max_batch or (1, 2, 4, 8)))
    contexts = sorted(set(max_context or (8192,)))
    size = None if memory is None else parse_size(memory)
    choices = select_choices(device_profile, backend)
    from dflash_graph.profile import what_if_text as text
    from dflash_graph.profile.acceptance import expected_tokens
    from dflash_graph.profile.what_if import Footprint, scenarios_of

    tokens = None
    if acceptance is not None:
        counts = read_counts(acceptance)
        tokens = {k: expected_tokens(counts, k) for k in found_k}
    footprints = [
        Footprint(
            pair,
            backend.value,
            draft_tokens=k,
            tree_width=width,
            max_batch=MAX_BATCH if size is not None else batches[-1],
            prefill_chunk=prefill_chunk,
            choices=choices,
        )
        for k in found_k
        for width in sorted(set(tree_width or (1,)))
    ]
    found = scenarios_of(footprints, batches, contexts, context, ceiling_of(ceiling, tflops))
    fits = (
        []
        if size is None
        else [one.fits(size, batches, contexts, context_limit) for one in footprints]
    )
    if as_json:
        print_json(
            {
                "scenarios": [_facts(one, tokens) for one in found],
                "fits": [asdict(one) for one in fits],
            }
        )
        return
    blocks = [text.scenarios_text(found)]
    if tokens is not None:
        blocks.append(text.break_even_text(found, tokens))
    write("\n".join((*blocks, *map(text.fits_text, fits))))


def _facts(one: Scenario, tokens: Mapping[int, float] | None) -> dict[str, Any]:
    chain = None if tokens is None else tokens[one.draft_tokens]
    return {
        **asdict(one),
        "total": one.total,
        "break_even": one.break_even,
        "most_chain_tokens": one.most_chain_tokens,
        "chain_tokens": chain,
        "needed_tokens": None if chain is None else one.needed_tokens(chain),
    }


def parse_size(size: str) -> int:
    """Bytes of a text such as 80GB (10^9) or 80GiB (2^30).

    Raises:
        OptionError: it is no size.
    """
    found = _SIZE.fullmatch(size.strip())
    if found is not None:
        unit = (found[2] or "B").upper()
        base = 1024 if "I" in unit else 1000
        nbytes = float(found[1]) * base ** _POWERS[unit.rstrip("B").rstrip("I")]
        if nbytes < 1 << 63:
            return int(nbytes)
    raise OptionError(f"memory: expected a size such as 80GB or 141GiB, got {size!r}")
