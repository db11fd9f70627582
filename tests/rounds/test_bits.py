"""Commit and plain decoding leave the same bits: state, history, K/V, hidden, scores, for every A
and N.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph import demo
from dflash_graph.geometry import layer_indices
from dflash_graph.testing import same_bytes

STEPS = 20


class Plain:
    """Plain decoding of one prompt, with the state after every step."""

    def __init__(self, bench: Any, prompt: list[int], steps: int = STEPS) -> None:
        self.bench, self.start = bench, len(prompt)
        bench.prefill(0, prompt)
        # The token after the prompt is arbitrary: any continuation must be followed, not only a
        # likely one.
        self.tokens = [prompt[0]]
        self.states = [snapshot(bench, 0, self.start)]
        self.scores: list[Tensor] = []
        self.hidden: list[Tensor] = []
        for step in range(steps):
            executor, stored = bench.round(
                [0], [self.tokens[-1]], [self.start + step], draft_tokens=0
            )
            self.tokens.append(int(executor.outputs["accept/greedy.outputs"][0, 0]))
            self.scores.append(stored["verify/scores"][0, 0])
            self.hidden.append(stored["verify/final_norm"][0, 0])
            executor.finish([1])
            self.states.append(snapshot(bench, 0, self.start + step + 1))


def snapshot(bench: Any, slot: int, length: int) -> dict[str, Tensor]:
    """Everything the target holds of a request at `length` processed positions."""
    found: dict[str, Tensor] = {}
    for name, pool in bench.pools.tensors.items():
        if name.startswith("target.") and name.endswith("pages"):
            found[name] = bench.keys(slot, name, length).clone()
        elif name.startswith("target.layers."):
            found[name] = pool[slot].clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert same_bytes(value, expected[name]), f"{what}: {name} differs from plain decoding"


def restore(bench: Any, slot: int, plain: Plain, at: int) -> None:
    """Put the plain trajectory's state at step `at` into a slot; everything beyond its frontier is
    NaN.
    """
    for name, value in plain.states[at].items():
        pool = bench.pools.tensors[name]
        if name.endswith("pages"):
            shape = (value.shape[0], bench.capacities.context, value.shape[2])
            dense = torch.full(shape, float("nan"), device=value.device)
            dense[:, : value.shape[1]] = value
            pages = dense.view(value.shape[0], -1, pool.shape[2], value.shape[2]).transpose(0, 1)
            pool[bench.tables[slot]] = pages.to(pool.dtype)
        else:
            pool[slot] = value


def wrong(token: int, vocab: int) -> int:
    return (token + 1) % vocab


def pairs(golden: Any) -> dict[str, tuple[Any, Any]]:
    return {
        "dense_2x": (golden("target_dense_2x")[0], golden("dflash2_g16")[0]),
        "dense_3x": (golden("target_dense_3x")[0], golden("dflash_mixed_w6")[0]),
        "demo": (demo.target_directory(), demo.draft_directory("dflash2")),
    }


@pytest.mark.parametrize(
    ("which", "backend", "dtype"),
    [
        ("dense_2x", "eager", "float32"),
        ("dense_3x", "eager", "float32"),
        ("demo", "eager", "float32"),
        ("demo", "eager", "bfloat16"),
        ("demo", "inductor", "float32"),
        ("dense_3x", "inductor", "float32"),
    ],
)
@pytest.mark.parametrize("draft_tokens", [7])
def test_every_acceptance_and_commit(
    which: str, backend: Any, dtype: str, draft_tokens: int, golden: Any, bench: Any
) -> None:
    """One round with A forced to 0..K and N to 0..A+1, from a frontier whose block crosses a page
    edge.
    """
    target, draft = pairs(golden)[which]
    b = bench(target, draft, backend, columns=draft_tokens + 1, dtype=dtype)
    check_every_acceptance_and_commit(b, draft_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["dense_3x", "demo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("draft_tokens", [1, 7, 15])
def test_every_acceptance_and_commit_of_kernels(
    which: str, dtype: str, captured: bool, draft_tokens: int, golden: Any, bench: Any
) -> None:
    target, draft = pairs(golden)[which]
    shape = {"columns": draft_tokens + 1, "dtype": dtype}
    b = bench(target, draft, "triton", device="cuda", captured=captured, **shape)
    check_every_acceptance_and_commit(b, draft_tokens)


def check_every_acceptance_and_commit(b: Any, draft_tokens: int) -> None:
    vocab = b.pair.target.vocab
    prompt = [(7 * i + 3) % vocab for i in range(61)]
    plain = Plain(b, prompt, draft_tokens + 2)
    right = plain.tokens[1 : draft_tokens + 1]
    for accepted in range(draft_tokens + 1):
        drafts = right[:accepted] + [wrong(t, vocab) for t in right[accepted:]]
        for committed in range(accepted + 2):
            restore(b, 0, plain, 0)
            executor, stored = b.round(
                [0], [plain.tokens[0]], [61], draft_tokens=draft_tokens, drafts=[drafts]
            )
            what = f"A={accepted} N={committed}"
            assert executor.outputs["accept/greedy.accepted"].tolist() == [accepted], what
            assert executor.outputs["accept/greedy.licensed"].tolist() == [accepted + 1], what
            outputs = executor.outputs["accept/greedy.outputs"][0, : accepted + 1].tolist()
            assert outputs == plain.tokens[1 : accepted + 2], what
            for column in range(accepted + 1):
                same = same_bytes(stored["verify/scores"][0, column], plain.scores[column])
                assert same, f"{what}: scores of column {column}"
            executor.finish([committed])
            assert_same(snapshot(b, 0, 61 + committed), plain.states[committed], what)
            if committed:
                hidden = b.pools.tensors["target.continuation_hidden"][0]
                assert same_bytes(hidden, plain.hidden[committed - 1]), what
                assert b.pair.draft is not None
                pending = b.pools.tensors["draft.pending_features"][0, :committed]
                blocks = [
                    stored[f"verify/layer.{layer}/ffn/residual"][0, :committed]
                    for layer in b.pair.draft.target_layer_ids
                ]
                assert same_bytes(pending, torch.cat(blocks, -1)), what


@pytest.mark.parametrize(
    ("which", "backend"), [("dense_2x", "eager"), ("demo", "eager"), ("dense_2x", "inductor")]
)
@pytest.mark.parametrize("draft_tokens", [3])
def test_rounds_in_company(
    which: str, backend: Any, draft_tokens: int, golden: Any, bench: Any, rng: torch.Generator
) -> None:
    """Three requests in random rows with random P, A and N, round after round; each equals itself
    alone.
    """
    target, draft = pairs(golden)[which]

    def make(slots: int) -> Any:
        return bench(target, draft, backend, slots=slots, columns=draft_tokens + 1)

    check_rounds_in_company(make, draft_tokens, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft_tokens", [3, 15])
def test_rounds_of_kernels_in_company(
    captured: bool, dtype: str, draft_tokens: int, bench: Any, rng: torch.Generator
) -> None:
    target, draft = demo.target_directory(), demo.draft_directory("dflash2")
    shape = {"columns": draft_tokens + 1, "dtype": dtype}

    def make(slots: int) -> Any:
        return bench(
            target, draft, "triton", slots=slots, device="cuda", captured=captured, **shape
        )

    check_rounds_in_company(make, draft_tokens, rng)


def check_rounds_in_company(make: Any, draft_tokens: int, rng: torch.Generator) -> None:
    alone = make(1)
    vocab = alone.pair.target.vocab
    lengths = [5, 63, 30]
    prompts = [torch.randint(0, vocab, (n,), generator=rng).tolist() for n in lengths]
    plains = []
    for prompt in prompts:
        alone.pools.reset_slot(0)
        plains.append(Plain(alone, prompt))
    b = make(3)
    for slot, plain in enumerate(plains):
        restore(b, slot, plain, 0)
    done = [0, 0, 0]
    while min(done) < STEPS - draft_tokens - 1:
        order = [
            i
            for i in torch.randperm(3, generator=rng).tolist()
            if done[i] < STEPS - draft_tokens - 1
        ]
        rows, forced, live = [], [], []
        for i in order:
            p = int(torch.randint(0, draft_tokens + 1, (), generator=rng))
            a = int(torch.randint(0, p + 1, (), generator=rng))
            right = plains[i].tokens[done[i] + 1 : done[i] + 1 + draft_tokens]
            rows.append(right[:a] + [wrong(t, vocab) for t in right[a:]])
            forced.append(a)
            live.append(p)
        executor, stored = b.round(
            order,
            [plains[i].tokens[done[i]] for i in order],
            [plains[i].start + done[i] for i in order],
            draft_tokens=draft_tokens,
            drafts=rows,
            live_drafts=live,
        )
        assert executor.outputs["accept/greedy.accepted"].tolist() == forced
        kept = [int(torch.randint(0, a + 2, (), generator=rng)) for a in forced]
        for row, i in enumerate(order):
            for column in range(forced[row] + 1):
                expected = plains[i].scores[done[i] + column]
                assert same_bytes(stored["verify/scores"][row, column], expected), (i, column)
        executor.finish(kept)
        for row, i in enumerate(order):
            done[i] += kept[row]
        for i, plain in enumerate(plains):
            found = snapshot(b, i, plain.start + done[i])
            assert_same(found, plain.states[done[i]], f"request {i} at step {done[i]}")


def test_layers_of_both_kinds_are_compared(golden: Any, bench: Any) -> None:
    """The snapshot really holds recurrent state, history and K/V of every layer."""
    b = bench(golden("target_dense_2x")[0], None, "eager")
    b.prefill(0, [1, 2, 3])
    names = snapshot(b, 0, 3)
    linear = layer_indices(b.pair.target.layer_types, "linear_attention")
    assert len(names) == 2 * len(linear) + 2 * (b.pair.target.layers - len(linear))
    assert all(float(value.abs().max()) > 0 for value in names.values())


def test_threads(bench: Any) -> None:
    """The bits of a round do not depend on the number of threads either."""
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            b = bench(demo.target_directory(), demo.draft_directory("dflash"), "eager", columns=8)
            b.prefill(0, list(range(2, 150)))
            b.round([0], [3], [148], draft_tokens=7)
            found.append(b.round([0], [3], [148], draft_tokens=7)[1])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for name, value in other.items():
            if name.startswith("verify/layer"):
                assert same_bytes(value, found[0][name]), name
