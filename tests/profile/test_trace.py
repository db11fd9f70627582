"""A profile as trace events: they nest, they add up, and they say what was measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import BufferProfile, NodeProfile, PlanProfile, Samples
from dflash_graph.profile.regions import node_us
from dflash_graph.profile.trace import live_bytes, trace_events

Event = dict[str, Any]


def slices(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """Complete events by process and thread."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def thread_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


@pytest.mark.parametrize("name", ["large_profile", "timed_profile", "demo_profile"])
def test_a_trace_is_json_and_its_slices_nest(name: str, request: pytest.FixtureRequest) -> None:
    profile: Profile = request.getfixturevalue(name)
    trace = trace_events(profile)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    for thread, events in slices(trace).items():
        open_until: list[float] = []
        last = 0.0
        for event in events:
            start, end = event["ts"], event["ts"] + event["dur"]
            assert start >= last - 1e-6 and event["dur"] >= 0, "slices of a thread stand in order"
            last = start
            while open_until and open_until[-1] <= start + 1e-6 and end > open_until[-1] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, (thread, event)
            open_until.append(end)


def test_every_node_is_there_with_its_time(timed_profile: Profile) -> None:
    trace = trace_events(timed_profile)
    found = slices(trace)
    for (process, thread), name in thread_names(trace).items():
        executor = timed_profile.executors[process - 2]
        nodes = list(executor.nodes())
        events = [event for event in found[process, thread] if "node" in event["args"]]
        if name == "segments":
            named = [event["name"] for event in found[process, thread]]
            assert named == [segment.name for segment in executor.segments]
            continue
        assert [event["args"]["node"] for event in events] == [node.name for node in nodes]
        for event, node in zip(events, nodes, strict=True):
            took = node.floor_us if name == "floors by region" else node_us(node)
            assert event["dur"] == took
            assert event["args"]["measured_us"] == node.time_us
            assert event["cat"] == node.op


def test_a_region_is_as_long_as_its_nodes(timed_profile: Profile) -> None:
    executor = timed_profile.executors[0]
    events = slices(trace_events(timed_profile))[2, 2]
    regions = [event for event in events if event["cat"] == "region"]
    verify = next(event for event in regions if event["args"]["region"] == "verify")
    nodes = [node for node in executor.nodes() if node.region.split("/")[0] == "verify"]
    assert verify["dur"] == pytest.approx(sum(map(node_us, nodes)))
    paths = {event["args"]["region"] for event in regions}
    assert {node.region for node in nodes} <= paths


def test_a_segment_begins_when_the_one_before_has_ended(timed_profile: Profile) -> None:
    executor = timed_profile.executors[0]
    forward, finish = slices(trace_events(timed_profile))[2, 1]
    assert executor.segments[0].measured is not None
    assert forward["dur"] == executor.segments[0].measured.median
    assert finish["ts"] >= forward["ts"] + forward["dur"]


def test_start_up_stages_stand_end_to_end(timed_profile: Profile, large_profile: Profile) -> None:
    stages = slices(trace_events(timed_profile))[1, 1]
    assert [event["name"] for event in stages] == [found.name for found in timed_profile.startup]
    ends = [event["ts"] + event["dur"] for event in stages]
    assert ends[:-1] == [event["ts"] for event in stages[1:]]
    assert ends[-1] == pytest.approx(sum(found.seconds for found in timed_profile.startup) * 1e6)
    assert (1, 1) not in slices(trace_events(large_profile)), "nothing was started"


def test_live_bytes_reach_the_lower_bound(demo_profile: Profile) -> None:
    for number, executor in enumerate(demo_profile.executors):
        live = live_bytes(executor.plan)
        # The bound counts buffers rounded up to their alignment.
        assert 0 < max(live) <= executor.plan.lower_bound_bytes
        counted = [
            event["args"]["bytes"]
            for event in trace_events(demo_profile)["traceEvents"]
            if event["ph"] == "C" and event["pid"] == number + 2
        ]
        assert counted[:-1] == live and counted[-1] == 0


def test_live_bytes_of_a_small_plan() -> None:
    buffers = (
        BufferProfile(name="a", values=("a",), offset=0, nbytes=10, first=0, last=1),
        BufferProfile(name="b", values=("b",), offset=256, nbytes=5, first=1, last=2),
    )
    plan = PlanProfile(
        arena_bytes=512,
        lower_bound_bytes=512,
        steps=("x", "y", "z"),
        boundaries=(0,),
        buffers=buffers,
    )
    assert live_bytes(plan) == [10, 15, 5]


def test_a_document_of_one_node_and_one_of_none(
    with_nodes: Callable[..., Profile], one_node: NodeProfile, demo_profile: Profile
) -> None:
    node = one_node.model_copy(update={"measured": Samples(values=(3.0, 4.0, 5.0))})
    trace = trace_events(with_nodes(node))
    (region, event) = slices(trace)[2, 2]
    assert (region["name"], region["dur"]) == ("verify", 4.0)
    assert (event["name"], event["dur"]) == ("only", 4.0)
    assert event["args"]["config"] == "linear BLOCK_N=64 warps=4 stages=3"
    assert event["args"]["spread_us"] == node.measured.spread if node.measured else False
    empty = trace_events(demo_profile.model_copy(update={"executors": ()}))
    assert empty["traceEvents"] == []
    assert empty["otherData"]["name"] == demo_profile.identity.name
