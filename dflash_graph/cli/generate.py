"""`generate`: continue prompts with checkpoints of one's own."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.output import INTERRUPTED, AsJson, print_error, print_json, progress
from dflash_graph.cli.selection import (
    DEFAULT_DRAFT_TOKENS,
    Causality,
    Device,
    Draft,
    Dtype,
    Lowering,
    PrefillChunk,
)
from dflash_graph.cli.streaming import OrderedText, Run, cancel, facts, follow, submit
from dflash_graph.options import MAX_BATCH, MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from dflash_graph.engine import Engine
    from dflash_graph.options import EngineOptions, SamplingParams
    from dflash_graph.submission import Prompt

logger = logging.getLogger(__name__)

NAME: Final = "generate"
SHORT: Final = "Continue prompts with checkpoints of your own."
EPILOG: Final = """\b
Examples:
  dflash-graph generate TARGET_DIR --draft DRAFT_DIR --prompt "import os"
  dflash-graph generate TARGET_DIR --draft DRAFT_DIR --ids 12,7,301 --json
  dflash-graph generate TARGET_DIR --prompt "import os" --temperature 0.8 --top-p 0.95 --seed 7
  cat prompt.txt | dflash-graph generate TARGET_DIR --prompt-file - --lowering eager"""


def command(
    target: Annotated[Path, typer.Argument(metavar="TARGET_DIR", help="The target's directory.")],
    draft: Draft = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text; repeatable."),
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A text file, or a JSON list of texts or id lists; - is stdin. Repeatable.",
        ),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="Token ids; repeatable."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate.")
    ] = 128,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(min=0, metavar="ID", help="Stop there too; repeatable."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on at the checkpoint's end tokens."),
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the text before this string; repeatable."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the best token each time.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Best tokens kept; 0 keeps all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="P", help="Mass of the tokens kept.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="P", help="Least share of the best token.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Taken off tokens generated before.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="Taken off for every time.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of the first prompt; others count up.")
    ] = 0,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DRAFT_TOKENS,
            metavar="N",
            help=f"K, drafts a round. Default: {DEFAULT_DRAFT_TOKENS}.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without the draft.")] = False,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            max=MAX_BATCH,
            help="B, the most requests in a round. Default: as many as prompts, up to 4.",
        ),
    ] = None,
    max_context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of prompt and output.")
    ] = 8192,
    prefill_chunk: PrefillChunk = 1024,
    device: Annotated[
        Device | None,
        typer.Option(help="Default: cuda where there is one."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Default: bfloat16, on the CPU float32."),
    ] = None,
    lowering: Annotated[
        Lowering | None,
        typer.Option(
            help="eager starts at once; inductor, the default on the CPU, compiles for a minute; "
            "triton, the default on cuda, compiles at the first start.",
        ),
    ] = None,
    draft_causality: Annotated[
        Causality,
        typer.Option(help="Of local draft layers, where the config does not say."),
    ] = Causality.none,
    public_vocab: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Head rows that may be emitted. Default: the tokenizer's size.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts and print what comes after them.

    A single prompt's text is printed as it is committed, several stand in order: texts, then
    files, then ids. Ctrl-C ends the requests and prints what there is.
    """
    if draft_tokens is not None and draft is None:
        raise typer.BadParameter(f"--draft-tokens {draft_tokens} needs a draft: give --draft")
    prompts = _prompts(prompt or [], prompt_file or [], ids or [])
    if plain and draft is not None:
        # The engine opens no draft then, and would not see that there is none.
        from dflash_graph.geometry import read_draft_geometry

        read_draft_geometry(draft)
    from dflash_graph.engine import Engine
    from dflash_graph.options import EngineOptions, SamplingParams

    options = EngineOptions(
        draft_tokens=draft_tokens or DEFAULT_DRAFT_TOKENS,
        max_batch=max_batch or min(4, len(prompts)),
        device=device.value if device else None,
        dtype=dtype.value if dtype else None,
        lowering=lowering.value if lowering else None,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        draft_causality=draft_causality.value,
        speculative=not plain,
        public_vocab=public_vocab,
    ).resolved()
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    start = perf_counter()
    with progress() as report:
        engine = Engine.load(target, draft, options, progress=report)
    loaded = perf_counter() - start
    with engine:
        start = perf_counter()
        runs = submit(engine, prompts, params)
        was_interrupted = _run(engine, runs, is_shown=not as_json)
        seconds = perf_counter() - start
        found = [facts(run, engine.result(run.request)) for run in runs]
    if as_json:
        where = {"target": str(target), "draft": None if draft is None else str(draft)}
        print_json(where | _document(options, params, found, loaded, seconds))
    else:
        typer.echo(_line(found, seconds), err=True)
    errors = [one["error"] for one in found if one["error"] is not None]
    for error in errors:
        print_error(error)
    if was_interrupted or errors:
        raise typer.Exit(INTERRUPTED if was_interrupted else 1)


def _run(engine: Engine, runs: Sequence[Run], *, is_shown: bool) -> bool:
    """Drive all runs to their end and show their text; returns whether Ctrl-C ended them."""
    shown = OrderedText(len(runs), engine.tokenizer, is_titled=len(runs) > 1) if is_shown else None
    sent = [0] * len(runs)
    was_interrupted = False
    try:
        logger.info("generating for %d prompts", len(runs))
        for index, _ in follow(engine, runs):
            if shown is not None:
                _show(shown, runs, index, sent)
    except KeyboardInterrupt:
        was_interrupted = True
        cancel(engine, runs)
    for index in range(len(runs)):
        if shown is not None:
            _show(shown, runs, index, sent)
    return was_interrupted


def _show(shown: OrderedText, runs: Sequence[Run], index: int, sent: list[int]) -> None:
    """Show what a request has published since the last time, also where its event got lost."""
    request = runs[index].request
    tokens = request.token_ids[sent[index] :]
    sent[index] += len(tokens)
    shown.feed(index, tokens, is_last=request.is_finished)


def _prompts(texts: Sequence[str], files: Sequence[str], ids: Sequence[str]) -> list[Prompt]:
    prompts: list[Prompt] = list(texts)
    for name in files:
        prompts += _read_prompts(name)
    prompts += [_parsed_ids(one) for one in ids]
    if not prompts:
        raise typer.BadParameter("give at least one of --prompt, --prompt-file and --ids")
    return prompts


def _read_prompts(name: str) -> list[Prompt]:
    """Prompts of a file: one text, or what a JSON list holds."""
    where = f"--prompt-file {name}"
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"{where}: cannot be read, {reason}") from None
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        if name.endswith(".json"):
            raise typer.BadParameter(f"{where}: is not JSON, {error}") from None
        return [text]
    if not isinstance(loaded, list):
        if name.endswith(".json"):
            raise typer.BadParameter(f"{where}: expected a list of texts or id lists")
        return [text]
    for index, one in enumerate(loaded):
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(type(token) is int for token in one)
        ):
            shown = json.dumps(one)[:40]
            raise typer.BadParameter(
                f"{where}: expected a list of texts or id lists, got {shown} at {index}"
            )
    return loaded


def _parsed_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--ids: expected integers like 1,2,3, got {text!r}") from None


def _line(found: Sequence[dict[str, Any]], seconds: float) -> str:
    tokens, rounds = (sum(len(one[key]) for one in found) for key in ("token_ids", "rounds"))
    committed = sum(record["committed"] for one in found for record in one["rounds"])
    reasons = ", ".join(sorted({one["finish_reason"] for one in found}))
    per_round = f" in {rounds} rounds, {committed / rounds:.2f} a round" if rounds else ""
    return f"--- {tokens} tokens{per_round}; {tokens / seconds:.1f} tokens/s; ended by {reasons}"


def _document(
    options: EngineOptions,
    params: SamplingParams,
    found: Sequence[dict[str, Any]],
    loaded: float,
    seconds: float,
) -> dict[str, Any]:
    tokens = sum(len(one["token_ids"]) for one in found)
    return {
        "options": options.model_dump(mode="json"),
        "sampling": params.model_dump(mode="json"),
        "results": list(found),
        "timings": {
            "load_seconds": loaded,
            "generate_seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
        },
    }
