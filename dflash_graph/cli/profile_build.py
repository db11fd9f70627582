"""`profile build`: profiles from configs, and of rounds that are started and timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, progress, write
from dflash_graph.cli.selection import (
    Device,
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
from dflash_graph.errors import OptionError, ProfileError
from dflash_graph.options import MAX_BATCH

if TYPE_CHECKING:
    from dflash_graph.choices import Choices
    from dflash_graph.models.pair import ModelPair
    from dflash_graph.profile.document import Profile
    from dflash_graph.profile.executor import Resources
    from dflash_graph.profile.parts import Ceiling

BUILD: Final = """\b
Examples:
  dflash-graph profile build --preset demo-dflash2 -o declared.json
  dflash-graph profile build --preset qwen3.5-27b-dflash2 --backend triton --max-batch 1
  dflash-graph profile build --preset demo-dflash2 --measure --max-batch 1 -o measured.json"""

#: Of TB/s and TFLOP/s, as a profile takes them.
_MOST: Final = 1e12


def finite(value: float | None) -> float | None:
    """What an option says, where floors are finite by it."""
    if value is not None and not value <= _MOST:
        raise typer.BadParameter(f"expected at most {_MOST:g}, got {value}")
    return value


Measured = Annotated[
    bool, typer.Option("--measure", help="Start rounds and time them, node by node.")
]
ReadCeiling = Annotated[
    float | None,
    typer.Option(
        "--ceiling",
        min=1e-6,
        callback=finite,
        metavar="TB/S",
        help="What memory gives to reads. Default: 4.6, or measured with --measure.",
    ),
]
FlopCeiling = Annotated[
    float | None,
    typer.Option(
        "--tflops",
        min=1e-6,
        callback=finite,
        metavar="N",
        help="What arithmetic gives, in TFLOP/s.",
    ),
]
Context = Annotated[
    int, typer.Option(min=0, metavar="N", help="Tokens before the block that costs are for.")
]


def build(
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
    context: Context = 2048,
    backend: GraphBackend = Lowering.eager,
    dtype: GraphDtype = Dtype.bfloat16,
    device_profile: DeviceProfile = None,
    ceiling: ReadCeiling = None,
    tflops: FlopCeiling = None,
    resources: Annotated[
        bool,
        typer.Option(
            "--resources", help="Compile the kernels ahead of time for registers and spills."
        ),
    ] = False,
    measure: Measured = False,
    device: Annotated[
        Device | None,
        typer.Option(help="Where --measure runs. Default: cuda for triton, else cpu."),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=2, metavar="N", help="Rounds that --measure times.")
    ] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where it is kept.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build a profile from configs, or with --measure from rounds that run here.

    Without --measure it takes no weights and no device: graphs, kernel choices, plans and floors. A
    preset has no weights, so --measure gives it random ones.
    """
    if measure and device_profile is not None:
        raise typer.BadParameter("--device-profile is for profiles that are not measured")
    if not measure and device is not None:
        raise typer.BadParameter("--device goes with --measure")
    pair, columns = select_pair(preset, target, draft, draft_tokens, dtype)
    least, most = columns + 1 if measure else 0, max_context - columns - 1
    if not least <= context <= most:
        raise OptionError(
            f"context: expected {least}..{most} tokens (max_context {max_context} less a block of "
            f"{columns + 1}), got {context}"
        )
    name = preset or " with ".join(
        path.resolve().name for path in (target, draft) if path is not None
    )
    if output is not None:
        from dflash_graph.profile_store import require_place

        require_place(output)
    if measure:
        profile = _measured(
            pair,
            name,
            target=target,
            draft=draft,
            options={
                "draft_tokens": max(1, columns),
                "speculative": columns > 0,
                "max_batch": max_batch,
                "max_context": max_context,
                "prefill_chunk": prefill_chunk,
                "lowering": backend.value,
                "dtype": dtype.value,
                "device": _device(backend, device),
                "public_vocab": pair.public_vocab,
            },
            context=context,
            turns=turns,
            ceiling=ceiling_of(ceiling, tflops) if ceiling is not None else None,
            tflops=tflops,
            resources=resources,
        )
    else:
        from dflash_graph.profile.build import declared_profile

        choices = select_choices(device_profile, backend)
        profile = declared_profile(
            pair,
            backend.value,
            name=name,
            draft_tokens=columns,
            max_batch=max_batch,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            context=context,
            ceiling=ceiling_of(ceiling, tflops),
            choices=choices,
            resources=_resources(backend, choices) if resources else None,
        )
    if output is not None:
        try:
            profile.save(output)
        except ProfileError:
            print_json(profile.model_dump(mode="json"))  # what took minutes to measure
            raise
    if as_json:
        print_json(profile.model_dump(mode="json"))
        return
    from dflash_graph.profile import text

    write("\n".join((text.head_text(profile), text.executors_text(profile))))
    if output is not None:
        write(f"\nwritten to {output}\n")


def ceiling_of(read: float | None, tflops: float | None) -> Ceiling:
    """What floors stand on: as stated, else the default."""
    from dflash_graph.profile.build import READ_CEILING
    from dflash_graph.profile.parts import Ceiling

    return Ceiling(read_tb_per_s=read or READ_CEILING, tflop_per_s=tflops)


def _device(backend: Lowering, device: Device | None) -> str:
    if device is not None:
        return device.value
    return "cuda" if backend is Lowering.triton else "cpu"


def _resources(backend: Lowering, choices: Choices | None) -> Resources:
    if backend is not Lowering.triton:
        raise OptionError(f"resources: expected --backend triton (it has kernels), got {backend}")
    if choices is None:
        raise OptionError("resources: expected --device-profile (kernels are compiled for one)")
    return _compiler(choices.capability)


def _compiler(capability: int) -> Resources:
    from importlib.util import find_spec

    from dflash_graph.profile.build import compiled_resources

    if find_spec("triton") is None:
        raise OptionError("resources: expected triton, which compiles them; it is not installed")
    return compiled_resources(capability)


def _measured(
    pair: ModelPair,
    name: str,
    *,
    target: Path | None,
    draft: Path | None,
    options: dict[str, object],
    context: int,
    turns: int,
    ceiling: Ceiling | None,
    tflops: float | None,
    resources: bool,
) -> Profile:
    from dflash_graph.bench.nodes import measured_ceiling, time_rounds
    from dflash_graph.options import EngineOptions, require_built
    from dflash_graph.profile.build import started_profile
    from dflash_graph.rounds import Model, compile_rounds

    chosen = EngineOptions.model_validate(options).resolved()
    require_built(chosen)
    with progress() as report:
        if target is None:
            model = Model.random(pair, chosen)
        else:
            model = Model.load(target, draft, chosen, progress=report)
        rounds = compile_rounds(model, chosen, report)
        times = time_rounds(
            rounds, batches=list(rounds), context=context, turns=turns, progress=report
        )
        kind = "cuda" if rounds.arena.is_cuda else "cpu"
        compiler = None
        if resources:
            if rounds.choices is None:
                raise OptionError("resources: expected --backend triton on a device, got the CPU")
            compiler = _compiler(rounds.choices.capability)
        return started_profile(
            rounds,
            name=name,
            context=context,
            ceiling=ceiling or measured_ceiling(kind, tflops),
            times=times,
            resources=compiler,
        )
