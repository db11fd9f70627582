"""Which models a command is about: a preset or directories, and what shapes their graphs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dflash_graph.options import MAX_BATCH, MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from dflash_graph.choices import Choices
    from dflash_graph.models.pair import ModelPair

DEFAULT_DRAFT_TOKENS: Final = 7


class Lowering(StrEnum):
    """Lowerings of this release."""

    eager = "eager"
    inductor = "inductor"
    triton = "triton"


class Dtype(StrEnum):
    """Model dtypes."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Device(StrEnum):
    """Devices by kind."""

    cpu = "cpu"
    cuda = "cuda"


class Causality(StrEnum):
    """Rules for local draft layers whose config does not say."""

    none = "none"
    sliding = "sliding"


Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A shipped pair of configs."),
]
Target = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A target's directory."),
]
Draft = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A draft's directory."),
]
GraphDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        min=0,
        metavar="N",
        max=MAX_DRAFT_TOKENS,
        help=f"K; 0 is plain decoding. Default: {DEFAULT_DRAFT_TOKENS} with a draft, else 0.",
    ),
]
DraftTokens = Annotated[
    int, typer.Option(min=1, max=MAX_DRAFT_TOKENS, metavar="N", help="K, drafts a round.")
]
GraphBackend = Annotated[Lowering, typer.Option("--backend", help="The lowering it is for.")]
GraphDtype = Annotated[Dtype, typer.Option("--dtype", help="Of weights and activations.")]
Batch = Annotated[
    int, typer.Option(min=1, max=MAX_BATCH, metavar="N", help="B, requests in the round.")
]
DeviceProfile = Annotated[
    str | None,
    typer.Option(
        "--device-profile",
        metavar="NAME",
        help="With --backend triton: choices of kernels measured on this device, such as "
        "'NVIDIA H200'.",
    ),
]
PrefillChunk = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of one prefill pass.")]


def select_pair(
    preset: str | None,
    target: Path | None,
    draft: Path | None,
    draft_tokens: int | None,
    dtype: Dtype,
) -> tuple[ModelPair, int]:
    """The pair that the options name, and K; only configs are read, and a target's tokenizer.

    Raises:
        typer.BadParameter: the options contradict each other.
        OptionError: no preset has that name.
        ConfigError: a config is missing or impossible.
    """
    if (preset is None) == (target is None):
        raise typer.BadParameter("give either --preset or --target")
    if preset is not None and draft is not None:
        raise typer.BadParameter("--draft goes with --target; a preset has its own")
    from dflash_graph.geometry import (
        draft_geometry_from_config,
        read_draft_geometry,
        read_target_geometry,
        target_geometry_from_config,
    )
    from dflash_graph.models.pair import ModelPair

    public_vocab = None
    if target is not None:
        from dflash_graph.text import load_tokenizer

        geometry = read_target_geometry(target)
        draft_geometry = read_draft_geometry(draft) if draft is not None else None
        tokenizer = load_tokenizer(target)
        if tokenizer is not None:
            public_vocab = min(tokenizer.vocab_size, geometry.vocab)
    else:
        from dflash_graph.profiles import load_preset

        assert preset is not None
        configs = load_preset(preset)
        geometry = target_geometry_from_config(configs["target"], f"{preset}.target")
        draft_geometry = draft_geometry_from_config(configs["draft"], f"{preset}.draft")
    if draft_tokens is None:
        draft_tokens = DEFAULT_DRAFT_TOKENS if draft_geometry else 0
    if draft_tokens and draft_geometry is None:
        raise typer.BadParameter(f"--draft-tokens {draft_tokens} needs a draft: give --draft")
    used = draft_geometry if draft_tokens else None
    return ModelPair(geometry, used, dtype=dtype.value, public_vocab=public_vocab), draft_tokens


def select_choices(device: str | None, backend: Lowering) -> Choices | None:
    """The shipped choices of a device by its name; None: templates' defaults.

    Raises:
        OptionError: no profile of that name ships, or the backend has no kernels to choose.
    """
    if device is None:
        return None
    from dflash_graph.choices import shipped_choices
    from dflash_graph.errors import OptionError

    found = {choices.device: choices for choices in shipped_choices()}
    if device not in found:
        known = ", ".join(map(repr, found))
        raise OptionError(f"device-profile: expected one of {known}, got {device!r}")
    if backend is not Lowering.triton:
        raise OptionError(
            f"device-profile: expected --backend triton (it has kernels), got {backend}"
        )
    return found[device]
