"""`graph`: the op graph of one segment, printed, exported or counted."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.output import print_json, table, write
from dflash_graph.cli.selection import (
    Batch,
    Draft,
    Dtype,
    GraphBackend,
    GraphDraftTokens,
    GraphDtype,
    Lowering,
    PrefillChunk,
    Preset,
    Target,
    select_pair,
)
from dflash_graph.errors import OptionError

if TYPE_CHECKING:
    from dflash_graph.export import Collapse
    from dflash_graph.graph import Graph
    from dflash_graph.models.pair import ModelPair
    from dflash_graph.op import Cost

NAME: Final = "graph"
SHORT: Final = "Print or export the op graph of a round."
EPILOG: Final = """\b
Examples:
  dflash-graph graph --preset qwen3.5-27b-dflash2 --region verify/layer.3
  dflash-graph graph --preset demo-dflash2 --format dot
  dflash-graph graph --preset demo-dflash2 --backend triton --declared
  dflash-graph graph --preset qwen3.5-27b-dflash2 --cost --context 8192
  dflash-graph graph --target TARGET_DIR --draft DRAFT_DIR --segment finish"""

_NUMBER: Final = re.compile(r"\.\d+(?=/|$)")


class Segment(StrEnum):
    """Segments that graphs are declared for."""

    forward = "forward"
    finish = "finish"
    prefill = "prefill"
    first_token = "first_token"


class Format(StrEnum):
    """Forms of a graph."""

    text = "text"
    json = "json"
    dot = "dot"
    mermaid = "mermaid"


def command(
    preset: Preset = None,
    target: Target = None,
    draft: Draft = None,
    segment: Annotated[
        Segment, typer.Option(help="A half of a round, a prefill chunk, or the first token.")
    ] = Segment.forward,
    draft_tokens: GraphDraftTokens = None,
    batch: Batch = 1,
    prefill_chunk: PrefillChunk = 1024,
    backend: GraphBackend = Lowering.eager,
    dtype: GraphDtype = Dtype.bfloat16,
    form: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.text,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    collapse: Annotated[
        str,
        typer.Option(
            metavar="layers|none|DEPTH",
            help="Pictures: fold layers that are alike, nothing, or all regions at a depth.",
        ),
    ] = "layers",
    region: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="Only nodes of this region, such as verify/layer.3."),
    ] = None,
    declared: Annotated[
        bool,
        typer.Option(
            "--declared",
            help="The graph as models declare it, before ops are combined for kernels.",
        ),
    ] = False,
    values: Annotated[bool, typer.Option("--values", help="Text: a table of all values.")] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="Print bytes and operations per region instead.")
    ] = False,
    context: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens before the block, for --cost.")
    ] = 0,
) -> None:
    """Print the op graph of a round's segment as the backend runs it, or its costs. Reads no
    weights.

    For triton, ops that one kernel computes are one op. Prefill is the same for every backend.
    """
    if as_json:
        form = Format.json
    folding = _collapse(collapse)
    if cost and form not in (Format.text, Format.json):
        raise typer.BadParameter(f"--cost prints text or json, not {form.value}")
    pair, columns = select_pair(preset, target, draft, draft_tokens, dtype)
    graph = _declare(pair, segment, columns, batch, prefill_chunk, backend)
    if not declared:
        from dflash_graph.passes.combine import combine

        graph = combine(graph)
    if region is not None:
        graph = _within(graph, region)
    if cost:
        _print_cost(graph, context, form)
        return
    from dflash_graph import export

    if form is Format.text:
        write(export.to_text(graph, values=values))
    elif form is Format.json:
        write(export.to_json(graph))
    elif form is Format.dot:
        write(export.to_dot(graph, collapse=folding))
    else:
        write(export.to_mermaid(graph, collapse=folding))


def _collapse(text: str) -> Collapse:
    if text == "layers":
        return "layers"
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"--collapse: expected layers, none or a depth, got {text!r}"
        ) from None


def _declare(
    pair: ModelPair,
    segment: Segment,
    draft_tokens: int,
    batch: int,
    prefill_chunk: int,
    backend: Lowering,
) -> Graph:
    from dflash_graph.models.round import (
        backend_of,
        declare_first_token,
        declare_prefill,
        declare_round,
    )

    served = backend_of(segment.value, backend.value)
    if segment is Segment.prefill:
        return declare_prefill(pair, served, tokens=prefill_chunk)
    if segment is Segment.first_token:
        return declare_first_token(pair, served)
    declared = declare_round(pair, served, draft_tokens=draft_tokens, batch=batch)
    return declared.forward if segment is Segment.forward else declared.finish


def _within(graph: Graph, region: str) -> Graph:
    """The part of a graph in a region; what it reads from elsewhere becomes an input.

    Raises:
        OptionError: no node stands there.
    """
    from dflash_graph.graph import Graph

    nodes = graph.region_nodes(region.rstrip("/"))
    if not nodes:
        known = dict.fromkeys(_NUMBER.sub(".N", node.region) for node in graph.nodes)
        raise OptionError(
            f"region: expected one of {', '.join(known)} or what stands above them, got {region!r}"
        )
    made = {name for node in nodes for name in node.outputs.values()}
    read = {name for node in nodes for _, name in node.operands()}
    values = {
        name: value
        if name in made or value.role in ("input", "weight", "state")
        else replace(value, role="input")
        for name, value in graph.values.items()
        if name in made | read
    }
    return Graph(replace(graph.key, segment=f"{graph.key.segment}:{region}"), nodes, values)


def _print_cost(graph: Graph, context: int, form: Format) -> None:
    from dflash_graph.op import Cost
    from dflash_graph.report import size_text

    costs = graph.cost(context=context)
    regions: dict[str, tuple[int, Cost]] = {}
    for node in graph.nodes:
        name = _NUMBER.sub(".*", node.region)
        count, cost = regions.get(name, (0, Cost()))
        regions[name] = (count + 1, cost + costs[node.name])
    total = (len(graph.nodes), sum(costs.values(), Cost()))
    if form is Format.json:
        print_json(
            {
                "key": {name: getattr(graph.key, name) for name in graph.key.__dataclass_fields__},
                "hash": graph.content_hash,
                "context": context,
                "regions": [{"region": name, **_cost(*found)} for name, found in regions.items()],
                "total": _cost(*total),
            }
        )
        return
    rows = [
        (
            name,
            str(count),
            size_text(cost.read_bytes),
            size_text(cost.write_bytes),
            f"{cost.flops / 1e9:.3f}",
        )
        for name, (count, cost) in (*regions.items(), ("total", total))
    ]
    write(f"{graph.key}, {context} tokens of context\n\n")
    write(table(("region", "nodes", "read", "written", "GFLOP"), rows))


def _cost(nodes: int, cost: Cost) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "read_bytes": cost.read_bytes,
        "write_bytes": cost.write_bytes,
        "flops": cost.flops,
    }
