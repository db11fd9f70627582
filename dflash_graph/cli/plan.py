"""`plan`: what memory a configuration takes, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, write
from dflash_graph.cli.selection import (
    DeviceProfile,
    Draft,
    Dtype,
    GraphBackend,
    GraphDraftTokens,
    GraphDtype,
    Lowering,
    PrefillChunk,
    Preset,
    Target,
    select_choices,
    select_pair,
)
from dflash_graph.errors import OptionError
from dflash_graph.options import MAX_BATCH

if TYPE_CHECKING:
    from dflash_graph.report import ExecutorMemory, MemoryReport

NAME: Final = "plan"
SHORT: Final = "Print the memory plan of a configuration."
EPILOG: Final = """\b
Examples:
  dflash-graph plan --preset qwen3.5-27b-dflash2
  dflash-graph plan --preset qwen3.5-27b-dflash2 --max-batch 8 --max-context 32768
  dflash-graph plan --preset qwen3.5-27b-dflash2 --backend triton --device-profile "NVIDIA H200"
  dflash-graph plan --preset demo-dflash2 --buffers 4
  dflash-graph plan --target TARGET_DIR --draft DRAFT_DIR --json"""


def command(
    preset: Preset = None,
    target: Target = None,
    draft: Draft = None,
    draft_tokens: GraphDraftTokens = None,
    max_batch: Annotated[
        int,
        typer.Option(min=1, max=MAX_BATCH, metavar="N", help="B, the most requests in a round."),
    ] = 4,
    max_context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens a request may hold, prompt and output.")
    ] = 8192,
    prefill_chunk: PrefillChunk = 1024,
    backend: GraphBackend = Lowering.eager,
    device_profile: DeviceProfile = None,
    dtype: GraphDtype = Dtype.bfloat16,
    buffers: Annotated[
        str | None,
        typer.Option(
            metavar="B|prefill|first_token",
            help="List every buffer of the round of B requests, or of another executor.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print weights, state pools and the arena of every executor. Reads no weights.

    The arena's ratio is its peak over the largest sum of bytes that live at one time: 1 is best.
    """
    pair, columns = select_pair(preset, target, draft, draft_tokens, dtype)
    from dflash_graph import report
    from dflash_graph.state import Capacities

    memory = report.plan_memory(
        pair,
        backend.value,
        draft_tokens=columns,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        capacities=Capacities(max_batch, max_context),
        choices=select_choices(device_profile, backend),
    )
    if buffers is not None:
        executor = _executor(memory, buffers)
        if as_json:
            print_json({"executor": executor.name, **report.plan_dict(executor.plan)})
        else:
            write(f"{executor.name}\n{report.plan_text(executor.plan)}")
    elif as_json:
        print_json(report.memory_dict(memory))
    else:
        write(report.memory_text(memory))


def _executor(memory: MemoryReport, name: str) -> ExecutorMemory:
    """The executor that `--buffers` names: B, prefill, first_token, or a name as it is printed."""
    printed = {executor.name: executor for executor in memory.executors}
    short = {
        found.removeprefix("round B="): executor
        for found, executor in printed.items()
        if found.startswith("round B=")
    }
    short["prefill"] = next(e for n, e in printed.items() if n.startswith("prefill "))
    short["first_token"] = printed["first token"]
    if name not in short and name not in printed:
        known = [*short, *(f"{other!r}" for other in printed)]
        raise OptionError(f"buffers: expected one of {', '.join(known)}, got {name!r}")
    return short.get(name) or printed[name]
