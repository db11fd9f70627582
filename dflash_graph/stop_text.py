"""stop_text: stop strings over a stream of tokens, with no part of one ever published.

A stop string may begin and end anywhere inside tokens, and span several. Tokens whose text could
still become one are held back until it is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_graph.text import StreamDecoder, Tokenizer


class StopText:
    """The text of one request, and where it must end.

    Args:
        tokenizer: decodes the request's tokens.
        stops: strings that end the text; none of them is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        #: Text of the committed tokens, and its length after each of them.
        self.text = ""
        self._lengths: list[int] = []
        self._match: int | None = None

    def scan(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens it takes to complete a stop string, or None."""
        decoder, text = self._decoder.clone(), self.text
        for count, token in enumerate(tokens, 1):
            known = len(text)
            text += decoder.feed([token])
            if self._find(text, known) is not None:
                return count
        return None

    def commit(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed."""
        for token in tokens:
            known = len(self.text)
            self.text += self._decoder.feed([token])
            self._lengths.append(len(self.text))
            if self._match is None:
                self._match = self._find(self.text, known)

    @property
    def is_complete(self) -> bool:
        """Whether a stop string was completed."""
        return self._match is not None

    def publishable(self) -> int:
        """Committed tokens whose text neither is nor can become part of a stop string."""
        end = self._match if self._match is not None else len(self.text) - self._partial()
        return next(
            (i for i, length in enumerate(self._lengths) if length > end), len(self._lengths)
        )

    def final_text(self) -> str:
        """All text before the stop string; everything where none was completed."""
        if self._match is not None:
            return self.text[: self._match]
        return self.text + self._decoder.clone().flush()

    def _find(self, text: str, known: int) -> int | None:
        """Start of the first stop string that ends after the first `known` characters."""
        begin = max(0, known - self._longest + 1)
        starts = [start for stop in self._stops if (start := text.find(stop, begin)) >= 0]
        return min(starts, default=None)

    def _partial(self) -> int:
        """Characters at the end that begin a stop string."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0
