"""The target against the golden vectors: prompt, chunks, verification in one block and step by
step, state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.geometry import layer_indices
from dflash_graph.ops import get_op

DENSE = ["target_dense_2x", "target_dense_3x"]
#: Absolute tolerances of the golden set's README, section 6.
LOGITS, BLOCK, HIDDEN, STATE, HISTORY, KEYS = 5e-4, 3e-4, 2e-4, 2e-4, 1e-4, 2e-4


def logits(bench: Any, hidden: Tensor) -> Tensor:
    """Head scores `[T, V]` of final hidden `[1, T, H]`."""
    head = next(
        u for u in bench.weights if u.parts[0].endswith(("lm_head.weight", "embed_tokens.weight"))
    )
    heads = [u for u in bench.weights if u.parts[0] == "target/lm_head.weight"]
    weight = bench.weights[heads[0] if heads else head]
    scores: Tensor = get_op("head_scores").reference(
        hidden, weight, multiplier=1.0, softcap=0.0, tiled=True
    )
    return scores[0]


def blocks(bench: Any, stored: dict[str, Tensor], region: str) -> Tensor:
    """Residual after every layer, `[L, T, H]`."""
    layers = range(bench.pair.target.layers)
    return torch.stack([stored[f"{region}/layer.{layer}/ffn/residual"][0] for layer in layers])


def check_state(
    bench: Any, close: Any, expected: dict[str, Tensor], prefix: str, index: int | None = None
) -> None:
    """Recurrent state and convolution history; the golden layout is [Hv, dk, dv] and [C, 4]."""
    for layer in layer_indices(bench.pair.target.layer_types, "linear_attention"):
        state = expected[f"{prefix}.recurrent_state.{layer}"]
        history = expected[f"{prefix}.conv_state.{layer}"]
        if index is not None:
            state, history = state[index], history[index]
        mine = bench.pools.tensors[f"target.layers.{layer}.gdn_state"][0].transpose(1, 2)
        close(mine, state, STATE, f"{prefix} recurrent_state.{layer}")
        columns = bench.pools.tensors[f"target.layers.{layer}.conv_history"][0].t()
        close(columns, history[:, 1:], HISTORY, f"{prefix} conv_state.{layer}")


def check_keys(
    bench: Any, close: Any, expected: dict[str, Tensor], prefix: str, length: int
) -> None:
    for layer in layer_indices(bench.pair.target.layer_types, "full_attention"):
        for side in "kv":
            mine = bench.keys(0, f"target.layers.{layer}.{side}_pages", length)
            close(mine, expected[f"{prefix}.{side}.{layer}"], KEYS, f"{prefix} {side}.{layer}")


@pytest.mark.parametrize("case", DENSE)
def test_prompt(case: str, backend: Any, golden: Any, bench: Any, close: Any) -> None:
    folder, expected, _ = golden(case)
    b = bench(folder, None, backend)
    stored = b.prefill(0, expected["prompt_ids"].tolist())
    close(blocks(b, stored, "prefill"), expected["prompt.block_out"], BLOCK, "block_out")
    close(blocks(b, stored, "prefill"), expected["prompt.block_out_f64"], BLOCK, "block_out_f64")
    hidden = stored["prefill/final_norm"]
    close(hidden[0], expected["prompt.final_hidden"], HIDDEN, "final_hidden")
    close(logits(b, hidden), expected["prompt.logits"], LOGITS, "logits")
    close(logits(b, hidden), expected["prompt.logits_f64"], LOGITS, "logits_f64")
    check_state(b, close, expected, "prompt")
    check_keys(b, close, expected, "prompt", 48)
    close(
        b.pools.tensors["target.continuation_hidden"][0],
        expected["prompt.final_hidden"][-1],
        HIDDEN,
        "continuation hidden",
    )


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("cut", ["7-13-28", "1x48"])
def test_chunks(case: str, cut: str, golden: Any, bench: Any, close: Any) -> None:
    """Chunks of 7, 13 and 28 tokens share one physical width; the rest of it has no effect."""
    folder, expected, _ = golden(case)
    sizes = [7, 13, 28] if cut == "7-13-28" else [1] * 48
    b = bench(folder, None, "eager")
    ids, start, hidden, outs = expected["prompt_ids"].tolist(), 0, [], []
    for size in sizes:
        stored = b.prefill(0, ids[start : start + size], start, physical=28 if size > 1 else 1)
        hidden.append(stored["prefill/final_norm"][:, :size])
        outs.append(blocks(b, stored, "prefill")[:, :size])
        start += size
    close(torch.cat(outs, 1), expected[f"chunked.{cut}.block_out"], BLOCK, "block_out")
    close(logits(b, torch.cat(hidden, 1)), expected[f"chunked.{cut}.logits"], LOGITS, "logits")
    check_state(b, close, expected, f"chunked.{cut}")


@pytest.mark.parametrize("case", DENSE)
def test_verify_block(case: str, backend: Any, golden: Any, bench: Any, close: Any) -> None:
    """Eight columns at once: logits, features, and the state after a commit of all eight."""
    folder, expected, _ = golden(case)
    b = bench(folder, None, backend)
    b.prefill(0, expected["prompt_ids"].tolist())
    before = {
        name: pool.clone()
        for name, pool in b.pools.tensors.items()
        if "gdn" in name or "conv" in name
    }
    anchor, *drafts = expected["verify.ids"].tolist()
    executor, stored = b.round([0], [anchor], [48], draft_tokens=7, drafts=[drafts])
    close(stored["verify/scores"][0], expected["verify.logits"], LOGITS, "logits")
    close(stored["verify/scores"][0], expected["verify.logits_f64"], LOGITS, "logits_f64")
    close(blocks(b, stored, "verify"), expected["verify.block_out"], BLOCK, "block_out")
    close(stored["verify/final_norm"][0], expected["verify.final_hidden"], HIDDEN, "final_hidden")
    for name, value in before.items():
        assert torch.equal(value, b.pools.tensors[name]), f"verify changed {name}"
    check_keys(b, close, expected, "verify", 56)
    executor.finish([8])
    check_state(b, close, expected, "verify")


@pytest.mark.parametrize("case", DENSE)
def test_verify_steps(case: str, backend: Any, golden: Any, bench: Any, close: Any) -> None:
    """The same tokens one by one: what a rollback to any length must give."""
    folder, expected, _ = golden(case)
    b = bench(folder, None, backend)
    b.prefill(0, expected["prompt_ids"].tolist())
    for step, token in enumerate(expected["verify.ids"].tolist()):
        executor, stored = b.round([0], [token], [48 + step], draft_tokens=0)
        close(
            stored["verify/scores"][0, 0],
            expected["verify_steps.logits"][step],
            LOGITS,
            f"step {step}",
        )
        close(
            blocks(b, stored, "verify")[:, 0],
            expected["verify_steps.block_out"][:, step],
            BLOCK,
            f"block_out {step}",
        )
        executor.finish([1])
        check_state(b, close, expected, "verify_steps", step)


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("committed", range(9))
def test_partial_commit(case: str, committed: int, golden: Any, bench: Any, close: Any) -> None:
    """Committing N of eight columns leaves the state that N single steps leave."""
    folder, expected, _ = golden(case)
    b = bench(folder, None, "eager")
    b.prefill(0, expected["prompt_ids"].tolist())
    anchor, *drafts = expected["verify.ids"].tolist()
    executor, _ = b.round([0], [anchor], [48], draft_tokens=7, drafts=[drafts])
    executor.finish([committed])
    if committed:
        check_state(b, close, expected, "verify_steps", committed - 1)
    else:
        check_state(b, close, expected, "prompt")


@pytest.mark.parametrize("case", DENSE)
def test_greedy(case: str, golden: Any, bench: Any, close: Any) -> None:
    """48 steps of plain decoding: ids exactly, and the logits that chose each."""
    folder, expected, _ = golden(case)
    b = bench(folder, None, "eager")
    b.prefill(0, expected["prompt_ids"].tolist())
    first = logits(b, b.pools.tensors["target.continuation_hidden"][None])[0]
    token = int(first.argmax())
    ids, scores = [token], [first]
    for step in range(47):
        executor, stored = b.round([0], [token], [48 + step], draft_tokens=0)
        token = int(executor.outputs["accept/greedy.outputs"][0, 0])
        ids.append(token)
        scores.append(stored["verify/scores"][0, 0])
        executor.finish([1])
    assert ids == expected["greedy.ids"].tolist()
    close(torch.stack(scores), expected["greedy.logits"], LOGITS, "logits")


def test_composite_layout(golden: Any, bench: Any) -> None:
    """The multimodal layout of a checkpoint gives the very bits of the text layout."""
    folder, expected, _ = golden("target_dense_2x")
    composite, _, _ = golden("target_dense_2x_composite")
    ids = expected["prompt_ids"].tolist()
    outputs = []
    for place in (folder, composite):
        b = bench(place, None, "eager")
        outputs.append(b.prefill(0, ids)["prefill/final_norm"])
    assert torch.equal(*outputs)
