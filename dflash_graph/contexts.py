"""contexts: a request's whole state as one immutable value, on the device, on the host or in files.

A `Checkpoint` holds target K/V, recurrent state and history, draft context, continuation hidden,
the tokens and the counts they imply. Sampling needs no more: random numbers are keyed by seed and
position. What it was taken from is stated in its `Coverage`; an engine whose own differs refuses
it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_graph.errors import ContextError
from dflash_graph.models.pair import ModelPair
from dflash_graph.tensor import WeightUse

#: Of the two files a checkpoint is saved in.
STATE_FILE: Final = "state.safetensors"
FACTS_FILE: Final = "context.json"
FORMAT: Final = 1
#: Bytes at either end of each weight that enter a model's fingerprint as they are.
_SAMPLED: Final = 1024


@dataclass(frozen=True)
class Coverage:
    """What a state belongs to.

    Args:
        dtype: the model dtype.
        target: SHA-256 of the target's geometry and of both ends and the sum of each weight, hex.
        draft: the same of the draft; empty for plain decoding.
    """

    dtype: str  # first, because weights of another dtype have other bytes as well
    target: str
    draft: str

    def require(self, other: Coverage, what: str) -> None:
        """Raise ContextError, naming the first field that differs, unless `other` is the same."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                raise ContextError(
                    f"{what}: expected {field.name} {_short(mine)} (this engine's), "
                    f"got {_short(theirs)}; it was taken from another {_NOUNS[field.name]}"
                )


_NOUNS: Final = {"target": "target", "draft": "draft", "dtype": "dtype"}


def coverage_of(pair: ModelPair, weights: Mapping[WeightUse, Tensor]) -> Coverage:
    """The coverage of a loaded pair, from its geometry, both ends and the sum of every weight."""
    digests = {
        "target": hashlib.sha256(repr(pair.target).encode()),
        "draft": hashlib.sha256(repr((pair.draft, pair.draft_causality)).encode()),
    }
    for use in sorted(weights, key=lambda u: (u.parts, str(u.spec))):
        owner = use.parts[0].split("/", 1)[0]
        flat = weights[use].reshape(-1)
        count = max(1, _SAMPLED // flat.element_size())
        # An exact sum over the bits: what lies between the ends, be it a whole tensor of a stack.
        total = flat.view(torch.int16).sum(dtype=torch.int64)
        for part in (flat[:count], flat[-count:], total):
            digests[owner].update(_bytes(part.cpu()))
    return Coverage(
        dtype=pair.dtype,
        target=digests["target"].hexdigest(),
        draft=digests["draft"].hexdigest() if pair.draft is not None else "",
    )


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A request as it stood between two rounds. Nothing changes it; any number of requests continue
    from it.

    Args:
        coverage: what it belongs to.
        tokens: the processed tokens, positions [0, F).
        anchor: the token chosen for position F.
        generated: every token generated so far, the anchor included; penalties count these.
        rope_delta: rotary position of position F, less F (0 for text).
        is_multimodal: whether embeddings or positions came with the prompt, so that its tokens
            alone do not determine its state.
        images: state by pool name: slot images, and stacks of pages.
    """

    coverage: Coverage
    tokens: tuple[int, ...]
    anchor: int
    generated: tuple[int, ...]
    rope_delta: int
    is_multimodal: bool
    images: Mapping[str, Tensor]

    @property
    def frontier(self) -> int:
        """F: positions the target has processed."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its state."""
        return sum(image.nbytes for image in self.images.values())

    def require(self, coverage: Coverage, vocab: int) -> None:
        """Raise ContextError unless it is of this coverage and its facts agree with each other."""
        coverage.require(self.coverage, "checkpoint")
        if not self.tokens:
            raise ContextError("checkpoint: expected at least one token, got none")
        known = (*self.tokens, self.anchor)
        for name, ids in (("tokens", known), ("generated", self.generated)):
            for index, token in enumerate(ids):
                if type(token) is not int or not 0 <= token < vocab:
                    where = "anchor" if index == len(self.tokens) else f"{name}[{index}]"
                    raise ContextError(
                        f"checkpoint: {where}: expected an id in 0..{vocab - 1}, got {token!r}"
                    )
        count = len(self.generated)
        if not count or self.generated != known[-count:]:
            raise ContextError(
                f"checkpoint: generated: expected the last of its tokens and its anchor, "
                f"got {count} others"
            )

    def to_host(self) -> Self:
        """A replica whose state lies in host memory."""
        return replace(self, images={name: image.cpu() for name, image in self.images.items()})

    def save(self, directory: str | Path) -> None:
        """Write `state.safetensors` and `context.json` into a directory, made if absent.

        Each file is replaced atomically, the facts last; they hold the state's content hash, so a
        torn write is found when it is loaded.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        host = {name: image.cpu().contiguous() for name, image in self.images.items()}
        partial = folder / (STATE_FILE + ".partial")
        save_file(host, partial)
        os.replace(partial, folder / STATE_FILE)
        facts = {
            "format": FORMAT,
            "coverage": asdict(self.coverage),
            "tokens": list(self.tokens),
            "anchor": self.anchor,
            "generated": list(self.generated),
            "rope_delta": self.rope_delta,
            "is_multimodal": self.is_multimodal,
            "state_sha256": _content(host),
        }
        facts["facts_sha256"] = _facts_hash(facts)
        partial = folder / (FACTS_FILE + ".partial")
        partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, folder / FACTS_FILE)

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a saved checkpoint; its state is in host memory.

        Raises:
            ContextError: a file is missing, truncated, of another format, or its content is not
                what was saved.
        """
        folder = Path(directory)
        facts = _read_facts(folder / FACTS_FILE)
        path = folder / STATE_FILE
        try:
            # Copies: what is loaded is a map of the file, and would change with it.
            images = {name: image.clone() for name, image in load_file(path).items()}
        except (OSError, SafetensorError) as error:
            raise ContextError(f"{path}: expected a saved state, got {error}") from None
        if _content(images) != facts.pop("state_sha256"):
            raise ContextError(f"{path}: its content is not what {FACTS_FILE} was written for")
        return cls(**facts, images=images)


def _read_facts(path: Path) -> dict[str, Any]:
    """Arguments of a Checkpoint but its images, and `state_sha256`."""
    try:
        facts = json.loads(path.read_bytes())
        if facts["format"] != FORMAT:
            raise ContextError(f"{path}: expected format {FORMAT}, got {facts['format']!r}")
        if facts["facts_sha256"] != _facts_hash(facts):
            raise ContextError(f"{path}: its content is not what was saved; the file was changed")
        return {
            "coverage": Coverage(**facts["coverage"]),
            "tokens": tuple(facts["tokens"]),
            "anchor": facts["anchor"],
            "generated": tuple(facts["generated"]),
            "rope_delta": facts["rope_delta"],
            "is_multimodal": facts["is_multimodal"],
            "state_sha256": facts["state_sha256"],
        }
    except OSError as error:
        raise ContextError(f"{path}: expected a saved context, got {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ContextError(f"{path}: expected a saved context, got broken text: {error}") from None


def _facts_hash(facts: Mapping[str, Any]) -> str:
    hashed = {name: value for name, value in facts.items() if name != "facts_sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def _content(images: Mapping[str, Tensor]) -> str:
    """Hash over names, shapes, dtypes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(images):
        image = images[name]
        digest.update(f"{name} {tuple(image.shape)} {image.dtype}\n".encode())
        digest.update(_bytes(image))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _short(value: str) -> str:
    return repr(value[:16]) if value else "none"


class PrefixCache:
    """Checkpoints by their tokens, within a byte budget; the least recently used go first.

    Args:
        capacity: bytes of state it may hold; 0 stores nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self.hits = 0
        self._stored: dict[tuple[int, ...], Checkpoint] = {}  # oldest use first

    def __len__(self) -> int:
        return len(self._stored)

    def store(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint if it fits, dropping older ones."""
        if checkpoint.nbytes > self.capacity:
            return
        self.drop([checkpoint.tokens])
        self._stored[checkpoint.tokens] = checkpoint
        self.nbytes += checkpoint.nbytes
        while self.nbytes > self.capacity:
            self.drop([next(iter(self._stored))])

    def longest(self, tokens: tuple[int, ...]) -> Checkpoint | None:
        """The stored checkpoint with the longest tokens that begin `tokens`, or None."""
        found = max(
            (key for key in self._stored if len(key) <= len(tokens) and tokens[: len(key)] == key),
            key=len,
            default=None,
        )
        if found is None:
            return None
        self.hits += 1
        checkpoint = self._stored.pop(found)
        self._stored[found] = checkpoint
        return checkpoint

    def drop(self, keys: Iterable[tuple[int, ...]]) -> None:
        """Forget checkpoints; unknown keys are ignored."""
        for key in keys:
            checkpoint = self._stored.pop(key, None)
            if checkpoint is not None:
                self.nbytes -= checkpoint.nbytes
