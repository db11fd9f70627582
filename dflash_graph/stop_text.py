"""stop_text: stop strings over a stream of tokens, with no part of one ever published.

A stop string may begin and end anywhere inside tokens, and span several. Tokens whose text could
still become one are held back until it is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from dflash_graph.text import StreamDecoder, Tokenizer


class StopText:
    """The text of one request, and where it must end.

    The text ends before the first stop string in what the tokens up to its completion say. Bytes
    that do not make a character yet are no text yet. Each token costs the same, however long the
    text is.

    Args:
        tokenizer: decodes the request's tokens.
        stops: strings that end the text; none of them is empty.
        before: tokens that were generated before this text; a stop string may begin in theirs.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], before: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        #: Characters of the committed tokens, and the last ones with those before them, which a
        #: stop string may span.
        self._length = 0
        self._tail = self._end_of(self._decoder.feed(before)) if before else ""
        self._tokens: list[int] = []
        #: By committed token the end of the last character it has a part in; never falls.
        self._ends: list[int] = []
        #: Where the stop string begins; below 0 in the text before.
        self._match: int | None = None

    def scan(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens it takes to complete a stop string, or None."""
        decoder, tail = self._decoder.clone(), self._tail
        for count, token in enumerate(tokens, 1):
            text = tail + decoder.feed([token])
            if self._find(text, len(tail)) is not None:
                return count
            tail = self._end_of(text)
        return None

    def commit(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed; none of them follows one that completes a stop."""
        for token in tokens:
            assert self._match is None, "a token after the stop"
            text = self._tail + self._decoder.feed([token])
            self._tokens.append(token)
            self._length += len(text) - len(self._tail)
            self._ends.append(self._length + self._decoder.is_holding)
            found = self._find(text, len(self._tail))
            if found is not None:
                self._match = self._length - len(text) + found
            self._tail = self._end_of(text)

    @property
    def is_complete(self) -> bool:
        """Whether a stop string was completed."""
        return self._match is not None

    def publishable(self) -> int:
        """Committed tokens whose text neither is nor can become part of a stop string."""
        end = self._match if self._match is not None else self._length - self._partial()
        return bisect_right(self._ends, end)

    def final_text(self) -> str:
        """The text of the committed tokens before the stop string, all of it without one.

        The tokens are decoded by themselves: bytes that complete a character of the text before
        are U+FFFD here.
        """
        text = self._tokenizer.decode(self._tokens)
        if self._match is None:
            return text
        if self._match <= 0:
            return ""
        return text[: len(text) - self._decoder.is_holding - (self._length - self._match)]

    def _find(self, text: str, known: int) -> int | None:
        """Start of the first stop string that ends after the first `known` characters."""
        starts = [text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stops]
        return min((start for start in starts if start >= 0), default=None)

    def _end_of(self, text: str) -> str:
        """What a stop string may still begin in; shorter than the longest."""
        return text[max(0, len(text) - self._longest + 1) :]

    def _partial(self) -> int:
        """Characters at the end that begin a stop string."""
        for size in range(len(self._tail), 0, -1):
            if any(stop.startswith(self._tail[-size:]) for stop in self._stops):
                return size
        return 0
