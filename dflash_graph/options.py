"""Startup and sampling options: frozen, checked on construction, never edited afterwards.

Each field carries the words of its legal range once, as its description; the error of a bad value
quotes them: ``EngineOptions.draft_tokens: expected an integer 1..15, got 16``. Nothing is clamped
or coerced, except that an integer serves as a float, a list as a tuple and text as a path.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from dflash_graph.errors import OptionError

Device = Literal["cuda", "cpu"]
Dtype = Literal["float32", "bfloat16"]
Lowering = Literal["eager", "inductor", "triton"]

MAX_DRAFT_TOKENS: Final = 15
MAX_BATCH: Final = 8
MAX_TREE_COLUMNS: Final = 32
MAX_SEED: Final = 2**64 - 1

#: Lengths, ids and counts reach the device as int32; sampling values as float32.
_INT32_MAX: Final = 2**31 - 1
_FLOAT32_MAX: Final = (2 - 2**-23) * 2.0**127
_FLOAT32_TINY: Final = 2.0**-126


def _tuple_of_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("empty path")
    return value


Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
Finite = Annotated[float, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
NamedPath = Annotated[Path, Field(strict=False), BeforeValidator(_not_empty)]
StopText = Annotated[str, Field(min_length=1)]


class _Options(BaseModel):
    """What both kinds of options share: strict, frozen, one-line errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_one_line(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise OptionError(f"{cls.__name__}: expected a mapping of options, got {values!r}")
        name = str(first["loc"][0])
        if name not in cls.model_fields:
            known = ", ".join(cls.model_fields)
            raise OptionError(f"{cls.__name__}: expected options among {known}; got {name!r}")
        expected = cls.model_fields[name].description
        raise OptionError(f"{cls.__name__}.{name}: expected {expected}, got {values[name]!r}")

    def replace(self, **changes: Any) -> Self:
        """The same options with `changes`, checked as on construction; raises OptionError."""
        return type(self)(**{**dict(self), **changes})


class EngineOptions(_Options):
    """Startup choices of an engine, fixed for its life.

    Args:
        draft_tokens: K, drafts a round, 1..15; the block has W = K + 1 columns.
        max_batch: B, the most requests in a round, 1..8; each exact batch has its executor.
        device: ``"cuda"`` or ``"cpu"``; None: CUDA where torch sees one.
        dtype: of weights and activations; None: bfloat16 on CUDA, float32 on the CPU.
        lowering: how nodes run; None: triton on CUDA, inductor on the CPU.
        max_context: tokens a request may hold, prompt and output together.
        prefill_chunk: prompt tokens of one prefill pass.
        proposal_head: path of an indexed head (a subset of head rows), or None for all rows.
        draft_tree: DFlash2: columns of a verification tree, ``"auto"``, or None for the chain.
        draft_causality: rule of local layers where a draft's config does not say: ``"none"`` or
            ``"sliding"`` (causal).
        speculative: False decodes plainly through the same executors.
        public_vocab: head rows that may be emitted; None: the tokenizer's size, else all rows.
        prefix_cache_bytes: state of ended requests and processed prompts that is kept, so that a
            later prompt which begins with theirs skips that prefill; 0 keeps none.
        cuda_graphs: capture rounds in CUDA Graphs; only the lowering ``"triton"`` captures.
        profile: file of measured kernel choices that goes before the user's and those that ship;
            has no meaning on the CPU.

    Raises:
        OptionError: a field is ill-typed or out of range, or two contradict each other.
    """

    draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] = Field(
        default=7, description=f"an integer 1..{MAX_DRAFT_TOKENS}"
    )
    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = Field(
        default=4, description=f"an integer 1..{MAX_BATCH}"
    )
    device: Device | None = Field(default=None, description="'cuda', 'cpu' or None")
    dtype: Dtype | None = Field(default=None, description="'float32', 'bfloat16' or None")
    lowering: Lowering | None = Field(
        default=None, description="'eager', 'inductor', 'triton' or None"
    )
    max_context: Count = Field(default=8192, description="an integer 1..2^31-1 (tokens)")
    prefill_chunk: Count = Field(default=1024, description="an integer 1..2^31-1 (tokens)")
    proposal_head: NamedPath | None = Field(
        default=None, description="a path of an indexed head or None"
    )
    draft_tree: Annotated[int, Field(ge=2, le=MAX_TREE_COLUMNS)] | Literal["auto"] | None = Field(
        default=None, description=f"None, 'auto' or an integer 2..{MAX_TREE_COLUMNS} (columns)"
    )
    draft_causality: Literal["none", "sliding"] = Field(
        default="none", description="'none' or 'sliding'"
    )
    speculative: bool = Field(default=True, description="True or False")
    public_vocab: Count | None = Field(
        default=None, description="None or an integer 1..2^31-1 (head rows)"
    )
    prefix_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=0, description="an integer >= 0 (bytes)"
    )
    cuda_graphs: bool = Field(default=True, description="True or False")
    profile: NamedPath | None = Field(
        default=None, description="a path of a file of kernel choices or None"
    )

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        if isinstance(self.draft_tree, int) and self.draft_tree < self.columns:
            raise OptionError(
                f"EngineOptions.draft_tree: expected at least {self.columns} columns (the anchor "
                f"and draft_tokens={self.draft_tokens}), got {self.draft_tree}; "
                "lower draft_tokens or widen the tree"
            )
        return self

    @property
    def columns(self) -> int:
        """W, columns of the draft block: the anchor and K drafts."""
        return self.draft_tokens + 1

    def resolved(self) -> Self:
        """The same options with `device`, `dtype` and `lowering` filled in.

        Asks torch for a CUDA device only where `device` is None. A device that is named is taken as
        it is, so that graphs and plans for CUDA can be made on a machine without one.

        Raises:
            OptionError: `lowering="triton"` on the CPU.
        """
        device = self.device or _default_device()
        lowering = self.lowering or ("triton" if device == "cuda" else "inductor")
        if device == "cpu" and lowering == "triton":
            raise OptionError(
                "EngineOptions.lowering: expected 'eager' or 'inductor' (device 'cpu'), "
                "got 'triton'; choose one of these or device='cuda'"
            )
        dtype = self.dtype or ("bfloat16" if device == "cuda" else "float32")
        return self.replace(device=device, dtype=dtype, lowering=lowering)


class SamplingParams(_Options):
    """How one request samples and when it stops.

    Args:
        temperature: ``<= 0`` is greedy; positive values divide the logits.
        top_k: tokens kept before normalization; ``<= 0`` keeps all.
        top_p: the shortest prefix of the sorted tokens whose mass reaches this is kept, 0..1.
        min_p: tokens below this share of the best one are dropped, 0..1.
        presence_penalty: subtracted from the logit of a token generated before.
        frequency_penalty: subtracted once for every time it was generated.
        seed: key of the request's counter-based random numbers, 0..2^64-1.
        max_new_tokens: tokens the request may publish, at least 1.
        stop_token_ids: the request's own stop tokens, besides the checkpoint's.
        ignore_eos: do not stop at the checkpoint's end-of-sequence ids.
        stop: strings that end the text; they need an engine with a tokenizer.

    Raises:
        OptionError: a field is ill-typed, out of range or not finite.
    """

    temperature: Finite = Field(
        default=0.0, description="a finite float32 (<= 0 is greedy, positive at least 2^-126)"
    )
    top_k: Annotated[int, Field(ge=-_INT32_MAX, le=_INT32_MAX)] = Field(
        default=0, description="an integer within 31 bits (<= 0: off)"
    )
    top_p: Share = Field(default=1.0, description="a number 0..1")
    min_p: Share = Field(default=0.0, description="a number 0..1")
    presence_penalty: Finite = Field(default=0.0, description="a finite float32")
    frequency_penalty: Finite = Field(default=0.0, description="a finite float32")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = Field(
        default=0, description="an integer 0..2^64-1"
    )
    max_new_tokens: Count = Field(default=128, description="an integer 1..2^31-1")
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_tuple_of_list)] = Field(
        default=(), description="a list or tuple of integers 0..2^31-1"
    )
    ignore_eos: bool = Field(default=False, description="True or False")
    stop: Annotated[tuple[StopText, ...], BeforeValidator(_tuple_of_list)] = Field(
        default=(), description="a list or tuple of non-empty strings"
    )

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if 0.0 < self.temperature < _FLOAT32_TINY:
            expected = type(self).model_fields["temperature"].description
            raise OptionError(
                f"SamplingParams.temperature: expected {expected}, got {self.temperature!r}; "
                "use 0 for greedy"
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken instead of a draw."""
        return self.temperature <= 0.0


def _default_device() -> Device:
    # Imported late: options are read by command-line help and by planners that need no torch.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_built(options: EngineOptions) -> None:
    """Refuse startup choices that this release does not have; raises OptionError."""
    import torch  # here, so that options alone do not load it

    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device: expected 'cpu' (torch sees no CUDA device), got 'cuda'")
    if options.lowering == "triton" and importlib.util.find_spec("triton") is None:
        raise OptionError(
            "lowering: expected 'eager' or 'inductor' (triton is not installed: "
            "pip install 'dflash-graph[cuda]'), got 'triton'"
        )
    for name in ("proposal_head", "draft_tree"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{name}: expected None (not built yet), got {getattr(options, name)!r}"
            )
