"""A target with its draft, and the startup choices that shape their graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dflash_graph.errors import OptionError, UnsupportedModelError
from dflash_graph.geometry import (
    DraftGeometry,
    MoeFfn,
    TargetGeometry,
    check_pair,
    draft_geometry_from_config,
    target_geometry_from_config,
)
from dflash_graph.graph import Backend, GraphBuilder, GraphKey
from dflash_graph.profiles import load_preset

#: Tokens of one page of a paged K/V pool. Attention is split at page edges, so it is part of the
#: numerics.
PAGE_SIZE: Final = 64


@dataclass(frozen=True)
class ModelPair:
    """What rounds are built for.

    Args:
        target: geometry of the target.
        draft: geometry of the draft, or None for plain decoding.
        dtype: the model dtype of activations, matrices and K/V.
        public_vocab: rows of the head that may be proposed or emitted; None for all.
        draft_causality: rule for local draft layers where the draft's config does not say.

    Raises:
        PairError: target and draft do not fit each other.
        OptionError: `public_vocab` is outside the head.
    """

    target: TargetGeometry
    draft: DraftGeometry | None = None
    dtype: str = "float32"
    public_vocab: int | None = None
    draft_causality: Literal["none", "sliding"] = "none"

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_pair(self.target, self.draft)
        if self.public_vocab is not None and not 1 <= self.public_vocab <= self.target.vocab:
            raise OptionError(
                f"public_vocab: expected 1..{self.target.vocab} (the head's rows), "
                f"got {self.public_vocab}"
            )

    @property
    def emitted_vocab(self) -> int:
        """Rows of the head that may be emitted; ids are [0, emitted_vocab)."""
        return self.public_vocab or self.target.vocab

    @property
    def draft_name(self) -> str:
        return self.draft.kind if self.draft else "none"

    def is_causal(self, layer: int) -> bool:
        """Whether block keys after the query are hidden in this draft layer."""
        assert self.draft is not None
        if self.draft.is_causal is not None:
            return self.draft.is_causal
        return (
            self.draft_causality == "sliding"
            and self.draft.layer_types[layer] == "sliding_attention"
        )

    def builder(
        self, segment: str, backend: Backend, *, draft_tokens: int, batch: int, columns: int
    ) -> GraphBuilder:
        """A builder for one segment.

        Raises:
            UnsupportedModelError: the target's feed-forward is a mixture of experts, which no graph
                computes yet.
        """
        if isinstance(self.target.ffn, MoeFfn):
            raise UnsupportedModelError(
                f"{self.target.architecture}: mixture-of-experts feed-forward has no graph yet; "
                "its geometry, weights and state sizes are known, dense targets run"
            )
        return GraphBuilder(GraphKey(segment, backend, draft_tokens, batch, columns, self.dtype))


def preset_pair(name: str, dtype: str = "bfloat16") -> ModelPair:
    """The pair of a shipped preset.

    Raises:
        OptionError: there is no such preset.
    """
    preset = load_preset(name)
    return ModelPair(
        target_geometry_from_config(preset["target"], f"{name}.target"),
        draft_geometry_from_config(preset["draft"], f"{name}.draft"),
        dtype=dtype,
    )
