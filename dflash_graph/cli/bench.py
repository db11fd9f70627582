"""`bench`: rounds of a pair, timed on this machine's GPU beside the memory-bandwidth floor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, progress, write
from dflash_graph.cli.selection import Draft, DraftTokens, Dtype, GraphDtype, Lowering, Target
from dflash_graph.options import MAX_BATCH

NAME: Final = "bench"
SHORT: Final = "Time rounds on a GPU beside their floor."
EPILOG: Final = """\b
Examples:
  dflash-graph bench --geometry qwen3.5-27b-dflash2 --random-weights
  dflash-graph bench --geometry demo-dflash2 --random-weights --batch 1 --batch 8 --ops
  dflash-graph bench --target TARGET_DIR --draft DRAFT_DIR --context 4096 --json"""


def command(
    geometry: Annotated[
        str | None, typer.Option(metavar="NAME", help="A shipped pair of configs.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Needs no checkpoint; goes with --geometry.")
    ] = False,
    target: Target = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = 7,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MAX_BATCH, metavar="N", help="B; repeat for several. Default: 1."),
    ] = None,
    context: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens of each request before the round.")
    ] = 2048,
    turns: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds that are timed.")] = 30,
    lowering: Annotated[Lowering, typer.Option(help="How nodes run.")] = Lowering.triton,
    dtype: GraphDtype = Dtype.bfloat16,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs", help="Capture rounds, or launch kernels one by one."
        ),
    ] = True,
    ops: Annotated[bool, typer.Option("--ops", help="Also time the launches of each op.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start rounds as an engine would, and time each exact batch on the device.

    Needs a CUDA device. The floor is the time that the weights a round reads take at the device's
    read ceiling, which is measured in the same run.
    """
    if (geometry is None) == (target is None):
        raise typer.BadParameter("give either --geometry or --target")
    if random_weights != (geometry is not None):
        raise typer.BadParameter("--geometry has no weights: --random-weights goes with it alone")
    if geometry is not None and draft is not None:
        raise typer.BadParameter("--draft goes with --target; a geometry has its own")
    if context <= draft_tokens:
        raise typer.BadParameter(f"--context: expected at least {draft_tokens + 1} (a block)")
    batches = sorted(set(batch or [1]))
    from dflash_graph.bench import bench_document, bench_text, require_launches
    from dflash_graph.models.pair import preset_pair
    from dflash_graph.options import EngineOptions, require_built
    from dflash_graph.rounds import Model, compile_rounds

    options = EngineOptions(
        draft_tokens=draft_tokens,
        max_batch=batches[-1],
        device="cuda",
        dtype=dtype.value,
        lowering=lowering.value,
        max_context=context + draft_tokens + 1,
        cuda_graphs=cuda_graphs,
    ).resolved()
    require_built(options)
    if ops:
        require_launches(lowering.value)
    with progress() as report:
        if geometry is not None:
            model = Model.random(preset_pair(geometry, dtype.value), options)
        else:
            assert target is not None
            model = Model.load(Path(target), draft, options, progress=report)
        rounds = compile_rounds(model, options, report)
        document = bench_document(
            rounds, batches=batches, context=context, turns=turns, ops=ops, progress=report
        )
    if as_json:
        print_json(document)
    else:
        write(bench_text(document))
