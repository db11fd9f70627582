"""What-ifs are what a plan of the same numbers says, and what fits is the largest that does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_graph import report
from dflash_graph.cli.selection import Dtype, select_pair
from dflash_graph.errors import OptionError
from dflash_graph.graph import Backend, Graph
from dflash_graph.lowering.schedules import lowered
from dflash_graph.models.round import Round, declare_round
from dflash_graph.op import Cost
from dflash_graph.passes.combine import combine
from dflash_graph.planner import plan
from dflash_graph.profile.build import declared_profile
from dflash_graph.profile.parts import Ceiling
from dflash_graph.profile.tree import frame_layout, tree_columns
from dflash_graph.profile.what_if import Footprint, scenarios_of
from dflash_graph.state import Capacities

CEILING = Ceiling(read_tb_per_s=4.6)
PAIR = select_pair("demo-dflash2", None, None, None, Dtype.bfloat16)[0]


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    return Footprint(PAIR, "eager", draft_tokens=5, max_batch=3, prefill_chunk=128)


def planned(batch: int, context: int) -> report.MemoryReport:
    return report.plan_memory(
        PAIR,
        "eager",
        draft_tokens=5,
        max_batch=batch,
        prefill_chunk=128,
        capacities=Capacities(batch, context),
    )


@pytest.mark.parametrize("context", [1, 64, 65, 5000])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_memory_is_what_a_plan_says(footprint: Footprint, batch: int, context: int) -> None:
    found, expected = footprint.memory(batch, context), planned(batch, context)
    assert report.memory_dict(found) == report.memory_dict(expected)


def test_scenarios(footprint: Footprint) -> None:
    found = scenarios_of([footprint], [1, 3], [256, 1024], 100, CEILING)
    assert [(one.max_batch, one.max_context) for one in found] == [
        (1, 256),
        (1, 1024),
        (3, 256),
        (3, 1024),
    ]
    profile = declared_profile(
        PAIR,
        "eager",
        name="demo",
        draft_tokens=5,
        max_batch=3,
        max_context=1024,
        prefill_chunk=128,
        context=100,
    )
    assert found[-1].round_floor_us == pytest.approx(profile.executor("round B=3").floor_us)
    assert found[-1].total == planned(3, 1024).total_bytes
    with pytest.raises(OptionError, match="at most 250 tokens"):
        scenarios_of([footprint], [1], [256, 1024], 251, CEILING)


@pytest.mark.parametrize("context", [64, 1000, 4096])
def test_the_largest_context_fits_and_the_next_page_does_not(
    footprint: Footprint, context: int
) -> None:
    size = planned(2, context).total_bytes
    found = footprint.largest_context(2, size, 1 << 20)
    assert found is not None and found >= context
    assert planned(2, found).total_bytes <= size < planned(2, found + 1).total_bytes
    assert footprint.largest_context(2, size - 1, 1 << 20) != found


def test_the_largest_batch(footprint: Footprint) -> None:
    size = planned(2, 1000).total_bytes
    assert footprint.largest_batch(1000, size) == 2
    assert footprint.largest_batch(1000, size - 1) == 1
    assert footprint.largest_batch(1000, 1 << 40) == 3
    assert footprint.largest_batch(1000, 1000) is None
    assert footprint.largest_context(1, 1000, 1 << 20) is None
    assert footprint.largest_context(1, 1 << 50, 3000) == 3000
    fits = footprint.fits(size, [1, 2], [1000], 1 << 14)
    assert fits.by_context == {1000: 2} and fits.by_batch[2] is not None
    assert (fits.by_batch[1] or 0) > fits.by_batch[2]


def test_a_batch_outside_is_refused(footprint: Footprint) -> None:
    with pytest.raises(OptionError, match=r"expected 1\.\.3, got 4"):
        footprint.memory(4, 100)


# -- trees -----------------------------------------------------------------------------------------


def declared(backend: Backend, draft_tokens: int, *, sampling: bool = False) -> Round:
    return declare_round(PAIR, backend, draft_tokens=draft_tokens, batch=2, sampling=sampling)


def tree(backend: Backend, draft_tokens: int = 5, width: int = 3) -> Footprint:
    return Footprint(
        PAIR,
        backend,
        draft_tokens=draft_tokens,
        tree_width=width,
        max_batch=2,
        prefill_chunk=128,
    )


def cost_of(graph: Graph, *regions: str, context: int = 100) -> Cost:
    combined = combine(graph)
    costs = combined.cost(context=context)
    nodes = [node for region in regions for node in combined.region_nodes(region)]
    return sum((costs[node.name] for node in nodes), Cost())


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_tree_costs_a_chain_but_for_verify_and_accept(backend: Backend) -> None:
    chain, wide = declared(backend, 5), declared(backend, 15)
    common = cost_of(chain.forward, "materialize", "propose") + cost_of(chain.finish, "commit")
    expected = common + cost_of(wide.forward, "verify", "accept")
    found = tree(backend).scenario(2, 1024, 100, CEILING)
    assert (found.columns, found.tree_width) == (16, 3)
    assert (found.round_bytes, found.round_flops) == (expected.bytes, expected.flops)
    narrow = tree(backend, width=1).scenario(2, 1024, 100, CEILING)
    whole = common + cost_of(chain.forward, "verify", "accept")
    assert (narrow.round_bytes, narrow.round_flops) == (whole.bytes, whole.flops)
    assert found.chain_floor_us == narrow.round_floor_us == narrow.chain_floor_us
    assert (narrow.break_even, narrow.most_chain_tokens) == (1.0, 6.0)


def test_what_a_column_of_a_tree_adds() -> None:
    """The target's weights are read once; what else verify moves is the same for each column."""
    widths = (2, 3, 5)
    found = [tree("eager", 3, width).scenario(2, 1024, 100, CEILING) for width in widths]
    assert [one.columns for one in found] == [7, 10, 16]
    (first, second, third) = (one.round_bytes for one in found)
    assert third - second == 2 * (second - first) > 0
    weights = sum(value.spec.nbytes() for value in declared("eager", 3).forward.by_role("weight"))
    assert second - first < weights


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_memory_of_a_tree(backend: Backend) -> None:
    found, chain = (tree(backend, 5, width).memory(2, 1024) for width in (3, 1))
    assert (found.weights, found.state) == (chain.weights, chain.state)
    plans = {one.name: one.plan for one in found.executors}
    for name, sampling in (("round B=2", False), ("sampling B=2", True)):
        wide = declared(backend, 15, sampling=sampling).segments
        assert plans[name] == plan([lowered(graph) for graph in wide])
    same = {one.name: one for one in chain.executors}
    assert same["catch-up"] == next(one for one in found.executors if one.name == "catch-up")


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_peak_of_a_tree_lies_where_it_is_as_wide(backend: Backend) -> None:
    """Materialize and propose are planned W columns wide too; that must not set the arena."""
    for executor in tree(backend).memory(2, 1024).executors:
        if executor.name.endswith("B=2"):
            buffers, steps = executor.plan.buffers, executor.plan.steps
            live = [
                sum(buffer.nbytes for buffer in buffers if buffer.first <= at <= buffer.last)
                for at in range(len(steps))
            ]
            assert steps[live.index(max(live))].split("/")[0] in ("verify", "accept")


@pytest.mark.parametrize("sampling", [False, True])
def test_frames_of_a_tree_are_as_wide_as_their_readers(sampling: bool) -> None:
    chain = declared("eager", 5, sampling=sampling).segments
    wide = declared("eager", 15, sampling=sampling).segments
    numbers = Capacities(2, 1024).bindings()
    shapes = {
        name: shape
        for role in ("input", "output")
        for name, (_, shape, _) in frame_layout(chain, wide, role, numbers).fields.items()
    }
    assert shapes["positions"] == (3, 2, 16) and shapes["verify/ids"] == (2, 16)
    assert shapes["draft_positions"] == shapes["context_positions"] == (1, 2, 6)
    assert shapes.get("published", (2, 6)) == (2, 6)
    assert ("published" in shapes) == sampling


def test_trees_that_are_refused() -> None:
    assert [tree_columns(PAIR, k, 15 // k) for k in (2, 3, 5, 7, 15)] == [15, 16, 16, 15, 16]
    for k, width, words in (
        (7, 3, r"expected 1\.\.2 with K = 7 .* got 3 \(W = 22\)"),
        (8, 2, r"expected 1 with K = 8 .* at most 16 columns"),
        (1, 9, r"expected 1\.\.8 with K = 1 .* at most 8 leaves"),
        (5, 0, r"expected 1\.\.3 with K = 5"),
        (0, 2, "plain decoding has no drafts"),
    ):
        with pytest.raises(OptionError, match=f"tree_width: .*{words}"):
            tree_columns(PAIR, k, width)
    assert PAIR.draft is not None and PAIR.draft.selector is not None
    few = replace(PAIR.draft, selector=replace(PAIR.draft.selector, top_k=2))
    with pytest.raises(OptionError, match=r"expected 1\.\.2 with K = 3 .* 2 candidates"):
        tree_columns(replace(PAIR, draft=few), 3, 3)
    with pytest.raises(OptionError, match="dflash2 draft's candidates, got none"):
        tree_columns(replace(PAIR, draft=None), 3, 2)


def test_what_a_tree_must_publish() -> None:
    found = replace(tree("eager").scenario(2, 1024, 100, CEILING), chain_floor_us=10.0)
    slower = replace(found, round_floor_us=12.0)
    assert slower.break_even == 1.2 and slower.most_chain_tokens == pytest.approx(5.0)
    assert slower.needed_tokens(4.0) == pytest.approx(4.8)
    assert slower.needed_tokens(5.1) is None
