"""What an image holds: all state but the derived kinds, only reachable bytes, no shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.models.pair import PAGE_SIZE
from dflash_graph.state import DERIVED

Load = Callable[..., dg.Engine]

PAIRS = ("demo dflash", "demo dflash2", "demo plain", "golden mixed")
PARAMS = dg.SamplingParams(max_new_tokens=12, ignore_eos=True)


def reached(image: torch.Tensor, kind: str) -> torch.Tensor | None:
    """Which positions of pages or a ring have a byte that is not zero; None for other kinds."""
    if kind.endswith("pages"):
        image = image.transpose(1, 2).flatten(0, 1)
    elif not kind.endswith("ring"):
        return None
    rows = image.reshape(image.shape[0], -1).contiguous()
    return rows.view(torch.uint8).ne(0).any(1)


@pytest.mark.parametrize("name", PAIRS)
def test_positions_of_an_image(shop: Any, load: Load, name: str) -> None:
    """At the edges of pages and rings: the positions processed, each of them, and no others."""
    engine = load(name, max_batch=1)
    vocab = engine.rounds.model.pair.emitted_vocab
    plan = {pool.name: pool for pool in engine.rounds.state_plan.pools}
    for frontier in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129):
        prompt = tuple((7 * i + 3) % vocab for i in range(frontier))
        params = PARAMS.replace(max_new_tokens=1)
        checkpoint = shop.run(engine, prompt, params, keep=True).request.checkpoint
        assert checkpoint.frontier == frontier
        assert set(checkpoint.images) == {p.name for p in plan.values() if p.kind not in DERIVED}
        pages = -(-frontier // PAGE_SIZE)
        expected = 0
        for pool_name, image in checkpoint.images.items():
            pool = plan[pool_name]
            expected += pool.unit_bytes * (pages if pool.unit == "page" else 1)
            live = reached(image, pool.kind)
            if live is None:
                assert image.count_nonzero() > 0
            else:
                assert torch.equal(live, torch.arange(len(live)) < frontier)
                assert pool.unit == "slot" or len(live) == pages * PAGE_SIZE
        assert checkpoint.nbytes == expected


def test_derived_kinds() -> None:
    assert set(DERIVED) == {"draft.pending_features", "target.token_counts"}


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_of_others_leaks(shop: Any, load: Load, name: str) -> None:
    """An image is the same bytes in zeroed pools and in pools full of another request's data."""
    images = []
    for canary in (0x00, 0x5A):
        engine = load(name, max_batch=2)
        engine.rounds.state.storage.fill_(canary)
        prompt = shop.prompt(name)
        run = shop.run(engine, prompt, PARAMS, checkpoints=True)
        images.append([shop.bytes_of(checkpoint) for _, checkpoint in run.checkpoints])
    assert images[0] == images[1]
    # And in pools which real requests have used, in another slot and other pages.
    engine = load(name, max_batch=3)
    others = [engine.submit(shop.prompt(name, 1), PARAMS.replace(max_new_tokens=40))]
    others.append(engine.submit(tuple(range(1, 100)), PARAMS))
    for _ in range(8):
        engine.step()
    engine.cancel(others[1])
    run = shop.run(engine, shop.prompt(name), PARAMS, checkpoints=True)
    shop.drain(engine)
    assert len(run.checkpoints) == len(images[0])
    kinds = {pool.name: pool.kind for pool in engine.rounds.state_plan.pools}
    for _, checkpoint in run.checkpoints:
        for pool_name, image in checkpoint.images.items():
            live = reached(image, kinds[pool_name])
            if live is not None:
                assert torch.equal(live, torch.arange(len(live)) < checkpoint.frontier)


@pytest.mark.parametrize("name", PAIRS)
def test_immutable(shop: Any, load: Load, sampled: dg.SamplingParams, name: str) -> None:
    """Whatever the engine does later, a checkpoint keeps its bytes; so does its host replica."""
    engine = load(name, max_batch=3)
    prompt = shop.prompt(name)
    request = engine.submit(prompt, PARAMS)
    for _ in range(3):
        engine.step()
    checkpoint = engine.checkpoint(request)
    host = checkpoint.to_host()
    before, facts = shop.bytes_of(checkpoint), (checkpoint.tokens, checkpoint.generated)
    storage = engine.rounds.state.storage
    own = range(storage.data_ptr(), storage.data_ptr() + storage.numel())
    assert not any(image.data_ptr() in own for image in checkpoint.images.values())
    engine.step()
    forks = [engine.fork(checkpoint, sampled.replace(max_new_tokens=30)) for _ in range(2)]
    engine.submit(prompt, PARAMS)
    shop.drain(engine)
    assert len(forks[0].token_ids) == 30
    storage.fill_(0xFF)
    engine.rounds.arena.fill_(0xFF)
    assert shop.bytes_of(checkpoint) == shop.bytes_of(host) == before
    assert (checkpoint.tokens, checkpoint.generated) == facts
    last = engine.restore(host, PARAMS.replace(max_new_tokens=8))
    shop.drain(engine)
    count = len(checkpoint.generated)
    assert tuple(last.token_ids) == shop.plain(name, prompt, count + 8)[count:]


@pytest.mark.parametrize("name", PAIRS)
def test_forks_do_not_share(shop: Any, load: Load, name: str) -> None:
    """Ruin everything one fork holds: the other's bytes stay, and so does its text."""
    engine = load(name, max_batch=3)
    prompt = shop.prompt(name)
    kept = shop.run(engine, prompt, PARAMS.replace(max_new_tokens=6), keep=True).request
    one, other = (engine.fork(kept.checkpoint, PARAMS) for _ in range(2))
    engine.step()
    state = engine.rounds.state
    assert one.slot != other.slot and not set(one.pages) & set(other.pages)
    image = state.image(other.slot, other.pages, other.frontier)
    before = shop.bytes_of(image)
    for pool in engine.rounds.state_plan.pools:
        index = one.slot if pool.unit == "slot" else one.pages
        state.tensors[pool.name].view(torch.uint8)[index] = 0xFF
    after = shop.bytes_of(state.image(other.slot, other.pages, other.frontier))
    assert after == before
    shop.drain(engine)
    assert tuple(other.token_ids) == shop.plain(name, prompt, 18)[6:]
    assert one.finish_reason == "error" and isinstance(one.error, dg.NonFiniteLogitsError)


@pytest.mark.parametrize("name", ["demo dflash", "demo dflash2", "golden mixed"])
def test_any_row_and_company(shop: Any, load: Load, sampled: dg.SamplingParams, name: str) -> None:
    """Seeded forks of one checkpoint in every row, beside other requests, give one text."""
    engine = load(name, max_batch=4)
    kept = shop.run(
        engine, shop.prompt(name), PARAMS.replace(max_new_tokens=5), keep=True
    ).request.checkpoint
    params = sampled.replace(max_new_tokens=12)
    alone = engine.fork(kept, params)
    shop.drain(engine)
    for place in range(4):
        requests: list[dg.Request] = []
        for index in range(4):
            if index == place:
                requests.append(engine.fork(kept, params))
            elif index % 2:
                requests.append(engine.fork(kept, params.replace(seed=index)))
            else:
                requests.append(engine.submit(shop.prompt(name, index % 3), PARAMS))
        shop.drain(engine)
        assert requests[place].token_ids == alone.token_ids
        assert requests[place].rounds == alone.rounds
