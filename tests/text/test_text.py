"""The tokenizer of a model directory, and decoding of a stream of ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dflash_graph import demo
from dflash_graph.errors import ConfigError
from dflash_graph.text import StreamDecoder, TokenizersTokenizer, load_tokenizer

END_OF_TEXT = 0


def demo_tokenizer() -> TokenizersTokenizer:
    tokenizer = load_tokenizer(demo.target_directory())
    assert tokenizer is not None
    return tokenizer


DEMO = demo_tokenizer()
VOCAB = DEMO.vocab_size
#: Tokens that are not whole characters by themselves, such as single bytes of a longer one.
FRAGMENTS = [i for i in range(VOCAB) if "\ufffd" in DEMO.decode([i])]


class ByteTokenizer:
    """Id is byte: the hardest stream, every cut inside a character."""

    vocab_size = 256

    def __init__(self) -> None:
        self.decoded_ids = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded_ids += len(ids)
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_file_that_cuts_and_fills_texts(tmp_path: Path) -> None:
    """A prompt stays as long as it is."""
    backend = tokenizers.Tokenizer.from_file(str(demo.target_directory() / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found is not None
    for text in ("import os\nimport sys\n", "x"):
        assert found.encode(text) == DEMO.encode(text)


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(list(ids[start : start + size]))
        start += size
    return [*chunks, list(ids[start:])]


token_lists = st.lists(
    st.one_of(st.integers(0, VOCAB - 1), st.sampled_from(FRAGMENTS), st.just(END_OF_TEXT)),
    max_size=60,
)
chunk_sizes = st.lists(st.integers(0, 5), max_size=60)


def test_vocab_size_is_the_demo_target_s() -> None:
    assert VOCAB == 2048


def test_prompts_survive_encode_and_decode() -> None:
    for prompt in demo.prompts():
        assert DEMO.decode(DEMO.encode(prompt)) == prompt


def test_special_tokens_are_not_printed() -> None:
    ids = DEMO.encode("def f():")
    assert DEMO.decode([END_OF_TEXT, *ids, END_OF_TEXT]) == "def f():"


def test_a_directory_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "absent") is None


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0", "model": {"type": "?"}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected a tokenizer"):
        load_tokenizer(tmp_path)


@given(ids=token_lists, sizes=chunk_sizes)
def test_pieces_join_to_the_whole_text(ids: list[int], sizes: list[int]) -> None:
    decoder = StreamDecoder(DEMO)
    pieces = [decoder.feed(chunk) for chunk in chunked(ids, sizes)]
    assert "".join(pieces) + decoder.flush() == DEMO.decode(ids)


@given(data=st.binary(max_size=80), sizes=chunk_sizes)
def test_pieces_of_any_bytes_join_to_the_whole_text(data: bytes, sizes: list[int]) -> None:
    tokenizer = ByteTokenizer()
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.feed(chunk) for chunk in chunked(data, sizes)]
    assert "".join(pieces) + decoder.flush() == data.decode("utf-8", errors="replace")


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_no_piece_shows_half_a_character(text: str) -> None:
    decoder = StreamDecoder(ByteTokenizer())
    pieces = [decoder.feed([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert decoder.flush() == ""


def test_a_character_appears_with_its_last_byte() -> None:
    decoder = StreamDecoder(ByteTokenizer())
    pieces = [decoder.feed([byte]) for byte in "a€😀".encode()]
    assert pieces == ["a", "", "", "€", "", "", "", "😀"]


def test_flush_shows_an_unfinished_character_and_starts_afresh() -> None:
    decoder = StreamDecoder(ByteTokenizer())
    assert decoder.feed("€".encode()[:2]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.feed(b"a") == "a"


@pytest.mark.parametrize("data", [b"\x80" * 4000, "é".encode() * 2000, b"\xe2\x82" * 2000])
def test_work_grows_with_the_stream_and_not_with_its_square(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    decoder = StreamDecoder(tokenizer)
    text = "".join(decoder.feed([byte]) for byte in data) + decoder.flush()
    assert text == data.decode("utf-8", errors="replace")
    assert tokenizer.decoded_ids <= 64 * len(data)
