"""Stop strings in an engine: where requests end, what they publish and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dflash_graph as dg

Load = Callable[..., dg.Engine]
Ids = tuple[int, ...]

REPLACEMENT = "\ufffd"
#: Text of each id of the tiny pair: stops can be cut anywhere, in the middle of a character too.
PIECES = (b"a", b"b", b"ab", b"\xc3", b"\xa9", b"ba\xc3", b"", b"?")
STOPS = (
    ("a",),
    ("ab",),
    ("aab", "ba"),
    ("aba", "abab", "ab"),
    ("\u00e9",),
    ("a\u00e9", "\u00e9a"),
    ("bab\u00e9", "aaaa"),
    ("b\ufffd", "aaa"),
    ("bbbbbbbb", "aaab"),
    ("never",),
)


class PieceTokenizer:
    vocab_size = len(PIECES)

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(bytes([byte])) for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


TEXT = PieceTokenizer()


def cut(ids: Ids, stops: Sequence[str]) -> tuple[int | None, str]:
    """Tokens until a stop string is complete, and the text before it; all text without one."""
    for count in range(1, len(ids) + 1):
        text = TEXT.decode(ids[:count]).removesuffix(REPLACEMENT)
        starts = [text.index(stop) for stop in stops if stop in text]
        if starts:
            return count, text[: min(starts)]
    return None, TEXT.decode(ids)


def first_stop(text: str, known: int, stops: Sequence[str]) -> int | None:
    """Start of the first stop string that ends after `known` characters."""
    starts = [text.find(stop, max(0, known - len(stop) + 1)) for stop in stops]
    return min((start for start in starts if start >= 0), default=None)


def text_engine(rounds_of: dg.Engine) -> dg.Engine:
    """Another engine over the same executors, with a tokenizer."""
    return dg.Engine(rounds_of.rounds, TEXT)


@pytest.fixture(params=[("dflash2", 3), ("dflash", 7), (None, 0)], ids=["dflash2", "dflash", "0"])
def engine(request: pytest.FixtureRequest, tiny: Any) -> dg.Engine:
    draft, draft_tokens = request.param
    options = {"draft_tokens": draft_tokens} if draft else {}
    return text_engine(tiny.engine(draft, **options))


def params_of(index: int, count: int, **more: Any) -> dg.SamplingParams:
    """Greedy and sampled in turn; penalties make greedy texts vary."""
    law = {"presence_penalty": 0.3} if index % 3 == 0 else {"temperature": 1.6}
    return dg.SamplingParams(max_new_tokens=count, seed=index, **law, **more)


def prompt_of(index: int) -> Ids:
    return (1 + index % 6, index % 5)


def test_texts_end_before_the_first_stop(engine: dg.Engine) -> None:
    cases = [(i, stops) for i in range(5) for stops in STOPS]
    plain = engine.generate([prompt_of(i) for i in range(5)], [params_of(i, 24) for i in range(5)])
    results = engine.generate(
        [prompt_of(i) for i, _ in cases], [params_of(i, 24, stop=stops) for i, stops in cases]
    )
    seen = set()
    for (i, stops), result in zip(cases, results, strict=True):
        count, text = cut(plain[i].token_ids, stops)
        assert result.text == text, (i, stops)
        assert result.finish_reason == ("length" if count is None else "stop")
        assert result.token_ids == plain[i].token_ids[: len(result.token_ids)]
        assert text.startswith(TEXT.decode(result.token_ids))
        assert count is not None or result.token_ids == plain[i].token_ids
        committed = 1 + sum(one.committed for one in result.rounds)
        assert committed == (count or 24), "nothing after a stop is committed"
        if result.rounds and count is not None:
            seen.add(result.rounds[-1].licensed - result.rounds[-1].committed)
        seen.add("first" if count == 1 else "last" if count == 24 else "middle")
    assert seen >= {"first", "middle", 0}
    assert engine.rounds.draft_tokens == 0 or max(s for s in seen if type(s) is int) > 0


def test_stop_at_the_end_of_the_budget(engine: dg.Engine) -> None:
    """It is complete with the last token, or one token short of it.

    Greedy, since a budget shortens the last blocks and so may change what is drawn.
    """
    (plain,) = engine.generate([prompt_of(3)], params_of(3, 24))
    for length in range(1, 25, 2):
        whole = TEXT.decode(plain.token_ids[:length]).removesuffix(REPLACEMENT)
        stop = whole[-3:]
        count, text = cut(plain.token_ids, (stop,)) if stop else (None, "")
        if count is None:
            continue
        for budget in (count, count - 1):
            if budget:
                params = params_of(3, budget, stop=(stop,))
                (result,) = engine.generate([prompt_of(3)], params)
                assert result.finish_reason == ("stop" if budget == count else "length")
                expected = text if budget == count else TEXT.decode(plain.token_ids[:budget])
                assert result.text == expected
                if budget < count:
                    assert result.token_ids == plain.token_ids[:budget]


def test_streams_never_show_a_part_of_a_stop(engine: dg.Engine) -> None:
    for index, stops in enumerate(STOPS):
        params = params_of(index, 24)
        (plain,) = engine.generate([prompt_of(index)], params)
        request = engine.submit(prompt_of(index), params.replace(stop=stops))
        _, final = cut(plain.token_ids, stops)
        ids: list[int] = []
        for event in engine.stream(request):
            ids += event.token_ids
            assert final.startswith(TEXT.decode(ids))
            if event.finish_reason is None:
                assert event.token_ids
                shown = TEXT.decode(ids)
                for stop in stops:
                    for size in range(1, len(stop)):
                        if shown.endswith(stop[:size]):
                            text = TEXT.decode(request.history[request.given :])
                            assert text != shown and not text.startswith(shown[:-size] + stop), (
                                "the rest of it is known not to come"
                            )
        assert tuple(ids) == engine.result(request).token_ids
        assert engine.result(request).text == final


def test_held_tokens_are_published_at_the_end(engine: dg.Engine) -> None:
    """By length, by a stop token, by cancelling and by a preview that ends the request."""
    (plain,) = engine.generate([prompt_of(3)], params_of(3, 12))
    text = TEXT.decode(plain.token_ids[:8]).removesuffix(REPLACEMENT)
    stop = text[2:] + "never"  # it holds back everything from the third character on
    assert len(text) > 6
    held = engine.submit(prompt_of(3), params_of(3, 8, stop=(stop,)))
    before: list[int] = []
    while not engine.is_idle:
        before.append(len(held.token_ids))
        engine.step()
    assert max(before) < 4 and tuple(held.token_ids) == plain.token_ids[:8]
    assert held.finish_reason == "length" and engine.result(held).text == TEXT.decode(
        held.token_ids
    )

    cancelled = engine.submit(prompt_of(3), params_of(3, 12, stop=(stop,)))
    while len(cancelled.history) - cancelled.given < 5:
        engine.step()
    engine.cancel(cancelled)
    known = tuple(cancelled.history[cancelled.given :])
    assert tuple(cancelled.token_ids) == known == plain.token_ids[: len(known)]
    (event,) = engine.step()
    assert event.finish_reason == "cancelled" and len(event.token_ids) > 0

    ends = plain.token_ids[6]
    at = plain.token_ids.index(ends) + 1
    (stopped,) = engine.generate(
        [prompt_of(3)], params_of(3, 12, stop=(stop,), stop_token_ids=(ends,))
    )
    assert stopped.finish_reason == "stop" and stopped.token_ids == plain.token_ids[:at]

    calls: list[int] = []

    def preview(tokens: Sequence[int]) -> int:
        calls.append(len(tokens))
        return 0 if len(calls) == 3 else len(tokens)

    short = engine.submit(prompt_of(3), params_of(3, 12, stop=(stop,)), preview=preview)
    while not engine.is_idle:
        engine.step()
    if len(calls) == 3:
        assert short.finish_reason == "stop"
        assert tuple(short.token_ids) == plain.token_ids[: sum(calls[:2])]


def test_stop_tokens_and_stop_strings(engine: dg.Engine) -> None:
    """Whichever is complete first; a stop token is published, a stop string is not."""
    plain = engine.generate([prompt_of(i) for i in range(8)], [params_of(i, 20) for i in range(8)])
    reasons = set()
    for token in (2, 3, 5):
        for stops in STOPS[3:8:2]:
            params = [params_of(i, 20, stop=stops, stop_token_ids=(token,)) for i in range(8)]
            results = engine.generate([prompt_of(i) for i in range(8)], params)
            for result, whole in zip(results, plain, strict=True):
                ids = whole.token_ids
                at = ids.index(token) + 1 if token in ids else None
                count, text = cut(ids[:at], stops)
                assert result.text == text
                if count is None:
                    assert result.token_ids == ids[:at]
                reasons.add((count is None, at is None, result.finish_reason))
    assert reasons >= {(True, False, "stop"), (False, False, "stop"), (False, True, "stop")}


@pytest.mark.parametrize("kept", [1, 2])
def test_previews_and_stops(engine: dg.Engine, kept: int) -> None:
    """A frontend that keeps fewer sees the stop again in the next round."""

    def run(index: int, stops: Sequence[str]) -> tuple[dg.Generation, list[Ids]]:
        seen: list[Ids] = []

        def preview(tokens: Sequence[int]) -> int:
            seen.append(tuple(tokens))
            return min(kept, len(tokens))

        params = params_of(index, 20, stop=tuple(stops))
        request = engine.submit(prompt_of(index), params, preview=preview)
        while not engine.is_idle:
            engine.step()
        return engine.result(request), seen

    for index in (1, 3):
        plain, _ = run(index, ())
        for stops in STOPS[1:9:2]:
            result, seen = run(index, stops)
            count, text = cut(plain.token_ids, stops)
            assert result.text == text
            kept_ids = tuple(t for tokens in seen for t in tokens[:kept])
            assert kept_ids == plain.token_ids[: count or 20]
            for tokens in seen:
                complete, _ = cut((*kept_ids, *tokens), stops) if count is None else (None, "")
                assert complete is None or complete > len(kept_ids)


def test_forks_stop_as_their_source_would(engine: dg.Engine) -> None:
    """A stop string may begin before the checkpoint; it ends after it."""
    params = params_of(4, 20)
    request = engine.submit(prompt_of(4), params)
    taken: list[tuple[int, dg.Checkpoint]] = []
    while not engine.is_idle:
        engine.step()
        if request.is_decoding:
            taken.append((len(request.token_ids), engine.checkpoint(request)))
    plain = tuple(request.token_ids)
    for length, checkpoint in taken[::2]:
        rest = params.replace(max_new_tokens=20 - length)
        forks = [engine.fork(checkpoint, rest.replace(stop=stops)) for stops in STOPS[:8]]
        while not engine.is_idle:
            engine.step()
        for fork, stops in zip(forks, STOPS, strict=False):
            known = len(TEXT.decode(plain[:length]).removesuffix(REPLACEMENT))
            texts = [TEXT.decode(plain[:n]).removesuffix(REPLACEMENT) for n in range(length, 21)]
            ends = [n for n, text in enumerate(texts) if first_stop(text, known, stops) is not None]
            assert fork.finish_reason == ("stop" if ends else "length")
            text = engine.result(fork).text
            assert text is not None
            if not ends:
                assert text == TEXT.decode(plain[length:])
                continue
            committed = fork.history[fork.given :]
            assert len(committed) == ends[0]
            start = first_stop(texts[ends[0]], known, stops)
            assert start is not None
            own = TEXT.decode(committed)
            after = len(TEXT.decode(plain[: length + ends[0]])) - start
            assert text == (own[: len(own) - after] if start > known else "")


def test_company(engine: dg.Engine, rng: torch.Generator) -> None:
    """Requests with and without stops in one batch, in any order."""
    cases = [(i, STOPS[i % len(STOPS)] if i % 4 else ()) for i in range(16)]
    alone = [engine.generate([prompt_of(i)], params_of(i, 16, stop=stops))[0] for i, stops in cases]
    order = torch.randperm(len(cases), generator=rng).tolist()
    some = [cases[i] for i in order]
    together = engine.generate(
        [prompt_of(i) for i, _ in some], [params_of(i, 16, stop=stops) for i, stops in some]
    )
    assert together == [alone[i] for i in order]


def test_stops_without_a_tokenizer(tiny: Any) -> None:
    engine = tiny.engine("dflash2", draft_tokens=3)
    with pytest.raises(dg.RequestError, match="stop"):
        engine.submit((1,), dg.SamplingParams(stop=("a",)))
    with pytest.raises(dg.RequestError, match="stop"):
        engine.fork(tiny.anchored(engine), dg.SamplingParams(stop=("a",)))
    assert engine.is_idle
