"""Oracles that several ops share. Of sampling: Philox in Python integers, laws and acceptance
number by number, chi-square. Of the delta rule: cases and the token-by-token formula.

They share nothing with the package: each is written from the words of its contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_graph.testing import poison_

#: Chance that a right implementation fails one comparison with a law (other seeds than the fixed).
FALSE_ALARM = 1e-6
PREFILL, PLAIN, ACCEPT, CORRECTION, BONUS, PROPOSAL = range(6)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0}


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    x, k = list(counter), list(key)
    for number in range(10):
        if number:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        high_0, low_0 = divmod(0xD2511F53 * x[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high_1 ^ x[1] ^ k[0], low_1, high_0 ^ x[3] ^ k[1], low_0]
    return x


def uniform(seed: Sequence[int], position: int, purpose: int, index: int = 0) -> float:
    """The uniform number of two (signed) seed words and a counter."""
    key = [word % 2**32 for word in seed]
    return (philox((position, purpose, index, 0), key)[0] >> 8) / 2**24


def target_law(
    logits: Sequence[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    rounded: Callable[[float], float] = float,
) -> dict[int, float]:
    """id -> probability, in rank order."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    if temperature <= 0:
        return {order[0]: 1.0}
    order = order[:top_k] if top_k > 0 else order
    weights = [math.exp((logits[v] - logits[order[0]]) / temperature) for v in order]
    probs = [w / sum(weights) for w in weights]
    kept = [0]
    for r in range(1, len(order)):
        within = top_p >= 1.0 or sum(probs[:r]) < top_p
        if within and probs[r] >= min_p * probs[0]:
            kept.append(r)
    total = sum(probs[r] for r in kept)
    return {order[r]: rounded(probs[r] / total) for r in kept}


def draw(law: Mapping[int, float], u: float) -> int:
    """Inverse CDF in the law's order."""
    mass = 0.0
    for token, p in law.items():
        mass += p
        if u < mass:
            return token
    return [token for token, p in law.items() if p > 0][-1]


def residual(
    p: Mapping[int, float],
    q: Mapping[int, float],
    rounded: Callable[[float], float] = float,
) -> dict[int, float]:
    left = {token: max(mass - q.get(token, 0.0), 0.0) for token, mass in p.items()}
    total = sum(left.values())
    return {t: rounded(mass / total) for t, mass in left.items()} if total > 0 else dict(p)


def penalized(scores: Sequence[float], counts: Sequence[int], case: Mapping) -> list[float]:
    """Float32, as the contract says; exactly the scores where there is no penalty."""
    return [
        float(np.float32(s - case["presence"] * (c > 0) - case["frequency"] * c))
        for s, c in zip(scores, counts, strict=True)
    ]


def rows_of(case: Mapping[str, Tensor]) -> Iterator[dict]:
    """The rows of a call as Python numbers, `counts` as the row's own."""
    for b, slot in enumerate(case["slots"].tolist()):
        yield {n: (v[slot] if n == "counts" else v[b]).tolist() for n, v in case.items()}


def accept(case: Mapping[str, Tensor], public_vocab: int, single: int = PLAIN) -> dict[str, Tensor]:
    """The loop of the paper in float64, rounding a law to float32 where the contract says so.

    The id that ends a row which is not finite is given as -2.
    """

    def single_precision(x: float) -> float:
        return float(np.float32(x))

    found: dict[str, list] = {n: [] for n in ("accepted", "licensed", "outputs", "finite")}
    for row in rows_of(case):
        width = len(row["ids"])
        out, finite = [], 1
        for i in range(row["live_drafts"] + 1):
            seen = [row["counts"][v] + row["ids"][1 : i + 1].count(v) for v in range(public_vocab)]
            z = penalized(row["scores"][i][:public_vocab], seen, row)
            if any(math.isnan(value) for value in z) or not math.isfinite(max(z)):
                out.append(-2)
                finite = 0
                break
            names = ("temperature", "top_k", "top_p", "min_p")
            p = target_law(z, *(row[n] for n in names), single_precision)
            position = row["frontier"] + i + 1

            def u(purpose: int, seed: list = row["seed"], position: int = position) -> float:
                return uniform(seed, position, purpose)

            if i == row["live_drafts"]:
                out.append(draw(p, u(BONUS if width > 1 else single)))
                break
            draft, q = row["ids"][i + 1], {row["ids"][i + 1]: 1.0}
            if "candidates" in row and row["temperature"] > 0:
                q = dict(zip(row["candidates"][i], row["draft_probs"][i], strict=True))
            if u(ACCEPT) * q.get(draft, 0.0) < p.get(draft, 0.0):
                out.append(draft)
                continue
            if row["temperature"] > 0:
                p = residual(p, q, single_precision)
            out.append(draw(p, u(CORRECTION)))
            break
        found["accepted"].append(len(out) - 1)
        found["licensed"].append(len(out))
        found["outputs"].append(out + [-1] * (width - len(out)))
        found["finite"].append(finite)
    return {name: torch.tensor(values) for name, values in found.items()}


def chain_laws(
    scores: Sequence[Sequence[float]],
    counts: Sequence[int],
    controls: Mapping,
    proposals: Sequence[Mapping[int, float]],
) -> tuple[Tensor, Tensor]:
    """By enumeration of all draft paths: the law of the accepted count `[P+1]`, and of the token at
    each position, given that it is emitted, `[P+1, V]`; float64.
    """
    length, vocab = len(proposals), len(counts)
    count_law = torch.zeros(length + 1, dtype=torch.float64)
    emitted = torch.zeros(length + 1, vocab, dtype=torch.float64)
    for i in range(length + 1):
        for path in product(*(q.items() for q in proposals[:i])):
            tokens = [token for token, _ in path]
            chance = 1.0  # that this path is drawn and accepted
            for j in range(i + 1):
                seen = [c + tokens[:j].count(v) for v, c in enumerate(counts)]
                law = target_law(
                    penalized(scores[j], seen, controls),
                    *(controls[n] for n in ("temperature", "top_k", "top_p", "min_p")),
                )
                if j < i:
                    chance *= min(law.get(tokens[j], 0.0), path[j][1])
            for token, p in law.items():
                emitted[i, token] += chance * p
            if i < length:
                chance *= 1.0 - sum(min(law.get(t, 0.0), q) for t, q in proposals[i].items())
            count_law[i] += chance
    reach = emitted.sum(1, keepdim=True)
    return count_law, torch.where(reach > 0, emitted / reach, 0.0)


def assert_law(observed: Tensor, law: Tensor, what: str) -> None:
    """Raise AssertionError unless counts `[n]` come from a law `[n]`: chi-square, with cells of an
    expectation below 5 pooled; a right implementation fails with probability FALSE_ALARM.
    """
    observed, law = observed.double(), law.double()
    total = float(observed.sum())
    assert total > 0, f"{what}: nothing observed"
    assert not bool(((law <= 0) & (observed > 0)).any()), f"{what}: impossible outcomes"
    order = law.argsort()
    expected, observed = (law * total)[order], observed[order]
    few = int((expected < 5).sum())
    if few and float(expected[:few].sum()) < 5:
        few += 1  # the next cell takes what is too little for one of its own
    if few:
        expected = torch.cat((expected[:few].sum().reshape(1), expected[few:]))
        observed = torch.cat((observed[:few].sum().reshape(1), observed[few:]))
    freedom = len(expected) - 1
    if freedom < 1:
        return
    statistic = ((observed - expected) ** 2 / expected).sum()
    chance = float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))
    assert chance > FALSE_ALARM, (
        f"{what}: chi-square {float(statistic):.1f} at {freedom} degrees, p = {chance:.1e}"
    )


def neutral(ids: Tensor, scores: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """Arguments of accept_one_hot: all drafts live, temperature 1, no filters or penalties."""
    batch, columns = ids.shape
    value, number = torch.ones(batch), torch.zeros(batch, dtype=torch.int32)
    return {
        "ids": ids.to(torch.int32),
        "scores": scores,
        "counts": torch.zeros(1, scores.shape[2], dtype=torch.int32),
        "slots": number,
        "live_drafts": number + columns - 1,
        "frontier": number,
        "temperature": value,
        "top_p": value,
        "min_p": value * 0.0,
        "presence": value * 0.0,
        "frequency": value * 0.0,
        "top_k": number,
        "seed": torch.zeros(batch, 2, dtype=torch.int32),
        **given,
    }


def random_seeds(generator: torch.Generator, batch: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (batch, 2), generator=generator).to(torch.int32)


def mixed(
    generator: torch.Generator, batch: int, columns: int, vocab: int, public_vocab: int
) -> dict[str, Tensor]:
    """Rows of every kind in one call of accept_one_hot. Ties and large logits; whatever the
    contract does not look at is poison.
    """

    def pick(values: Sequence[float], *shape: int) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]

    scores = pick([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.5, 3.0], batch, columns, vocab)
    scores += pick([0.0, 0.0, 1e4], batch, 1, 1)
    scores[..., public_vocab:] = torch.nan
    drafts = torch.where(
        torch.rand(batch, columns, generator=generator) < 0.6,
        scores[..., :public_vocab].argmax(-1),
        torch.randint(0, public_vocab, (batch, columns), generator=generator),
    )
    ids = torch.cat((torch.full((batch, 1), -7), drafts[:, :-1]), 1)
    live = torch.randint(0, columns, (batch,), generator=generator)
    dead = torch.arange(columns) > live.unsqueeze(1)
    ids[dead] = -(2**30)
    scores[dead] = torch.nan
    counts = torch.full((batch + 2, vocab), -(2**30))
    slots = torch.randperm(batch + 2, generator=generator)[:batch]
    counts[slots, :public_vocab] = pick([0, 0, 0, 1, 2, 7], batch, public_vocab)
    return {
        "ids": ids.to(torch.int32),
        "scores": scores,
        "counts": counts.to(torch.int32),
        "slots": slots.to(torch.int32),
        "live_drafts": live.to(torch.int32),
        "frontier": pick([0, 1, 17, 40000], batch).to(torch.int32),
        "temperature": pick([-1.0, 0.0, 0.0, 0.25, 0.7, 1.0, 1.0, 4.0], batch),
        "top_p": pick([0.0, 0.3, 0.5, 0.9, 1.0, 1.0, 1.0], batch),
        "min_p": pick([0.0, 0.0, 0.0, 0.05, 0.3, 1.0], batch),
        "presence": pick([0.0, 0.0, 0.5, -0.5, 2.0], batch),
        "frequency": pick([0.0, 0.0, 0.25, -0.1], batch),
        "top_k": pick([-1, 0, 0, 1, 3, 5, 99], batch).to(torch.int32),
        "seed": random_seeds(generator, batch),
    }


class SamplingOracle:
    """What tests of sampling share."""

    neutral_controls = OFF | {"temperature": 1.0}
    philox = staticmethod(philox)
    uniform = staticmethod(uniform)
    target_law = staticmethod(target_law)
    draw = staticmethod(draw)
    residual = staticmethod(residual)
    accept = staticmethod(accept)
    chain_laws = staticmethod(chain_laws)
    assert_law = staticmethod(assert_law)
    neutral = staticmethod(neutral)
    random_seeds = staticmethod(random_seeds)
    mixed = staticmethod(mixed)


@pytest.fixture
def sampling() -> type[SamplingOracle]:
    return SamplingOracle


#: State slots of a Gated DeltaNet case.
GDN_SLOTS = 5


def gdn_case(
    rng: torch.Generator,
    dtype: torch.dtype,
    slots: list[int],
    counts: list[int],
    width: int,
    *,
    counted: str,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 10,
    value_dim: int = 6,
) -> dict[str, Tensor]:
    """A block whose columns at or after a row's count, and whose other slots, are NaN;
    `counted` names the argument that counts its columns.
    """
    batch = len(slots)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    state = poison_(torch.empty(GDN_SLOTS, heads, value_dim, key_dim))
    state[slots] = random(batch, heads, value_dim, key_dim)
    block = {
        "q": (random(batch, width, key_heads, key_dim) * 2.0).to(dtype),
        "k": (random(batch, width, key_heads, key_dim) * 2.0).to(dtype),
        "v": random(batch, width, heads, value_dim).to(dtype),
        "beta": torch.rand(batch, width, heads, generator=rng),
        "g": -torch.rand(batch, width, heads, generator=rng) * 3.0,
    }
    if counts[0] > 1:
        block["k"][0, 0, 0] = 0.0
        block["g"][0, 1] = torch.tensor([0.0, -200.0] * heads)[:heads]
        block["beta"][0, 1] = torch.tensor([1.0, 0.0] * heads)[:heads]
    for b, count in enumerate(counts):
        for value in block.values():
            poison_(value[b, count:])
    return {
        **block,
        "state": state,
        "slots": torch.tensor(slots, dtype=torch.int32),
        counted: torch.tensor(counts, dtype=torch.int32),
    }


def gdn_formula(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and states token by token and head by head, in float64."""
    q, k, v, beta, g = (arguments[n].double() for n in ("q", "k", "v", "beta", "g"))
    state = arguments["state"].double().clone()
    batch, width, heads, value_dim = v.shape
    group = heads // k.shape[2]
    y = torch.zeros(batch, width, heads, value_dim, dtype=torch.float64)
    rows = zip(
        arguments["slots"].tolist(),
        arguments["live" if "live" in arguments else "committed"].tolist(),
        strict=True,
    )
    for b, (slot, count) in enumerate(rows):
        for h in range(heads):
            s = state[slot, h]
            for i in range(count):
                key, query = k[b, i, h // group], q[b, i, h // group]
                key = key / (key @ key + 1e-6) ** 0.5
                query = query / (query @ query + 1e-6) ** 0.5
                s = g[b, i, h].exp() * s
                s = s + torch.outer(beta[b, i, h] * (v[b, i, h] - s @ key), key)
                y[b, i, h] = s @ query / len(query) ** 0.5
            state[slot, h] = s
    return {"y": y, "state": state}


@pytest.fixture
def gdn() -> SimpleNamespace:
    """Cases of the ops around the delta rule, and their formula in float64."""
    return SimpleNamespace(case=gdn_case, formula=gdn_formula)
