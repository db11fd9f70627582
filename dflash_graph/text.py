"""Text at the edge of the engine: a model directory's tokenizer, and decoding of a stream of ids.

The engine itself works on token ids; everything here is optional to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from dflash_graph.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

#: What decoders put in place of bytes that are not UTF-8.
_REPLACEMENT: Final = "\ufffd"

#: A stream decoder looks for a place to cut when it holds more ids than this.
_HELD_IDS: Final = 16


class Tokenizer(Protocol):
    """What the engine and the command line ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""


class TokenizersTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A file may say how to cut and fill texts for training; a prompt stays as long as it is.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens are added only if the file says so."""
        return list(self._backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Bytes that are not UTF-8 become U+FFFD.
        """
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(directory: str | Path) -> TokenizersTokenizer | None:
    """Load the tokenizer of a model directory.

    Args:
        directory: a folder that may hold a `tokenizer.json`.

    Returns:
        The tokenizer, or None where the folder has no such file.

    Raises:
        ConfigError: the file is there and cannot be read as a tokenizer.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        return None
    import tokenizers  # here, so that engines without text do not load it

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every kind of bad file
        raise ConfigError(
            f"{path}: expected a tokenizer that the tokenizers package reads, got: {error}"
        ) from error
    return TokenizersTokenizer(backend)


class StreamDecoder:
    """Decodes ids as they come and holds back bytes that do not make a whole character yet.

    For byte-level tokenizers, where the text of two id lists in a row is the text of each, unless a
    character spans them. The pieces of `feed` and `flush`, joined, are `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []
        self._returned = 0  # characters at the start of decode(held) that feed already returned

    @property
    def is_holding(self) -> bool:
        """Whether the last bytes do not make a whole character yet."""
        return bool(self._held)

    def clone(self) -> StreamDecoder:
        """A decoder in the same state; feeding one does not touch the other."""
        other = StreamDecoder(self._tokenizer)
        other._held, other._returned = list(self._held), self._returned
        return other

    def feed(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that has become certain.

        Only a last U+FFFD is uncertain: an unfinished character shows as exactly one, whatever its
        length.
        """
        self._held.extend(ids)
        text = self._tokenizer.decode(self._held)
        certain = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._returned : certain]
        if certain == len(text):
            self._held.clear()
            self._returned = 0
        else:
            self._returned = certain
            self._drop_certain_ids(text)
        return piece

    def flush(self) -> str:
        """Return what is held back, as it stands, and start afresh."""
        piece = self._tokenizer.decode(self._held)[self._returned :] if self._held else ""
        self._held.clear()
        self._returned = 0
        return piece

    def _drop_certain_ids(self, text: str) -> None:
        """Forget ids before a character boundary, so that a run of stray bytes costs linear time.

        A cut is at a boundary if both sides decode to the whole's text and the right side has a
        byte that could have continued a character of the left side.
        """
        if len(self._held) <= _HELD_IDS:
            return
        for kept in range(1, _HELD_IDS // 2):
            right = self._tokenizer.decode(self._held[-kept:])
            if right and self._tokenizer.decode(self._held[:-kept]) + right == text:
                del self._held[:-kept]
                self._returned -= len(text) - len(right)
                return
