"""Differences: nodes, rounds and memory, and which rounds count as slower."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_graph.errors import ProfileError
from dflash_graph.profile.difference import difference
from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import (
    Ceiling,
    Config,
    ExecutorProfile,
    MemoryClass,
    NodeProfile,
    Samples,
)


def with_executor(profile: Profile, executor: ExecutorProfile) -> Profile:
    executors = tuple(
        executor if found.name == executor.name else found for found in profile.executors
    )
    return profile.model_copy(update={"executors": executors})


def with_first_nodes(profile: Profile, change: Any) -> Profile:
    """The document with the nodes of its first segment changed."""
    executor = profile.executors[0]
    first, *others = executor.segments
    first = first.model_copy(update={"nodes": tuple(change(list(first.nodes)))})
    return with_executor(profile, executor.model_copy(update={"segments": (first, *others)}))


def scaled(profile: Profile, factor: float, noise: float = 0.002, seed: int = 5) -> Profile:
    """The document with all times of its first executor drawn anew around a multiple."""
    numbers = random.Random(seed)

    def again(samples: Samples | None) -> Samples | None:
        if samples is None:
            return None
        center = samples.median * factor
        values = (center * numbers.gauss(1, noise) for _ in samples.values)
        return Samples(values=tuple(values))

    executor = profile.executors[0]
    segments = tuple(
        segment.model_copy(
            update={
                "measured": again(segment.measured),
                "nodes": tuple(
                    node.model_copy(update={"measured": again(node.measured)})
                    for node in segment.nodes
                ),
            }
        )
        for segment in executor.segments
    )
    return with_executor(
        profile,
        executor.model_copy(update={"segments": segments, "measured": again(executor.measured)}),
    )


def test_a_profile_and_itself(timed_profile: Profile) -> None:
    found = difference(timed_profile, timed_profile)
    assert not (found.identity or found.changed or found.removed or found.added or found.memory)
    assert not found.slower_than(0.0)
    for change in found.rounds:
        assert change.ratio == 1 and change.sign_p == 1 and change.faster == change.slower == 0


def test_a_slower_round_is_seen(timed_profile: Profile) -> None:
    found = difference(timed_profile, scaled(timed_profile, 1.06))
    (slower,) = found.slower_than(0.03)
    assert slower.executor == "round B=1" and slower.basis == "measured"
    assert slower.ratio == pytest.approx(1.06, abs=0.02)
    assert slower.interval is not None and slower.interval.low > 1.03
    assert slower.slower > 0.9 * slower.nodes and slower.sign_p < 1e-6
    assert slower.node_ratio == pytest.approx(1.06, abs=0.01)
    assert not found.slower_than(0.10)
    gains = [abs(one.after - one.before) for one in found.times]
    assert gains == sorted(gains, reverse=True)


def test_a_faster_round_is_no_failure(timed_profile: Profile) -> None:
    found = difference(timed_profile, scaled(timed_profile, 0.9))
    assert not found.slower_than(0.0)
    assert found.rounds[0].is_resolved and found.rounds[0].ratio < 0.92


def test_noise_is_no_failure(timed_profile: Profile) -> None:
    """A median that is higher by a tenth, of rounds that scatter by more, is not told from
    nothing; the same tenth of steady rounds is.
    """
    executor = timed_profile.executors[0]

    def spread(center: float, width: float) -> Profile:
        values = tuple(center + width * step for step in (-3, -2, -1, 0, 1, 2, 3))
        measured = executor.model_copy(update={"measured": Samples(values=values)})
        return with_executor(timed_profile, measured)

    noisy = difference(spread(100, 20), spread(110, 20))
    assert noisy.rounds[0].ratio == pytest.approx(1.1)
    assert not noisy.rounds[0].is_resolved and not noisy.slower_than(0.03)
    steady = difference(spread(100, 0.5), spread(110, 0.5))
    assert steady.rounds[0].is_resolved and steady.slower_than(0.03)


def test_single_measurements_are_taken_as_they_are(timed_profile: Profile) -> None:
    executor = timed_profile.executors[0]

    def once(value: float) -> Profile:
        measured = executor.model_copy(update={"measured": Samples(values=(value,))})
        return with_executor(timed_profile, measured)

    found = difference(once(100.0), once(104.0))
    assert found.rounds[0].interval is None
    assert [one.executor for one in found.slower_than(0.03)] == ["round B=1"]
    assert not found.slower_than(0.05)


def test_floors_are_compared_at_one_ceiling(demo_profile: Profile) -> None:
    other = demo_profile.model_copy(update={"ceiling": Ceiling(read_tb_per_s=0.01)})
    for change in difference(demo_profile, other).rounds:
        assert change.basis == "floor" and change.ratio == 1

    def heavier(nodes: list[NodeProfile]) -> list[NodeProfile]:
        return [node.model_copy(update={"read_bytes": 2 * node.read_bytes}) for node in nodes]

    found = difference(demo_profile, with_first_nodes(demo_profile, heavier))
    assert found.rounds[0].ratio > 1.3
    assert [one.executor for one in found.slower_than(0.03)] == ["round B=1"]


def test_nodes_that_came_and_went(timed_profile: Profile, one_node: NodeProfile) -> None:
    gone = timed_profile.executors[0].segments[0].nodes[5].name

    def swap(nodes: list[NodeProfile]) -> list[NodeProfile]:
        return [node for node in nodes if node.name != gone] + [one_node]

    found = difference(timed_profile, with_first_nodes(timed_profile, swap))
    assert found.removed == (("round B=1", "forward", gone),)
    assert found.added == (("round B=1", "forward", "verify/only"),)
    back = difference(with_first_nodes(timed_profile, swap), timed_profile)
    assert (back.added, back.removed) == (found.removed, found.added)


def test_other_kernels_are_told_field_by_field(timed_profile: Profile) -> None:
    def retune(nodes: list[NodeProfile]) -> list[NodeProfile]:
        first = nodes[0]
        assert first.config is not None
        config = Config(
            template=first.config.template,
            holes={**first.config.holes, "EXTRA": 3},
            num_warps=first.config.num_warps * 2,
            num_stages=first.config.num_stages,
        )
        return [first.model_copy(update={"config": config, "source": "mine.json"}), *nodes[1:]]

    found = difference(timed_profile, with_first_nodes(timed_profile, retune))
    (change,) = found.changed
    fields = {one.field: (one.before, one.after) for one in change.fields}
    assert fields.keys() == {"source", "warps", "hole EXTRA"}
    assert fields["hole EXTRA"] == ("-", "3") and fields["source"][1] == "mine.json"


def test_executors_of_one_side_only(demo_profile: Profile) -> None:
    fewer = demo_profile.model_copy(update={"executors": demo_profile.executors[:1]})
    found = difference(demo_profile, fewer)
    assert "round B=2" in found.executors_removed and not found.executors_added
    assert [change.executor for change in found.rounds] == ["round B=1"]
    none = demo_profile.model_copy(update={"executors": demo_profile.executors[1:2]})
    with pytest.raises(ProfileError, match="both profiles have"):
        difference(fewer, none)


def test_memory_and_identity(timed_profile: Profile) -> None:
    identity = timed_profile.identity.model_copy(
        update={"versions": {**timed_profile.identity.versions, "torch": "9.9"}}
    )
    memory = tuple(
        MemoryClass(name=one.name, planned_bytes=one.planned_bytes, actual_bytes=7)
        if one.name == "arena"
        else one
        for one in timed_profile.memory
    )
    other = timed_profile.model_copy(update={"identity": identity, "memory": memory[:-1]})
    found = difference(timed_profile, other)
    assert [(one.field, one.after) for one in found.identity] == [("version of torch", "9.9")]
    changes = {one.name: (one.before, one.after) for one in found.memory}
    arena = next(one for one in timed_profile.memory if one.name == "arena")
    assert changes["arena"] == (arena.planned_bytes, 7)
