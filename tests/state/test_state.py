"""State: pools as planned, printed and allocated, and the indices that requests hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_graph.errors import PlanError, RequestError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.graph import Value
from dflash_graph.models.pair import PAGE_SIZE, ModelPair
from dflash_graph.models.round import declare_state
from dflash_graph.planner import ALIGNMENT
from dflash_graph.profiles import load_preset
from dflash_graph.report import memory_dict, memory_text, plan_memory, state_dict, state_text
from dflash_graph.state import Capacities, FreeList, StatePools, plan_state
from dflash_graph.tensor import TensorSpec

CAPACITIES = Capacities(slots=3, context=130)


@pytest.fixture(params=["demo-dflash", "demo-dflash2"])
def pair(request: pytest.FixtureRequest) -> ModelPair:
    preset = load_preset(request.param)
    return ModelPair(
        target_geometry_from_config(preset["target"], request.param),
        draft_geometry_from_config(preset["draft"], request.param),
        "bfloat16",
    )


def states(pair: ModelPair) -> Sequence[Value]:
    return declare_state(pair, 8)


def state(name: str, *shape: int | str, dtype: str = "float32") -> Value:
    return Value(name, TensorSpec(shape, dtype), "state")


@pytest.mark.parametrize(
    ("context", "pages"), [(1, 1), (PAGE_SIZE - 1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2), (130, 3)]
)
def test_a_request_has_pages_for_its_context(context: int, pages: int) -> None:
    found = Capacities(slots=3, context=context)
    assert found.request_pages == pages
    assert found.bindings() == {"slots": 3, "pages": 3 * pages, "request_pages": pages}


def test_pages_may_be_fewer_than_full_contexts_need() -> None:
    assert Capacities(slots=3, context=130, pages=4).bindings()["pages"] == 4


def test_pools_are_planned_once_by_name() -> None:
    pages = state("target.layers.3.k_pages", "pages", 2, 64, 8)
    slots = state("target.layers.0.gdn_state", "slots", 2, 8, 8)
    found = plan_state([pages, slots, pages], CAPACITIES)
    assert [(pool.name, pool.kind, pool.unit, pool.shape) for pool in found.pools] == [
        ("target.layers.3.k_pages", "target.pages", "page", (9, 2, 64, 8)),
        ("target.layers.0.gdn_state", "target.gdn_state", "slot", (3, 2, 8, 8)),
    ]
    assert [pool.unit_bytes for pool in found.pools] == [4096, 512]
    assert found.kinds()["target.pages"] == ("page", 4096, 9 * 4096)


def test_two_graphs_must_agree_on_a_state() -> None:
    with pytest.raises(PlanError, match=r"state 'target\.hidden': declared as \(3, 8\) and as "):
        plan_state(
            [state("target.hidden", "slots", 8), state("target.hidden", "slots", 9)], CAPACITIES
        )


def test_what_is_planned_is_allocated(pair: ModelPair) -> None:
    found = plan_state(states(pair), CAPACITIES)
    pools = StatePools(found)
    assert pools.storage.numel() == found.nbytes
    assert sum(t.numel() * t.element_size() for t in pools.tensors.values()) == sum(
        pool.nbytes for pool in found.pools
    )
    start = pools.storage.data_ptr()
    ends = 0
    for pool in found.pools:
        tensor = pools.tensors[pool.name]
        offset = tensor.data_ptr() - start
        assert tuple(tensor.shape) == pool.shape
        assert str(tensor.dtype) == f"torch.{pool.dtype}"
        assert offset % ALIGNMENT == 0 and offset >= ends, "pools lie one after another"
        ends = offset + pool.nbytes
        assert tensor.untyped_storage().data_ptr() == start, "one allocation"
    assert ends <= found.nbytes


def test_unaligned_pools_do_not_touch() -> None:
    found = plan_state([state("a.x", "slots", 5), state("a.y", "slots", 5)], CAPACITIES)
    assert [pool.nbytes for pool in found.pools] == [60, 60] and found.nbytes == 512
    pools = StatePools(found)
    pools.tensors["a.x"].fill_(1.0)
    assert pools.tensors["a.y"].eq(0.0).all()


def test_a_reset_slot_has_no_recurrent_past(pair: ModelPair) -> None:
    found = plan_state(states(pair), CAPACITIES)
    pools = StatePools(found)
    pools.storage.fill_(0x3F)
    pools.reset_slot(1)
    for pool in found.pools:
        tensor = pools.tensors[pool.name]
        dirty = tensor.contiguous().view(-1).view(torch.uint8).view(pool.shape[0], -1)
        if pool.kind in ("target.gdn_state", "target.conv_history"):
            assert dirty[1].eq(0).all()
            assert dirty[[0, 2]].eq(0x3F).all(), "the other slots keep theirs"
        else:
            assert dirty.eq(0x3F).all(), f"{pool.name} needs no reset"


def test_indices_are_handed_out_lowest_first() -> None:
    slots = FreeList("slot", 3)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RequestError, match="no free slot of 3; wait for a request to end"):
        slots.take()
    slots.give(2)
    slots.give(0)
    assert (slots.free, slots.take(), slots.take()) == (2, 0, 2)


def test_an_index_returns_once() -> None:
    pages = FreeList("page", 2)
    with pytest.raises(AssertionError, match="page 0 is not taken"):
        pages.give(0)
    pages.take()
    pages.give(0)
    with pytest.raises(AssertionError, match="page 0 is not taken"):
        pages.give(0)
    with pytest.raises(AssertionError, match="page 2 is not taken"):
        pages.give(2)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_no_index_has_two_owners(steps: list[bool], count: int) -> None:
    found, held = FreeList("page", count), list[int]()
    for take in steps:
        if take and found.free:
            index = found.take()
            assert index not in held and 0 <= index < count
            held.append(index)
        elif held:
            found.give(held.pop(len(held) // 2))
        assert found.free + len(held) == count


def test_the_state_report_adds_up(pair: ModelPair) -> None:
    found = plan_state(states(pair), CAPACITIES)
    facts = state_dict(found, CAPACITIES)
    assert facts["nbytes"] == found.nbytes
    for kind in facts["kinds"]:
        assert kind["nbytes"] == kind["unit_bytes"] * kind["units"]
        held = 3 if kind["unit"] == "page" else 1
        assert kind["request_bytes"] == kind["unit_bytes"] * held
        assert kind["kind"] in state_text(found, CAPACITIES)
    assert facts["request_bytes"] == sum(kind["request_bytes"] for kind in facts["kinds"])


def test_the_memory_report_adds_up(pair: ModelPair) -> None:
    report = plan_memory(
        pair, "eager", draft_tokens=7, max_batch=3, prefill_chunk=32, capacities=CAPACITIES
    )
    facts = memory_dict(report)
    assert facts["state"]["nbytes"] == plan_state(states(pair), CAPACITIES).nbytes
    names = [executor["name"] for executor in facts["executors"]]
    rounds = [f"{kind} B={batch}" for batch in (1, 2, 3) for kind in ("round", "sampling")]
    chunks = ["prefill 32", "prefill with embeddings 32"]
    assert names == [*rounds, *chunks, "first token", "sampled first token", "catch-up"]
    assert facts["arena_bytes"] == max(e["arena_bytes"] for e in facts["executors"])
    assert facts["weights"]["nbytes"] == facts["weights"]["target"] + facts["weights"]["draft"]
    parts = (facts["weights"]["nbytes"], facts["state"]["nbytes"], facts["arena_bytes"])
    assert facts["total_bytes"] == sum(parts) + facts["frame_bytes"]
    assert str(facts["total_bytes"]) in memory_text(report)
