"""Prefill through torch's own kernels leaves what the references leave: pages, rings, recurrent
state, hidden and features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_graph as dg
from dflash_graph import demo
from dflash_graph.executors import Executor
from dflash_graph.lowering import library
from dflash_graph.lowering.rules import RULES, Chunk
from dflash_graph.models.round import declare_catch_up, declare_first_token
from dflash_graph.op import Op, dtype_of, get_op
from dflash_graph.rounds import Rounds
from dflash_graph.tensor import MODEL_DTYPE, Symbols, TensorSpec
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    INTEGER_POISON,
    Tolerance,
    assert_matches,
    poison_,
    poisoned,
)

#: Relative L2 error of float32 kernels that sum in other orders than the references, one layer
#: after another; a norm over a head whose values all but vanish magnifies it.
LAYERS = 1e-4
#: Two ids whose scores are nearer than this may change places.
NEAR_TIE = 2e-3


def rebind(executor: Executor) -> None:
    """Let an executor that was made for the references run torch's kernels."""
    schedules = executor.compiled.schedules
    executor.segments = tuple(library.bind(s, executor.tensors) for s in schedules)


@pytest.fixture
def library_bench(bench: Any) -> Any:
    """A bench whose prefill runs torch's kernels, with impossible numbers in dead columns."""

    class LibraryBench(bench):  # type: ignore[misc]
        def _bind(self, key: Any, graphs: Sequence[Any]) -> Executor:
            executor: Executor = super()._bind(key, graphs)
            if key[0] == "prefill" and not isinstance(executor.segments[0], library.LibrarySegment):
                rebind(executor)
            return executor

        def _run(self, executor: Executor, index: int, fields: Any) -> dict[str, Tensor]:
            if "ids" in executor.inputs:
                (ids,), (live,) = fields["ids"], fields["live_columns"]
                dead = [INTEGER_POISON] * (len(ids) - live)
                fields = fields | {"ids": [[*ids[:live], *dead]]}
            stored: dict[str, Tensor] = super()._run(executor, index, fields)
            return stored

    return LibraryBench


def pairs(golden: Any) -> dict[str, tuple[Any, Any]]:
    return {
        "dense_2x": (golden("target_dense_2x")[0], golden("dflash2_g16")[0]),
        "dense_3x": (golden("target_dense_3x")[0], golden("dflash_mixed_w6")[0]),
        "alone": (golden("target_dense_3x")[0], None),
        "demo": (demo.target_directory(), demo.draft_directory("dflash2")),
    }


@pytest.mark.parametrize("which", ["dense_2x", "dense_3x", "alone", "demo"])
@pytest.mark.parametrize("sizes", [(45, 1, 2, 70, 13), (130,), (1, 63, 1, 64)])
def test_prefill(
    which: str,
    sizes: tuple[int, ...],
    golden: Any,
    bench: Any,
    library_bench: Any,
    rng: torch.Generator,
) -> None:
    """Chunks of odd lengths one after another, narrower than their graph, across page edges and
    longer than a ring.
    """
    target, draft = pairs(golden)[which]
    benches = [make(target, draft, "eager", slots=2) for make in (bench, library_bench)]
    vocab = benches[0].pair.target.vocab
    ids = torch.randint(0, vocab, (sum(sizes),), generator=rng).tolist()
    start = 0
    for size in sizes:
        physical = 1 << (size - 1).bit_length() if size > 2 else size
        expected, found = (
            b.prefill(1, ids[start : start + size], start, physical) for b in benches
        )
        start += size
        assert found.keys() == expected.keys()
        for name, value in found.items():
            close(value[:, :size], expected[name][:, :size], f"{name} of {size} up to {start}")
            if name.endswith(("attention", "scan")):
                assert not value[:, size:].any(), f"{name}: dead columns are not zero"
        for name, pool in benches[1].pools.tensors.items():
            close(pool, benches[0].pools.tensors[name], f"{name} at {start}")


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal within `LAYERS`, and NaN, never written, at the same places."""
    written = ~expected.isnan()
    assert torch.equal(~found.isnan(), written), f"{what}: other places were written"
    found, expected = found[written].double(), expected[written].double()
    error, norm = float((found - expected).norm()), float(expected.norm())
    assert error <= LAYERS * norm, f"{what}: error {error:.3e} of {norm:.3e}"


def test_first_token(golden: Any, library_bench: Any, rng: torch.Generator) -> None:
    b = library_bench(*pairs(golden)["dense_2x"], "eager", slots=2)
    b.pools.tensors["target.continuation_hidden"].normal_(generator=rng)
    for sampling in (False, True):
        graph = declare_first_token(b.pair, "eager", sampling=sampling)
        executor = b._bind(("first", sampling), [graph])
        fields = {name: 0 for name in executor.inputs.layout.fields} | {"slots": 1}
        executor.inputs.fill(**fields)
        b.pools.tensors["target.token_counts"].zero_()
        executor.run()
        expected = {name: executor.outputs[name].clone() for name in executor.outputs.layout.fields}
        executor.outputs.buffer.fill_(INTEGER_POISON)
        rebind(executor)
        executor.run()
        for name, value in expected.items():
            assert torch.equal(executor.outputs[name], value), name


@pytest.mark.parametrize("pending", [0, 3, 8])
def test_catch_up_keeps_its_bits(
    pending: int, golden: Any, library_bench: Any, rng: torch.Generator
) -> None:
    """Row-invariant products stay the references'; nothing pending leaves the context alone."""
    b = library_bench(*pairs(golden)["dense_3x"], "eager", slots=2, columns=8)
    b.pools.tensors["draft.pending_features"].normal_(generator=rng)
    executor = b._bind(("catch-up",), [declare_catch_up(b.pair, "eager", columns=8)])
    fields = {"slots": [1], "page_table": [b.tables[1]], "context_frontier": [60]}
    positions = {"context_positions": [[list(range(60, 68))]]}
    executor.inputs.fill(**fields, **positions, pending=[pending])
    before = {name: pool.clone() for name, pool in b.pools.tensors.items()}
    executor.run()
    expected = {name: pool.clone() for name, pool in b.pools.tensors.items()}
    for name, value in before.items():
        b.pools.tensors[name].copy_(value)
    rebind(executor)
    executor.run()
    for name, pool in b.pools.tensors.items():
        close(pool, expected[name], name)


#: Sizes of every op's symbols; an op adds its own.
SIZES = {"B": 1, "W": 9, "H": 24, "I": 40, "O": 33, "V": 50, "G": 2, "N": 6, "D": 16}
SIZES |= {"slots": 3, "pages": 11, "page_size": 4, "M": 6, "window": 5, "depth": 3, "taps": 4}
SIZES |= {"Hk": 2, "Hv": 4, "Dk": 16, "Dv": 24, "C": 52}
HEADS = {"q_heads": 6, "kv_heads": 2, "head_dim": 16}
SCORES = {"multiplier": 1.5, "softcap": 20.0}
GDN = {"key_heads": 2, "key_dim": 6, "value_heads": 4, "value_dim": 7}
#: Attributes of each op that has a rule.
CALLS: dict[str, list[dict[str, Any]]] = {
    "append_kv": [{}],
    "attention_gate": [HEADS],
    "context_kv": [
        {"kv_heads": 2, "head_dim": 16, "rotary_half": half, "eps": 1e-6, "tiled": False}
        for half in (3, 8)
    ],
    "conv_history_commit": [{}],
    "embedding": [{"scale": 1.0}, {"scale": 1.7}],
    "gated_norm": [{"value_heads": 4, "value_dim": 24, "eps": 1e-6}],
    "gdn_conv": [GDN],
    "gdn_gates": [{"value_heads": 4}],
    "gdn_scan": [{}],
    "head_argmax": [{"skip": skip, "public_vocab": 43, **SCORES} for skip in (0, 1)],
    "head_norm_rope": [
        {**HEADS, "query_parts": parts, "rotary_half": half, "eps": 1e-6, "offset": parts == 2}
        for parts, half in ((1, 8), (2, 4))
    ],
    "head_scores": [
        {**SCORES, "tiled": True},
        {"multiplier": 1.0, "softcap": 0.0, "tiled": False},
    ],
    "join_features": [{"blocks": 3}],
    "linear": [{"tiled": False}],
    "paged_attention": [{}],
    "replace_embeddings": [{}],
    "residual_add": [{}],
    "ring_append": [{}],
    "rms_norm": [{"eps": 1e-6, "offset": offset} for offset in (True, False)],
    "rotary_table": [
        {"rotary_half": 8, "theta": 1e4, "sections": sections} for sections in ((), (3, 3, 2))
    ],
    "stage_hidden": [{}],
    "swiglu": [{"ffn_width": 20}],
}


def test_every_rule_has_calls() -> None:
    assert CALLS.keys() == RULES.keys()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_rule(name: str, dtype: str, where: str, rng: torch.Generator) -> None:
    """A rule against its op's reference in float64; dead columns hold poison."""
    op = get_op(name)
    for attributes, live in product(CALLS[name], (9, 6, 2, 0)):
        if live >= attributes.get("skip", 0):
            chunk = Chunk(start=7, live=live, slot=1)
            arguments = random_arguments(op, attributes, chunk, dtype, rng)
            check_rule(op, arguments, attributes, chunk, dtype, where)


def random_arguments(
    op: Op, attributes: dict[str, Any], chunk: Chunk, dtype: str, rng: torch.Generator
) -> dict[str, Any]:
    """Arguments of a call by name, on the CPU."""
    sizes = SIZES | {k: v for k, v in attributes.items() if type(v) is int}
    sizes["A"] = len(attributes.get("sections", ())) or 1
    given = {
        "ids": torch.randint(0, SIZES["V"], (1, SIZES["W"]), generator=rng),
        "positions": torch.randint(0, 4096, (sizes["A"], 1, SIZES["W"]), generator=rng),
        "replaced": torch.randint(0, 2, (1, SIZES["W"]), generator=rng),
        "page_table": torch.randperm(SIZES["pages"], generator=rng)[None, : SIZES["M"]],
        "slots": torch.tensor([chunk.slot]),
        "start": torch.tensor([chunk.start]),
        "live": torch.tensor([chunk.live]),
        "committed": torch.tensor([chunk.live]),
    }
    arguments: dict[str, Any] = {}
    for name, argument in op.inputs.items():
        shape = Symbols(op.name, sizes).shape(argument.shape)
        kind = dtype_of(dtype if argument.dtype == MODEL_DTYPE else argument.dtype)
        made = [
            given[name].int() if name in given else torch.randn(shape, generator=rng).to(kind)
            for _ in range(attributes["blocks"] if argument.many else 1)
        ]
        arguments[name] = made if argument.many else made[0]
    for name in {"beta", "g"} & arguments.keys():
        arguments[name] = torch.rand(arguments[name].shape, generator=rng)
    if "g" in arguments:
        arguments["g"] = -3.0 * arguments["g"]
    return arguments


def check_rule(
    op: Op,
    arguments: dict[str, Any],
    attributes: dict[str, Any],
    chunk: Chunk,
    dtype: str,
    where: str,
) -> None:
    tolerance: Tolerance = F32_REDUCTION if dtype == "float32" else BF16_REDUCTION
    wide = each(arguments, lambda x: x.double() if x.is_floating_point() else x.clone())
    results = op.reference(**wide, **attributes)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    mine = each(arguments, lambda x: x.to(where, copy=True))
    for name, argument in op.inputs.items():
        if argument.kind == "tensor" and argument.shape.startswith("B W"):
            for x in mine[name] if argument.many else [mine[name]]:
                poison_(x[:, chunk.live :])
    outputs = {
        name: poisoned(TensorSpec(tuple(result.shape), output_dtype(op, name, dtype)), where)
        for name, result in zip(op.outputs, results, strict=True)
    }
    RULES[op.name](chunk, **mine, **outputs, **attributes)
    live = chunk.live - attributes.get("skip", 0)
    for (name, found), oracle in zip(outputs.items(), results, strict=True):
        what = f"{op.name}.{name}"
        assert_matches(found[:, :live].cpu(), oracle[:, :live], tolerance, what)
        dead = found[:, live:].cpu()
        if op.name in ("paged_attention", "gdn_scan"):
            assert not dead.any(), f"{what}: dead columns are not zero"
    for name in op.updated:
        assert_matches(mine[name].cpu(), wide[name], tolerance, f"{op.name}.{name}")


def output_dtype(op: Op, name: str, dtype: str) -> str:
    declared = op.outputs[name].dtype
    return dtype if declared == MODEL_DTYPE else declared


def each(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        name: change(value) if isinstance(value, Tensor) else [change(x) for x in value]
        for name, value in arguments.items()
    }


@pytest.mark.parametrize(("draft", "chunk"), [("dflash2", 1024), ("dflash", 33)])
def test_demo_texts(draft: Any, chunk: int, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of the references after a prefill of torch's kernels go on with the same text; where
    they do not, two scores were all but equal.
    """
    options = dg.EngineOptions(
        device="cpu", lowering="eager", max_batch=2, max_context=320, prefill_chunk=chunk
    )
    prompts, params = demo.prompts()[2:6], dg.SamplingParams(max_new_tokens=24)
    with dg.Engine.demo(options, draft=draft) as engine:
        expected = engine.generate(prompts, params)

    made = Rounds.prefill

    def prefill(self: Rounds, live: int, *, embeddings: bool = False) -> Executor:
        executor = made(self, live, embeddings=embeddings)
        if not isinstance(executor.segments[0], library.LibrarySegment):
            rebind(executor)
        return executor

    monkeypatch.setattr(Rounds, "prefill", prefill)
    with dg.Engine.demo(options, draft=draft) as engine:
        rebind(engine.rounds.first_token)
        found = engine.generate(prompts, params)
        assert engine.tokenizer is not None
        encoded = [engine.tokenizer.encode(prompt) for prompt in prompts]
    for ids, mine, theirs in zip(encoded, found, expected, strict=True):
        pairs = zip(mine.token_ids, theirs.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            gap = score_gap(bench, ids, theirs.token_ids[:at], mine.token_ids[at])
            assert gap < NEAR_TIE, f"token {at}: its score is {gap:.2e} below the best"


def score_gap(bench: Any, prompt: Sequence[int], text: Sequence[int], token: int) -> float:
    """How far a token's score after a text is below the best, by the references."""
    b = bench(demo.target_directory(), None, "eager", context=320)
    b.prefill(0, [*prompt, *text])
    weight = next(w for use, w in b.weights.items() if use.parts[0] == "target/lm_head.weight")
    scores = b.pools.tensors["target.continuation_hidden"][0] @ weight.t()
    return float(scores.max() - scores[token])
