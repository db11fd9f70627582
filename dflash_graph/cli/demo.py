"""`demo`: real text from the small trained pair, beside plain decoding of the same prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.output import AsJson, is_styled, print_error, print_json, progress, write
from dflash_graph.cli.selection import DEFAULT_DRAFT_TOKENS, Device, DraftTokens, Lowering
from dflash_graph.cli.streaming import OrderedText, Run, facts, follow, submit

if TYPE_CHECKING:
    from dflash_graph.engine import Engine
    from dflash_graph.options import EngineOptions
    from dflash_graph.request import Generation

NAME: Final = "demo"
SHORT: Final = "Decode with the small trained models."
EPILOG: Final = """\b
Examples:
  dflash-graph demo
  dflash-graph demo --draft dflash --prompt "import os"
  dflash-graph demo --prompts 1 --lowering inductor"""

#: The longest text the demo models were trained on, tokens.
_CONTEXT: Final = 1024
#: Tokens of the run that comes before the clock starts.
_WARM_UP: Final = 8


class DemoDraft(StrEnum):
    """The drafts that ship."""

    dflash = "dflash"
    dflash2 = "dflash2"


@dataclass(frozen=True)
class _Comparison:
    """One prompt, decoded with rounds of K drafts and plainly."""

    prompt: str
    run: Run
    result: Generation
    plain_run: Run
    plain: Generation

    @property
    def is_equal(self) -> bool:
        return self.result.token_ids == self.plain.token_ids

    def facts(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            **facts(self.run, self.result),
            "plain": {
                "first_token_seconds": self.plain_run.first_token_seconds,
                "decode_seconds": self.plain_run.decode_seconds,
                "tokens_per_second": self.plain_run.tokens_per_second,
            },
            "is_equal": self.is_equal,
        }


def command(
    draft: Annotated[DemoDraft, typer.Option(help="Which draft.")] = DemoDraft.dflash2,
    draft_tokens: DraftTokens = DEFAULT_DRAFT_TOKENS,
    prompts: Annotated[
        int, typer.Option(min=1, max=20, metavar="N", help="How many of the demo prompts.")
    ] = 3,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt of your own instead; repeatable."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate.")
    ] = 96,
    lowering: Annotated[
        Lowering,
        typer.Option(
            help="eager starts at once, inductor and triton compile first; triton needs cuda."
        ),
    ] = Lowering.eager,
    device: Annotated[
        Device, typer.Option(help="Where to run; kernels for cuda come with --lowering triton.")
    ] = Device.cpu,
    as_json: AsJson = False,
) -> None:
    """Decode demo prompts with the small trained models, and compare with plain decoding.

    The prompt stands first (dimmed on a terminal), then what the models continue it with, as it is
    committed. Speeds are of decoding alone, from the first token to the last.
    """
    from dflash_graph import demo
    from dflash_graph.options import EngineOptions

    options = EngineOptions(
        draft_tokens=draft_tokens,
        max_batch=1,
        device=device.value,
        lowering=lowering.value,
        max_context=_CONTEXT,
    ).resolved()
    texts = list(prompt) if prompt else demo.prompts()[:prompts]
    compared: list[_Comparison] = []
    with _engines(options, draft, texts[0]) as (engine, plain):
        for index, text in enumerate(texts):
            compared.append(
                _compare(engine, plain, text, max_new_tokens, (index, len(texts)), as_json)
            )
    if as_json:
        print_json(_document(options, draft, compared))
    elif len(compared) > 1:
        write(f"\n--- total: {_line(compared)}\n")
    for one in compared:
        for error in (one.result.error, one.plain.error):
            if error is not None:
                print_error(str(error))
    if not all(one.is_equal and one.result.error is None for one in compared):
        raise typer.Exit(1)


@contextmanager
def _engines(
    options: EngineOptions, draft: DemoDraft, text: str
) -> Iterator[tuple[Engine, Engine]]:
    """The engine and one that decodes plainly, both warm."""
    from dflash_graph.engine import Engine
    from dflash_graph.options import SamplingParams

    with _one_thread():
        with progress() as report:
            engine = Engine.demo(options, draft=draft.value, progress=report)
            plain = Engine.demo(
                options.replace(speculative=False), draft=draft.value, progress=report
            )
        with engine, plain:
            for one in (engine, plain):
                one.generate([text], SamplingParams(max_new_tokens=_WARM_UP))
            yield engine, plain


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: models this small gain little from more, and lose much when busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compare(
    engine: Engine, plain: Engine, text: str, tokens: int, place: tuple[int, int], is_silent: bool
) -> _Comparison:
    """Decode one prompt both ways; the speculative run is shown as it comes."""
    from dflash_graph.options import SamplingParams

    params = SamplingParams(max_new_tokens=tokens)
    runs = submit(engine, [text], params)
    if is_silent:
        _finish(engine, runs)
    else:
        number, count = place
        write(f"{'' if number == 0 else chr(10)}--- prompt {number + 1} of {count}\n")
        write(text, dim=True)
        if not is_styled(sys.stdout):
            write(f"{'' if text.endswith(chr(10)) else chr(10)}--- continuation\n")
        shown = OrderedText(1, engine.tokenizer, is_titled=False)
        for index, token_ids in follow(engine, runs):
            shown.feed(index, token_ids, is_last=runs[index].request.is_finished)
    plain_runs = submit(plain, [text], params)
    _finish(plain, plain_runs)
    one = _Comparison(
        text,
        runs[0],
        engine.result(runs[0].request),
        plain_runs[0],
        plain.result(plain_runs[0].request),
    )
    if not is_silent:
        write(f"--- {_line([one])}\n")
    return one


def _finish(engine: Engine, runs: Sequence[Run]) -> None:
    for _ in follow(engine, runs):
        pass


def _totals(compared: Sequence[_Comparison]) -> dict[str, Any]:
    tokens = sum(len(one.result.token_ids) for one in compared)
    rounds = sum(len(one.result.rounds) for one in compared)
    committed = sum(record.committed for one in compared for record in one.result.rounds)
    speed, plain = (
        sum(run.decode_tokens for run in runs) / seconds if seconds else 0.0
        for runs in ([one.run for one in compared], [one.plain_run for one in compared])
        for seconds in (sum(run.decode_seconds for run in runs),)
    )
    return {
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": committed / rounds if rounds else 0.0,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": speed / plain if plain else None,
        "is_equal": all(one.is_equal for one in compared),
    }


def _line(compared: Sequence[_Comparison]) -> str:
    facts = _totals(compared)
    speedup = "" if facts["speedup"] is None else f" ({facts['speedup']:.2f}x)"
    same = "same" if facts["is_equal"] else "DIFFERENT"
    return (
        f"{facts['tokens']} tokens in {facts['rounds']} rounds, "
        f"{facts['tokens_per_round']:.2f} a round; {facts['tokens_per_second']:.0f} tokens/s, "
        f"plain decoding {facts['plain_tokens_per_second']:.0f}{speedup}; {same} text"
    )


def _document(
    options: EngineOptions, draft: DemoDraft, compared: Sequence[_Comparison]
) -> dict[str, Any]:
    return {
        "draft": draft.value,
        "options": options.model_dump(mode="json"),
        "prompts": [one.facts() for one in compared],
        "total": _totals(compared),
    }
