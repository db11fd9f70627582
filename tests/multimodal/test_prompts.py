"""Multimodal prompts: given embeddings and three-axis positions, against the public model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dflash_graph as dg
from dflash_graph.ops import get_op

Load = Callable[..., dg.Engine]

GOLDEN = Path(__file__).parents[1] / "golden"
#: Absolute tolerances of the golden set.
LOGITS, BLOCK, CONTEXT_INPUT, CONTEXT_K, CONTEXT_V = 5e-4, 3e-4, 5e-5, 2e-4, 5e-5
COUNT = 16
LONG = dg.SamplingParams(max_new_tokens=COUNT, ignore_eos=True)

#: Texts and images, with seeds that have no near tie.
SCENES: dict[str, tuple[int, tuple[Any, ...]]] = {
    "image in the middle": (1, (9, (1, 4, 5), 7)),
    "image first": (3, ((1, 3, 3), 4)),
    "image last": (3, (5, (1, 2, 6))),
    "video and image": (4, (3, (3, 2, 4), 2, (1, 5, 2), 6)),
    "across a page": (5, (50, (2, 4, 4), 9)),
    "text": (6, (33,)),
}


@pytest.fixture(params=SCENES)
def given(request: pytest.FixtureRequest, tools: Any) -> Any:
    seed, parts = SCENES[request.param]
    return tools.scene(torch.Generator().manual_seed(seed), *parts)


@pytest.fixture
def video(tools: Any) -> Any:
    seed, parts = SCENES["video and image"]
    return tools.scene(torch.Generator().manual_seed(seed), *parts)


@pytest.mark.parametrize("chunk", [1024, 16, 5])
def test_prompt(given: Any, oracle: Any, load: Load, recorder: Any, chunk: int) -> None:
    """Logits and block outputs of every prompt token, in chunks smaller than the image too."""
    answer = oracle.answer(given, 1)
    engine = load("dflash2_g16", prefill_chunk=chunk, draft_tokens=3)
    result = given.generate(engine, dg.SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert result.token_ids == answer.ids
    live = len(given.ids)
    for layer, block in enumerate(answer.blocks[:-1]):
        found = recorder.columns(f"prefill/layer.{layer}/ffn/residual", live)
        assert float((found - block).abs().max()) <= BLOCK, layer
    hidden = recorder.columns("prefill/final_norm", live)
    weights = engine.rounds.model.weights
    head = next(w for use, w in weights.items() if use.parts == ("target/lm_head.weight",))
    logits = get_op("head_scores").reference(
        hidden[None], head, multiplier=1.0, softcap=0.0, tiled=True
    )
    assert float((logits[0] - answer.logits).abs().max()) <= LOGITS


@pytest.mark.parametrize("draft", ["dflash2_g16", "dflash_mixed_w16"])
def test_tokens(oracle: Any, load: Load, tools: Any, draft: str) -> None:
    """Speculative, plain and the public model agree; all scenes in one engine, in company."""
    scenes = [tools.scene(torch.Generator().manual_seed(s), *p) for s, p in SCENES.values()]
    expected = [oracle.answer(one, COUNT).ids for one in scenes]
    for options in (
        {"speculative": False},
        {"draft_tokens": 3, "prefill_chunk": 7},
        {"draft_tokens": 7},
    ):
        engine = load(draft, **options)
        requests = [one.submit(engine, LONG) for one in scenes]
        while not engine.is_idle:
            engine.step()
        assert [tuple(r.token_ids) for r in requests] == expected, options


def test_acceptance_with_axes_of_their_own(load: Load) -> None:
    """Positions far from the indices: rounds that accept drafts commit at the right positions.

    The golden text continues where its prompt's positions are shifted as a whole, since rotary
    attention sees differences alone; its drafts are accepted as they were.
    """
    expected = json.loads((GOLDEN / "e2e_dflash2_g16" / "expected.json").read_text())
    tensors = load_file(GOLDEN / "e2e_dflash2_g16" / "expected.safetensors")
    engine = load("dflash2_g16", draft_tokens=7)
    for index in range(expected["prompts"]):
        ids = tensors[f"prompt{index}.ids"].tolist()
        greedy = tuple(tensors[f"prompt{index}.greedy_ids"].tolist())
        request = engine.submit(
            ids,
            dg.SamplingParams(max_new_tokens=len(greedy)),
            positions=(1000 + torch.arange(len(ids))).expand(3, -1),
        )
        while not engine.is_idle:
            engine.step()
        assert tuple(request.token_ids) == greedy
        assert max(one.accepted for one in request.rounds) > 3
        assert request.rope_delta == 1000


def draft_context(folder: Path, features: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Context input, keys and values of scalar positions 0.., by hand from the stored weights."""
    w = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    eps, dim = config["rms_norm_eps"], config["head_dim"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    c = norm(features.double() @ w["fc.weight"].t(), w["hidden_norm.weight"])
    at = f"layers.{layer}.self_attn."
    k = (c @ w[at + "k_proj.weight"].t()).unflatten(-1, (-1, dim))
    v = (c @ w[at + "v_proj.weight"].t()).unflatten(-1, (-1, dim))
    k = norm(k, w[at + "k_norm.weight"])
    channel = torch.arange(dim // 2, dtype=torch.float64)
    inverse = config["rope_parameters"]["rope_theta"] ** (-channel / (dim // 2))
    angle = (torch.arange(len(c), dtype=torch.float64)[:, None] * inverse)[:, None]
    left, right = k.chunk(2, -1)
    k = torch.cat(
        (left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1
    )
    return c, k, v


@pytest.mark.parametrize("chunk", [1024, 9])
def test_draft_context(given: Any, oracle: Any, load: Load, recorder: Any, chunk: int) -> None:
    """Features are the replaced prompt's, and the draft's positions are plain indices."""
    answer = oracle.answer(given, 1)
    engine = load("dflash2_g16", prefill_chunk=chunk, draft_tokens=3)
    given.generate(engine, dg.SamplingParams(max_new_tokens=1, ignore_eos=True))
    live = len(given.ids)
    features = torch.cat([answer.blocks[layer] for layer in (1, 3, 5)], -1)
    found = recorder.columns("context/join_features", live)
    assert float((found - features).abs().max()) <= BLOCK
    for layer in range(3):
        c, k, v = draft_context(GOLDEN / "dflash2_g16", found, layer)
        for name, expected, bound in (
            ("hidden_norm", c, CONTEXT_INPUT),
            (f"layer.{layer}/context_kv.k", k, CONTEXT_K),
            (f"layer.{layer}/context_kv.v", v, CONTEXT_V),
        ):
            mine = recorder.columns(f"context/{name}", live)
            assert float((mine.double() - expected).abs().max()) <= bound, name
    positions = torch.cat(
        [f["context_positions"][0, 0, : int(f["live_columns"])] for f in recorder.inputs]
    )
    assert torch.equal(positions.long(), torch.arange(live))


def test_own_rows_change_nothing(video: Any, oracle: Any, load: Load) -> None:
    """Each token's own embedding, and text positions spelled out, are the plain prompt."""
    engine = load("dflash2_g16", draft_tokens=7, prefill_chunk=16)
    (plain,) = engine.generate([video.ids], LONG)
    tokens = len(video.ids)
    text = torch.arange(tokens).expand(3, tokens)
    own = {i: oracle.embedding[token] for i, token in enumerate(video.ids)}
    for rows, positions in (
        (own, None),
        (dict(list(own.items())[::3]), text),
        (None, text.tolist()),
        ({}, text.int().numpy()),
        ({i: row.double() for i, row in own.items()}, text.to(torch.int16)),
    ):
        request = engine.submit(video.ids, LONG, embeddings=rows, positions=positions)
        while not engine.is_idle:
            engine.step()
        assert engine.result(request) == plain


def test_sampled(video: Any, load: Load) -> None:
    """Seeded, alone or in company, and in any slot."""
    engine = load("dflash2_g16", draft_tokens=3)
    params = [
        LONG.replace(temperature=0.8, seed=s, presence_penalty=0.2, top_p=0.95) for s in range(4)
    ]
    alone = [video.generate(engine, one) for one in params]
    requests = [video.submit(engine, one) for one in reversed(params)]
    while not engine.is_idle:
        engine.step()
    assert [engine.result(r) for r in reversed(requests)] == alone
    assert len({r.token_ids for r in alone}) == 4


def test_forks_go_on_at_their_positions(video: Any, load: Load) -> None:
    engine = load("dflash2_g16", draft_tokens=3)
    request = video.submit(engine, LONG)
    taken: list[tuple[int, dg.Checkpoint]] = []
    while not engine.is_idle:
        engine.step()
        if request.is_decoding:
            taken.append((len(request.token_ids), engine.checkpoint(request)))
    assert taken and request.rope_delta == int(video.positions.max()) + 1 - len(video.ids)
    for length, checkpoint in taken[::2]:
        fork = engine.fork(checkpoint.to_host(), LONG.replace(max_new_tokens=COUNT - length))
        while not engine.is_idle:
            engine.step()
        assert fork.token_ids == request.token_ids[length:]


def test_rows_are_the_caller_s(video: Any, load: Load) -> None:
    """A vision tower's output needs no preparation, and may be reused once it is submitted."""
    engine = load("dflash2_g16", draft_tokens=3, prefill_chunk=8)
    plain = video.generate(engine, LONG)
    rows = {i: row.clone().requires_grad_() * 1.0 for i, row in video.rows.items()}
    positions = video.positions.clone()
    request = engine.submit(video.ids, LONG, embeddings=rows, positions=positions)
    positions.zero_()
    for row in rows.values():
        row.detach().fill_(float("nan"))
    rows.clear()
    while not engine.is_idle:
        engine.step()
    assert engine.result(request) == plain
    again = video.generate(engine, LONG)
    assert again == plain


def test_beside_text(video: Any, load: Load) -> None:
    """A plain prompt beside or after a multimodal one is as it is alone, stored prefixes or not."""
    engine = load("dflash2_g16", draft_tokens=3, prefix_cache_bytes=2**26)
    (plain,) = load("dflash2_g16", draft_tokens=3).generate([video.ids], LONG)
    media = video.generate(engine, LONG)
    requests = [video.submit(engine, LONG), engine.submit(video.ids, LONG)]
    requests += [video.submit(engine, LONG), engine.submit(video.ids, LONG)]
    while not engine.is_idle:
        engine.step()
    for request, expected in zip(requests, (media, plain) * 2, strict=True):
        assert tuple(request.token_ids) == expected.token_ids


# -- bad input -------------------------------------------------------------------------------------


def row(value: float = 0.5, **more: Any) -> Tensor:
    return torch.full((64,), value, **more)


TEXT = torch.arange(4).expand(3, 4)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "position past the prompt": ({"embeddings": {4: row()}}, r"0\.\.3.*4"),
    "negative position": ({"embeddings": {-1: row()}}, r"0\.\.3.*-1"),
    "bool position": ({"embeddings": {True: row()}}, r"0\.\.3.*True"),
    "text position": ({"embeddings": {"1": row()}}, r"0\.\.3.*'1'"),
    "short row": ({"embeddings": {1: torch.ones(63)}}, r"embeddings\[1\].*\[64\].*\[63\]"),
    "matrix": ({"embeddings": {1: torch.ones(1, 64)}}, r"embeddings\[1\].*\[1, 64\]"),
    "list": ({"embeddings": {1: [0.0] * 64}}, r"embeddings\[1\].*list"),
    "integers": ({"embeddings": {1: torch.ones(64, dtype=int)}}, r"embeddings\[1\]"),
    "complex": ({"embeddings": {1: torch.ones(64, dtype=torch.complex64)}}, r"embeddings\[1\]"),
    "nan": ({"embeddings": {0: row(), 1: row(float("nan"))}}, r"embeddings\[1\].*finite"),
    "infinite": ({"embeddings": {1: row(float("-inf"))}}, r"embeddings\[1\].*finite"),
    "past float32": ({"embeddings": {1: row(1e300, dtype=torch.float64)}}, "finite in float32"),
    "no mapping": ({"embeddings": [row()] * 4}, "embeddings.*mapping.*list"),
    "tensor of rows": ({"embeddings": torch.ones(4, 64)}, "embeddings.*mapping.*Tensor"),
    "two axes": ({"positions": TEXT[:2]}, r"positions.*\[3, 4\].*\[2, 4\]"),
    "one axis": ({"positions": TEXT[0]}, r"positions.*\[3, 4\].*\[4\]"),
    "too few": ({"positions": TEXT[:, :3]}, r"positions.*\[3, 4\].*\[3, 3\]"),
    "batch": ({"positions": TEXT[:, None]}, r"positions.*\[3, 4\].*\[3, 1, 4\]"),
    "floats": ({"positions": TEXT.float()}, "positions.*float32"),
    "bools": ({"positions": TEXT.bool()}, "positions.*bool"),
    "below zero": ({"positions": TEXT - 1}, r"positions.*0\.\..*-1"),
    "too large": ({"positions": TEXT + 2**31}, r"positions.*0\.\."),
    "no room": ({"positions": TEXT + 2**31 - 4}, r"positions.*0\.\."),
    "ragged": ({"positions": [[0, 1, 2, 3], [0, 1, 2, 3], [0]]}, r"positions.*\[3, 4\]"),
    "words": ({"positions": "abcd"}, r"positions.*\[3, 4\]"),
    "huge": ({"positions": [[2**70] * 4] * 3}, r"positions.*\[3, 4\]"),
    "number": ({"positions": 7}, r"positions.*\[3, 4\]"),
}


def test_bad_media(load: Load) -> None:
    """Refused by name, with what runs left as it is."""
    engine = load("dflash2_g16", draft_tokens=3)
    (expected,) = engine.generate([(1, 2, 3)], LONG)
    running = engine.submit((1, 2, 3), LONG)
    engine.step()
    for kind, (media, message) in BAD.items():
        with pytest.raises(dg.RequestError, match=message):
            engine.submit((1, 2, 3, 4), LONG, **media)
        assert running.id == engine._next_id - 1 and not engine.scheduler.waiting, kind
    while not engine.is_idle:
        engine.step()
    assert engine.result(running) == expected


def test_positions_of_any_size(load: Load) -> None:
    """The largest position that is taken leaves room for every token that follows."""
    engine = load("dflash2_g16", draft_tokens=15, max_context=64)
    request = engine.submit(
        (1, 2, 3), dg.SamplingParams(max_new_tokens=61), positions=[[2**30 - 1] * 3] * 3
    )
    while not engine.is_idle:
        engine.step()
    assert request.finish_reason == "length" and len(request.token_ids) == 61
