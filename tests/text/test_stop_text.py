"""Stop strings over tokens, against their definition; no part of one is ever publishable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash_graph as dg
from dflash_graph import demo
from dflash_graph.stop_text import StopText
from dflash_graph.text import Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"


class ByteTokenizer:
    """Id is byte, or nothing for ids past them: every cut is inside a character."""

    vocab_size = 260

    def __init__(self) -> None:
        self.decoded_ids = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded_ids += len(ids)
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def _demo() -> Tokenizer:
    tokenizer = load_tokenizer(demo.target_directory())
    assert tokenizer is not None
    return tokenizer


DEMO = _demo()
FRAGMENTS = [i for i in range(DEMO.vocab_size) if REPLACEMENT in DEMO.decode([i])]


class Naive:
    """The definition: what a reader of whole texts would do after every token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        ids: Sequence[int],
        before: Sequence[int] = (),
    ) -> None:
        whole = [tokenizer.decode([*before, *ids[:n]]) for n in range(len(ids) + 1)]
        certain = [text.removesuffix(REPLACEMENT) for text in whole]
        known = len(certain[0])
        #: Tokens until a stop string is complete, or None.
        self.count: int | None = None
        end = len(certain[-1])
        for count, text in enumerate(certain):
            starts = [text.find(s, max(0, known - len(s) + 1)) for s in stops]
            if any(start >= 0 for start in starts):
                self.count, end = count, min(start for start in starts if start >= 0)
                own = tokenizer.decode(ids[:count])
                # What follows the stop's start is the same at the end of both.
                after = len(whole[count]) - end
                self.text = own[: len(own) - after] if end > known else ""
                break
        else:
            self.text = tokenizer.decode(ids)
            sizes = range(1, max(map(len, stops)))
            begun = [
                k for k in sizes if any(s[:k] == certain[-1][-k:] for s in stops if k < len(s))
            ]
            end -= max(begun, default=0)
        #: Tokens that may be published, of those until then.
        given = whole[1 : len(ids) + 1 if self.count is None else self.count + 1]
        self.published = next((i for i, text in enumerate(given) if len(text) > end), len(given))


def check(
    tokenizer: Tokenizer,
    stops: Sequence[str],
    ids: Sequence[int],
    sizes: Sequence[int],
    before: Sequence[int] = (),
) -> None:
    """Feed `ids` in rounds of the given sizes; compare with the definition after each."""
    stop, start, published = StopText(tokenizer, stops, before), 0, 0
    for size in [*sizes, len(ids)]:
        some = ids[start : start + size]
        count = Naive(tokenizer, stops, ids[: start + len(some)], before).count
        expected = None if count is None else count - start
        assert stop.scan(some) == expected
        stop.commit(some[:expected])
        start += len(some) if expected is None else expected
        naive = Naive(tokenizer, stops, ids[:start], before)
        assert stop.is_complete == (naive.count is not None)
        assert stop.publishable() == naive.published >= published
        assert stop.final_text() == naive.text
        published = stop.publishable()
        if stop.is_complete or start == len(ids):
            break
    final = Naive(tokenizer, stops, ids, before)
    assert final.text == stop.final_text()
    if not before:
        text = tokenizer.decode(ids[:published])
        assert final.text.startswith(text), "published text was part of it"
        assert not any(s in text for s in stops)


@st.composite
def cases(draw: st.DrawFn, tokenizer: Tokenizer, token: st.SearchStrategy[int]) -> Any:
    """Tokens, and stops of which most are pieces of their text."""
    ids = draw(st.lists(token, max_size=30))
    text = tokenizer.decode(ids)
    stops = []
    for _ in range(draw(st.integers(1, 4))):
        at, size = draw(st.integers(0, max(0, len(text) - 1))), draw(st.integers(1, 9))
        piece = text[at : at + size] + draw(st.sampled_from(["", "", "", "a", "\u00e9", "\n"]))
        stops.append(piece or draw(st.text(min_size=1, max_size=3)))
    if draw(st.booleans()):
        stops.append(stops[0][: draw(st.integers(1, len(stops[0])))])
    return ids, stops, draw(st.lists(st.integers(1, 8), max_size=12))


DEMO_TOKENS = st.one_of(st.integers(0, DEMO.vocab_size - 1), st.sampled_from(FRAGMENTS))


@settings(max_examples=300)
@given(cases(DEMO, DEMO_TOKENS), st.integers(0, 12))
def test_demo_tokens(case: Any, cut: int) -> None:
    ids, stops, sizes = case
    check(DEMO, stops, ids, sizes)
    check(DEMO, stops, ids[cut:], sizes, ids[:cut])


BYTES = [*b"ab\n", *"\u00e9\u20ac\U0001f600".encode(), 0xFF, 256]


@settings(max_examples=400)
@given(cases(ByteTokenizer(), st.sampled_from(BYTES)), st.integers(0, 12))
def test_bytes(case: Any, cut: int) -> None:
    ids, stops, sizes = case
    check(ByteTokenizer(), stops, ids, sizes)
    check(ByteTokenizer(), stops, ids[cut:], sizes, ids[:cut])


def end_of(text: str | bytes, *stops: str) -> tuple[int | None, int, str]:
    """Bytes to completion, publishable bytes until then, and the final text."""
    data = text if isinstance(text, bytes) else text.encode()
    stop = StopText(ByteTokenizer(), stops)
    count = stop.scan(list(data))
    stop.commit(list(data)[:count])
    return count, stop.publishable(), stop.final_text()


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcdef", ("cd",), (4, 2, "ab")),
        ("abcdef", ("a",), (1, 0, "")),
        ("abcdef", ("f",), (6, 5, "abcde")),
        ("abcdef", ("cde", "cd"), (4, 2, "ab")),
        ("abcdef", ("bcd", "de", "c"), (3, 2, "ab")),
        ("aaab", ("aab",), (4, 1, "a")),
        ("abcab", ("abcabd", "x"), (None, 0, "abcab")),
        ("abcabx", ("abcabd", "xy"), (None, 5, "abcabx")),
        ("a\u00e9b", ("\u00e9",), (3, 1, "a")),
        ("a\u00e9b", ("\u00e8",), (None, 4, "a\u00e9b")),
        (b"a\xc3", ("\u00e9",), (None, 1, "a\ufffd")),
        (b"a\xc3b", ("\ufffdb",), (3, 1, "a")),
        (b"a\xc3", ("\ufffd",), (None, 1, "a\ufffd")),
    ],
)
def test_by_hand(
    text: str | bytes, stops: tuple[str, ...], expected: tuple[int | None, int, str]
) -> None:
    assert end_of(text, *stops) == expected


def test_text_before() -> None:
    """A stop string may begin in the text before, and then none of the new text stands."""

    def ends(before: bytes, text: bytes, *stops: str) -> tuple[int | None, int, str]:
        stop = StopText(ByteTokenizer(), stops, list(before))
        count = stop.scan(list(text))
        stop.commit(list(text)[:count])
        return count, stop.publishable(), stop.final_text()

    assert ends(b"xab", b"cde", "abc") == (1, 0, "")
    assert ends(b"xab", b"cde", "cd") == (2, 0, "")
    assert ends(b"xab", b"cde", "de") == (3, 1, "c")
    assert ends(b"xab", b"cde", "ab", "x") == (None, 3, "cde")
    assert ends(b"xab", b"cde", "xabcdef") == (None, 0, "cde")
    assert ends(b"x\xc3", b"\xa9bc", "\u00e9b") == (2, 0, "")
    assert ends(b"x\xc3", b"\xa9bc", "b") == (2, 1, "\ufffd")


def test_one_token_with_text_before_and_after() -> None:
    """The part of a token before the stop is in the text, although the token is not published."""
    (token,) = [i for i in range(DEMO.vocab_size) if DEMO.decode([i]) == "self"]
    stop = StopText(DEMO, ["el"])
    assert stop.scan([token]) == 1
    stop.commit([token])
    assert (stop.publishable(), stop.final_text()) == (0, "s")


def test_scanning_changes_nothing() -> None:
    stop = StopText(ByteTokenizer(), ["\u20acx"])
    stop.commit(list("a\u20ac".encode()))
    for _ in range(2):
        assert stop.scan(list(b"x")) == 1
        assert stop.scan(list(b"yx")) is None
        assert (stop.publishable(), stop.final_text()) == (1, "a\u20ac")


def test_cost_is_linear() -> None:
    """Neither decoding nor the text searched grows with the length of the text."""
    tokenizer = ByteTokenizer()
    stop = StopText(tokenizer, ["never", "\u20ac\u20ac\u20acx"])
    block = list("a\u20ac\u20ac b".encode())
    for _ in range(300):
        before = tokenizer.decoded_ids
        assert stop.scan(block) is None
        stop.commit(block)
        assert stop.publishable() == len(stop._ends)
        assert tokenizer.decoded_ids - before < 20 * len(block)
        assert len(stop._tail) < 5


# -- with an engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Any:
    options = dg.EngineOptions(
        device="cpu", lowering="eager", max_batch=4, max_context=256, draft_tokens=7
    )
    with dg.Engine.demo(options) as made:
        yield made


PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    "


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_demo_text(engine: dg.Engine, temperature: float) -> None:
    """Stops taken from the plain text at every place: the text is cut there, and only there."""
    params = dg.SamplingParams(max_new_tokens=40, temperature=temperature, seed=8)
    (plain,) = engine.generate([PROMPT], params)
    assert plain.text is not None and len(plain.text) > 40
    text = plain.text
    stops = [text[at : at + 1 + at % 11] for at in range(0, len(text) - 12, 7)]
    results = engine.generate([PROMPT] * len(stops), [params.replace(stop=(s,)) for s in stops])
    for stop, result in zip(stops, results, strict=True):
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == plain.token_ids[: len(result.token_ids)]
        assert result.text.startswith(DEMO.decode(result.token_ids))
