from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_graph.philox import Purpose, philox4x32, uniform

#: Random123's kat_vectors, philox4x32 10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def tensors(values: list[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(sampling, counter: str, key: str, expected: str) -> None:
    found = philox4x32(tensors(words(counter)), tensors(words(key)))
    assert [int(word) for word in found] == words(expected)
    assert sampling.philox(words(counter), words(key)) == words(expected)


def test_against_python_integers(sampling, rng: torch.Generator) -> None:
    values = torch.randint(0, 2**32, (6, 500), generator=rng)
    edge = torch.tensor([0, 1, 0xFFFF, 0x10000, 2**31, 2**32 - 1])
    values[:, :100] = edge[torch.randint(0, 6, (6, 100), generator=rng)]
    found = torch.stack(philox4x32(tuple(values[:4]), tuple(values[4:])), 1).tolist()
    for column, result in zip(values.T.tolist(), found, strict=True):
        assert result == sampling.philox(column[:4], column[4:])


def test_uniform(sampling, rng: torch.Generator) -> None:
    """Signed words of the seed are the same words; each part of the counter counts."""
    seed = torch.randint(-(2**31), 2**31, (4, 2), generator=rng).to(torch.int32)
    seed[0] = torch.tensor([-1, 0])
    position = torch.tensor([[0, 1, 2**31 - 1], [5, 5, 6], [7, 8, 9], [2, 2, 2]]).to(torch.int32)
    index = torch.tensor([0, 1, 33])
    for purpose in Purpose:
        for extra in (0, 3, index):
            found = uniform(seed, position, purpose, extra)
            assert found.shape == (4, 3)
            assert found.dtype is torch.float32
            for b in range(4):
                for j in range(3):
                    number = extra if isinstance(extra, int) else int(extra[j])
                    expected = sampling.uniform(
                        seed[b].tolist(), int(position[b, j]), int(purpose), number
                    )
                    assert float(found[b, j]) == expected
    row = uniform(seed, position[:, 0], Purpose.ACCEPT)
    assert torch.equal(row, uniform(seed, position, Purpose.ACCEPT)[:, 0])
    assert uniform(seed, position[:, :0], Purpose.ACCEPT).shape == (4, 0)


def test_purposes_are_those_of_the_contract() -> None:
    assert [(p.name, p.value) for p in Purpose] == [
        ("PREFILL", 0),
        ("PLAIN", 1),
        ("ACCEPT", 2),
        ("CORRECTION", 3),
        ("BONUS", 4),
        ("PROPOSAL", 5),
    ]


def test_numbers_are_uniform(sampling) -> None:
    """1024 cells, and 256 of neighbouring pairs: 200k numbers of close counters and seeds."""
    seed = torch.tensor([[key, 0] for key in range(1000)], dtype=torch.int32)
    found = uniform(seed, torch.arange(200).expand(1000, 200), Purpose.PLAIN)
    assert bool(((found >= 0.0) & (found < 1.0)).all())
    cells = torch.bincount((found.flatten() * 1024).long(), minlength=1024)
    sampling.assert_law(cells, torch.full((1024,), 1 / 1024), "uniform numbers")
    pairs = (found[:, :-1] * 16).long() * 16 + (found[:, 1:] * 16).long()
    cells = torch.bincount(pairs[:, ::2].flatten(), minlength=256)
    sampling.assert_law(cells, torch.full((256,), 1 / 256), "neighbouring positions")


def test_traces_as_one_graph(sampling, rng: torch.Generator) -> None:
    seed, position = sampling.random_seeds(rng, 3), torch.arange(12).reshape(3, 4)
    traced = torch.compile(
        lambda *args: uniform(*args, Purpose.PROPOSAL), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(traced(seed, position), uniform(seed, position, Purpose.PROPOSAL))


@pytest.mark.gpu
def test_same_bits_on_every_device(sampling, rng: torch.Generator, device: torch.device) -> None:
    seed, position = sampling.random_seeds(rng, 1000), torch.arange(4000).reshape(1000, 4)
    found = uniform(seed.to(device), position.to(device), Purpose.ACCEPT)
    assert torch.equal(found.cpu(), uniform(seed, position, Purpose.ACCEPT))
