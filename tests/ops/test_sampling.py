"""The formulas of `dflash_graph.sampling`; the ops that use them have tests of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_graph.sampling import (
    Controls,
    Draws,
    Law,
    Proposals,
    accept_chain,
    accepts,
    draw,
    penalized,
    probability,
    residual,
    softmax,
    target_law,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def controls(batch: int, **values: float) -> Controls:
    given = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0}
    given |= {name: value for name, value in values.items() if name != "top_k"}
    top_k = torch.full((batch,), int(values.get("top_k", 0)), dtype=torch.int32)
    return Controls(
        **{name: torch.full((batch,), value) for name, value in given.items()}, top_k=top_k
    )


def dense(law: Law, vocab: int) -> Tensor:
    shape = (len(law.ids), vocab)
    return torch.zeros(shape, dtype=law.probs.dtype).scatter_(1, law.ids, law.probs)


def one_law(logits: list[float], **values: float) -> dict[int, float]:
    law = target_law(torch.tensor([logits], dtype=torch.float64), controls(1, **values))
    pairs = zip(law.ids[0].tolist(), law.probs[0].tolist(), strict=True)
    return {token: p for token, p in pairs if p > 0}


def logs(*probs: float) -> list[float]:
    return torch.tensor(probs, dtype=torch.float64).log().tolist()


def test_law_by_hand() -> None:
    half = logs(0.1, 0.5, 0.4)
    assert one_law(half) == pytest.approx({1: 0.5, 2: 0.4, 0: 0.1})
    assert list(one_law(half)) == [1, 2, 0]
    assert one_law(half, top_k=2) == pytest.approx({1: 5 / 9, 2: 4 / 9})
    assert one_law(half, top_k=1) == {1: 1.0}
    assert one_law(half, top_k=-5) == one_law(half, top_k=0) == one_law(half, top_k=3)
    assert one_law(half, top_k=2**31 - 1) == one_law(half)
    assert one_law(half, top_p=0.49) == {1: 1.0}
    assert one_law(half, top_p=0.51) == pytest.approx({1: 5 / 9, 2: 4 / 9})
    assert one_law(half, top_p=0.91) == one_law(half)
    assert one_law(half, top_p=0.0) == {1: 1.0}
    # top-p counts under the normalization that top-k left: 5/9 reaches 0.55
    assert one_law(half, top_k=2, top_p=0.55) == {1: 1.0}
    assert one_law(half, min_p=0.79) == pytest.approx({1: 5 / 9, 2: 4 / 9})
    assert one_law(half, min_p=0.81) == {1: 1.0}
    assert one_law(half, min_p=1.0) == {1: 1.0}
    # min_p does not renormalize before top-p: 0.5 of all does not reach 0.52
    assert one_law(half, min_p=0.5, top_p=0.52) == pytest.approx({1: 5 / 9, 2: 4 / 9})
    assert one_law(half, temperature=0.5) == pytest.approx({1: 25 / 42, 2: 16 / 42, 0: 1 / 42})


def test_ties_go_to_the_lower_id() -> None:
    flat = [0.0, -0.0, 0.0, -0.0]
    assert list(one_law(flat)) == [0, 1, 2, 3]
    assert one_law(flat, top_k=3) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert one_law(flat, top_p=0.5) == {0: 0.5, 1: 0.5}  # reached exactly
    assert one_law(flat, top_p=0.5 + 1e-6) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert one_law(flat, min_p=1.0) == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    for dtype in (torch.float32, torch.float64):
        law = target_law(torch.tensor([[-0.0, 0.0, -0.0, -1.0]], dtype=dtype), controls(1, top_k=2))
        assert law.ids.tolist() == [[0, 1]]


def test_extreme_logits() -> None:
    inf, huge = torch.inf, float(torch.finfo(torch.float32).max)
    assert one_law([-inf, 0.0, -inf, 0.0]) == {1: 0.5, 3: 0.5}
    assert one_law([-huge, huge], temperature=1e-30) == {1: 1.0}
    assert one_law([huge, huge], temperature=2.0**-126) == {0: 0.5, 1: 0.5}
    assert one_law([3.0, 4.0, 5.0], temperature=huge) == pytest.approx(
        dict.fromkeys(range(3), 1 / 3)
    )


def test_penalties() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, torch.nan]])
    seen = torch.tensor([[0, 1, 4, 0]])
    found = penalized(scores, seen, torch.tensor([0.5]), torch.tensor([0.25]))
    assert found[0, :3].tolist() == [1.0, 1.25, 1.5]
    assert bool(found[0, 3].isnan())
    boost = penalized(scores, seen, torch.tensor([-1.0]), torch.tensor([-2.0]))
    assert boost[0, :3].tolist() == [1.0, 5.0, 12.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_laws(dtype: torch.dtype) -> None:
    numbers = load_file(GOLDEN / "sampling_probs" / "expected.safetensors")
    settings = json.loads((GOLDEN / "sampling_probs" / "expected.json").read_text())["settings"]
    logits = numbers["logits"].to(dtype)
    assert len(settings) == 18
    for setting in settings:
        values = {n: setting[n] for n in ("temperature", "top_p", "top_k")}
        found = dense(target_law(logits, controls(len(logits), **values)), logits.shape[1])
        expected = numbers[f"probs.{setting['name']}"]
        assert torch.equal(found > 0, expected > 0), setting["name"]
        torch.testing.assert_close(found.float(), expected, atol=1e-6, rtol=1e-5)


def test_random_laws(sampling, rng: torch.Generator) -> None:
    """Rows with settings of their own in one call, against the words of the contract."""
    for top_ks in ([0, 1, 3, 7, 50], [1, 3, 7]):
        logits = torch.randint(-6, 7, (300, 13), generator=rng).double() / 2
        pick = {
            "temperature": torch.tensor([0.2, 0.7, 1.0, 3.0]),
            "top_p": torch.tensor([0.0, 0.3, 0.8, 0.95, 1.0]),
            "min_p": torch.tensor([0.0, 0.02, 0.3, 1.0]),
            "top_k": torch.tensor(top_ks),
        }
        chosen = {n: v[torch.randint(len(v), (300,), generator=rng)] for n, v in pick.items()}
        off = torch.zeros(300)
        law = target_law(logits, Controls(**chosen, presence=off, frequency=off))
        assert law.ids.shape[1] == (13 if 0 in top_ks else 7)
        for b in range(300):
            values = (float(chosen["temperature"][b]), int(chosen["top_k"][b]))
            expected = sampling.target_law(
                logits[b].tolist(), *values, float(chosen["top_p"][b]), float(chosen["min_p"][b])
            )
            kept = len(expected)
            assert law.ids[b, :kept].tolist() == list(expected)
            assert law.probs[b, :kept].tolist() == pytest.approx(list(expected.values()), rel=1e-12)
            assert not bool(law.probs[b, kept:].any())


def test_a_law_does_not_depend_on_company(rng: torch.Generator) -> None:
    logits = torch.randn(5, 1001, generator=rng) * 4
    given = controls(5, temperature=0.8, top_p=0.9)
    given = given._replace(top_k=torch.tensor([0, 5, 200, 1, 0], dtype=torch.int32))
    whole = target_law(logits, given)
    for b in range(5):
        row = torch.tensor([b])
        alone = target_law(logits[row], given.of(row))
        size = alone.ids.shape[1]
        assert size == (1001, 5, 200, 1, 1001)[b]  # sorted no further than it is kept
        assert torch.equal(alone.ids[0], whole.ids[b, :size])
        assert torch.equal(alone.probs[0], whole.probs[b, :size])
        assert not bool(whole.probs[b, size:].any())


def test_draw_by_hand() -> None:
    def rank(probs: list[float], u: float) -> int:
        return int(draw(torch.tensor([probs]), torch.tensor([u])))

    assert [rank([0.5, 0.25, 0.25], u) for u in (0.0, 0.4999, 0.5, 0.75)] == [0, 0, 1, 2]
    below_one = 1.0 - 2.0**-24
    assert rank([0.5, 0.25, 0.25], below_one) == 2
    assert rank([0.0, 0.5, 0.0, 0.5], 0.0) == 1  # an id without mass is never drawn
    assert rank([0.0, 0.5, 0.0, 0.5], 0.5) == 3
    assert rank([0.5, 0.25, 0.0], below_one) == 1  # the last that has mass
    assert rank([torch.nan] * 3, 0.5) in (0, 1, 2)


def test_residual_by_hand() -> None:
    law = Law(torch.tensor([[4, 2, 0]]), torch.tensor([[0.5, 0.25, 0.25]]))

    def left(ids: list[int], q: list[float]) -> list[float]:
        found = residual(law, torch.tensor([ids]), torch.tensor([q]))
        assert found.ids is law.ids
        return found.probs[0].tolist()

    assert left([4], [1.0]) == [0.0, 0.5, 0.5]
    assert left([2, 4], [0.0, 0.25]) == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert left([9, 2], [0.5, 0.5]) == pytest.approx([2 / 3, 0.0, 1 / 3])  # 9 has no mass in p
    assert left([0, 2, 4], [0.25, 0.25, 0.5]) == [0.5, 0.25, 0.25]  # nothing is left: p
    assert left([0, 2], [torch.nan, torch.nan])[:1] == [0.5]
    assert probability(law, torch.tensor([[0, 4, 3, 77]])).tolist() == [[0.25, 0.5, 0.0, 0.0]]


def test_accepts_is_strict_and_exact() -> None:
    p = torch.tensor([0.0, 0.25, 0.25, 0.3])
    q = torch.tensor([0.5, 0.5, 0.5, 0.3])
    u = torch.tensor([0.0, 0.5, 0.5 - 2.0**-24, 1 - 2.0**-24])
    assert accepts(p, q, u).tolist() == [False, False, True, True]
    # In float32 this product would be rounded up to p.
    u, q, p = (torch.tensor(v) for v in (1 - 3 * 2.0**-24, 0.75, 0.75 - 2.0**-23))
    assert float(u * q) == float(p)
    assert bool(accepts(p, q, u))


def test_softmax(rng: torch.Generator) -> None:
    energies = torch.randn(6, 9, generator=rng) * 30
    heat = torch.tensor([0.1, 0.7, 1.0, 5.0, 2.0**-126, 3e38])
    found = softmax(energies, heat)
    expected = torch.softmax((energies.double() / heat.double().unsqueeze(1)), -1)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-12, rtol=1e-7)


@pytest.mark.parametrize("kind", ["sparse4", "onehot", "dense", "equal", "disjoint"])
def test_golden_chain_of_fixed_uniforms(kind: str) -> None:
    """`fixed.accepted_count` exactly; the residual's law to the accuracy of the golden numbers."""
    numbers = load_file(GOLDEN / "rejection_chain" / "expected.safetensors")
    cases = [n.removesuffix(".fixed.uniforms") for n in numbers if n.endswith(".fixed.uniforms")]
    cases = [name for name in cases if name.endswith(kind)]
    assert cases
    for case in cases:
        p, q_ids, q, uniforms, drafts = (
            numbers[f"{case}.{n}"]
            for n in ("p", "q_ids", "q_probs", "fixed.uniforms", "fixed.draft_ids")
        )
        rows, length = uniforms.shape
        law = target_law(p.log(), controls(length + 1))
        torch.testing.assert_close(dense(law, p.shape[1]), p, atol=1e-15, rtol=1e-12)
        before = law.of(torch.arange(length))
        passes = torch.minimum(probability(before, q_ids), q).sum(1)
        expected = numbers[f"{case}.accept_probability"]
        torch.testing.assert_close(passes, expected, atol=1e-12, rtol=0.0)
        if kind != "equal":  # whose residual is made of rounding
            found = dense(residual(before, q_ids, q), p.shape[1])
            torch.testing.assert_close(found, numbers[f"{case}.residual"], atol=1e-12, rtol=0.0)
        index = torch.zeros(rows, dtype=torch.int32)
        accepted, licensed, outputs, finite = accept_chain(
            p.log().expand(rows, *p.shape),
            torch.zeros(1, p.shape[1], dtype=torch.int32),
            index,
            index + length,
            Proposals(
                drafts.expand(rows, length),
                q_ids.expand(rows, *q_ids.shape),
                q.expand(rows, *q.shape),
            ),
            controls(rows),
            Draws(uniforms, torch.full((rows, length + 1), 0.5, dtype=torch.float64)),
            p.shape[1],
        )
        assert torch.equal(accepted.long(), numbers[f"{case}.fixed.accepted_count"]), case
        assert torch.equal(licensed, accepted + 1)
        assert bool(finite.all())
        for row, count in zip(outputs.tolist(), accepted.tolist(), strict=True):
            assert row[:count] == drafts[:count].tolist()
            mass = numbers[f"{case}.fixed.next_token_law"][count]
            assert float(mass[row[count]]) > 0
