"""The page of a profile as text: what it holds, that it holds all of it as text, and gives it back.

What it looks like is tested in a browser, in test_browser.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from dflash_graph.errors import ProfileError
from dflash_graph.profile.bars import length_bars, survival_bars
from dflash_graph.profile.charts import roofline, timeline, workspace
from dflash_graph.profile.document import Profile
from dflash_graph.profile.html import document_in, render_html
from dflash_graph.profile.marks import nice_steps
from dflash_graph.profile.parts import (
    AcceptanceCounts,
    BufferProfile,
    Ceiling,
    NodeProfile,
    PlanProfile,
    Samples,
)
from dflash_graph.profile.quantities import rate_text, ratio_text, time_text
from dflash_graph.profile.regions import styles_of, tree

HOSTILE = "</script><script>alert(1)</script><b onclick='x'>&amp;\"]]>\u2028{{ 7 * 7 }}"

#: Elements that stand alone, and SVG's that the template closes itself.
VOID = {"meta", "link", "rect", "line", "circle", "br"}


class Outline(HTMLParser):
    """Elements with their attributes, their texts, and whether all of them were closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def of_tag(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for found, attributes in self.elements if found == tag)

    def says(self, text: str) -> bool:
        return any(text in found for tag, found in self.texts if tag not in ("script", "style"))


@pytest.mark.parametrize("name", ["large_profile", "timed_profile", "demo_profile"])
def test_a_page_is_well_formed_and_gives_the_document_back(
    name: str, request: pytest.FixtureRequest
) -> None:
    profile: Profile = request.getfixturevalue(name)
    page = render_html(profile)
    outline = Outline(page)
    assert outline.open == []
    assert document_in(page) == profile
    ids = [found["id"] for _, found in outline.elements if "id" in found]
    assert len(ids) == len(set(ids))
    links = {found["href"] for found in outline.of_tag("a")}
    assert links <= {f"#{found}" for found in ids}
    assert len(list(outline.of_tag("h2"))) >= len(profile.executors) + 4


def test_equal_documents_give_equal_pages(demo_profile: Profile) -> None:
    again = Profile.parse(demo_profile.to_json())
    assert render_html(again) == render_html(demo_profile)


def test_nothing_is_asked_of_a_network(timed_profile: Profile) -> None:
    page = render_html(timed_profile)
    outline = Outline(page)
    for tag, attributes in outline.elements:
        for name in ("src", "srcset", "action", "data", "poster", "xlink:href"):
            assert name not in attributes, (tag, attributes)
        target = attributes.get("href") or "#"
        assert target.startswith("#") or (tag, target) == ("link", "data:,")
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|WebSocket", page)
    policy = [found["content"] for found in outline.of_tag("meta") if "http-equiv" in found]
    assert policy and str(policy[0]).startswith("default-src 'none'")


def test_addresses_in_a_document_are_only_text(demo_profile: Profile) -> None:
    identity = demo_profile.identity.model_copy(update={"name": "https://example.org/x.js"})
    outline = Outline(render_html(demo_profile.model_copy(update={"identity": identity})))
    assert outline.says("https://example.org/x.js")
    assert not [found for _, found in outline.elements if "https://example.org" in str(found)]


def test_hostile_text_stays_text(
    with_nodes: Callable[..., Profile], one_node: NodeProfile, demo_profile: Profile
) -> None:
    honest = Outline(render_html(with_nodes(one_node)))
    hostile = one_node.model_copy(
        update={"name": HOSTILE, "region": HOSTILE, "op": HOSTILE, "inputs": (HOSTILE,)}
    )
    profile = with_nodes(hostile)
    device = profile.identity.device.model_copy(update={"name": HOSTILE})
    changes = {"name": HOSTILE, "device": device, "options": {HOSTILE: HOSTILE}}
    identity = profile.identity.model_copy(update=changes)
    executor = profile.executors[0].model_copy(update={"name": HOSTILE})
    profile = profile.model_copy(update={"identity": identity, "executors": (executor,)})
    page = render_html(profile)
    outline = Outline(page)
    assert document_in(page) == profile
    assert "49" not in {text for _, text in outline.texts}, "a document's text is no template"
    assert outline.says(HOSTILE)
    count = sum(tag == "script" for tag, _ in outline.elements)
    assert count == sum(tag == "script" for tag, _ in honest.elements)
    assert not any("onclick" in found for _, found in outline.elements)
    assert demo_profile.identity.name not in outline.texts


def test_a_document_without_measurements_says_so(large_profile: Profile) -> None:
    outline = Outline(render_html(large_profile))
    assert outline.says("not measured")
    assert outline.says("Nothing was started")
    assert not outline.says("nodes, measured one by one")


@pytest.mark.parametrize(
    "changes",
    [
        {"executors": ()},
        {"memory": ()},
        {
            "acceptance": AcceptanceCounts(
                rounds=0,
                drafted=0,
                committed=0,
                verified_by_position=(),
                accepted_by_position=(),
            )
        },
    ],
    ids=["no executor", "no memory", "no round"],
)
def test_a_document_may_be_empty(demo_profile: Profile, changes: dict[str, Any]) -> None:
    page = render_html(demo_profile.model_copy(update=changes))
    assert Outline(page).open == []


def test_nodes_may_take_no_time_and_move_nothing(
    with_nodes: Callable[..., Profile], one_node: NodeProfile
) -> None:
    idle = {"read_bytes": 0, "write_bytes": 0, "flops": 0, "floor_us": 0.0}
    node = one_node.model_copy(update={**idle, "measured": Samples(values=(0.0,)), "region": ""})
    outline = Outline(render_html(with_nodes(node)))
    assert outline.says("No node of this executor does arithmetic")
    assert outline.says("needs no workspace")
    assert outline.says("(no region)")


def test_each_node_has_a_row_and_a_leaf(large_profile: Profile) -> None:
    executor = large_profile.executors[0]
    only = large_profile.model_copy(update={"executors": (executor,)})
    outline = Outline(render_html(only))
    nodes = [node.name for node in executor.nodes()]
    assert len(nodes) > 390
    cells = [text for tag, text in outline.texts if tag == "td"]
    assert [text for text in cells if text in set(nodes)] == nodes
    assert sum(tag == "li" for tag, _ in outline.elements) >= len(nodes)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<p>not a profile</p>",
        '<script type="application/json" id="profile-document">{</script>',
    ],
)
def test_a_page_without_a_document_is_refused(page: str) -> None:
    with pytest.raises(ProfileError, match=r"here\.html: expected"):
        document_in(page, "here.html")


def test_a_timeline_is_as_long_as_its_round(timed_profile: Profile) -> None:
    executor = timed_profile.executors[0]
    picture = timeline(executor, styles_of(timed_profile.executors))
    measured, nodes, floors = picture.lanes
    assert (measured.name, floors.name) == ("round, measured", "floor")
    assert executor.measured is not None and executor.attributed_us is not None
    assert measured.total == time_text(executor.measured.median)
    for lane, share in ((measured, 1.0), (floors, executor.floor_us / executor.measured.median)):
        for left, right in zip(lane.marks, lane.marks[1:], strict=False):
            assert right.x == pytest.approx(left.x + left.width)
        last = lane.marks[-1]
        assert last.x + last.width == pytest.approx(100 * share)
    assert nodes.marks[-1].title.startswith("unattributed")
    spent = sum(mark.width for mark in nodes.marks[:-1])
    assert spent == pytest.approx(100 * executor.attributed_us / executor.measured.median)


def test_a_timeline_marks_what_was_not_timed(
    with_nodes: Callable[..., Profile], one_node: NodeProfile
) -> None:
    timed = {"name": "propose/only", "region": "propose", "measured": Samples(values=(2.0,))}
    profile = with_nodes(one_node.model_copy(update=timed), one_node)
    picture = timeline(profile.executors[0], styles_of(profile.executors))
    nodes, _ = picture.lanes
    assert nodes.name == "nodes, measured one by one (1 of 2 not timed: floor)"
    assert [mark.style for mark in nodes.marks] == ["c0", "c1 estimated"]


def test_an_unmeasured_memory_bound_node_stands_on_the_roof(
    with_nodes: Callable[..., Profile], one_node: NodeProfile
) -> None:
    ceiling = Ceiling(read_tb_per_s=2.0, tflop_per_s=100)
    moved = one_node.read_bytes + one_node.write_bytes
    node = one_node.model_copy(update={"floor_us": moved / 2e6})
    still = one_node.model_copy(update={"name": "verify/copy", "flops": 0})
    profile = with_nodes(node, still)
    picture = roofline(profile.executors[0], ceiling, styles_of(profile.executors))
    assert picture is not None and picture.left_out == 1
    (dot,), (memory, compute) = picture.dots, picture.ceilings
    slope = (memory.y2 - memory.y1) / (memory.x2 - memory.x1)
    assert dot.y == pytest.approx(memory.y1 + slope * (dot.x - memory.x1))
    assert dot.style.endswith("estimated")
    assert (memory.x2, memory.y2) == pytest.approx((compute.x1, compute.y1))
    slow = node.model_copy(update={"measured": Samples(values=(10 * node.floor_us,))})
    profile = with_nodes(slow)
    below = roofline(profile.executors[0], ceiling, styles_of(profile.executors))
    assert below is not None
    assert below.dots[0].y > below.ceilings[0].y1 + slope * (below.dots[0].x - below.ceilings[0].x1)


def test_alike_nodes_are_one_dot(large_profile: Profile) -> None:
    executor = large_profile.executors[0]
    picture = roofline(executor, large_profile.ceiling, styles_of(large_profile.executors))
    assert picture is not None
    counts = [
        int(match[1]) for dot in picture.dots if (match := re.search(r"(\d+) node", dot.title))
    ]
    assert sum(counts) + picture.left_out == len(list(executor.nodes()))
    assert len(picture.dots) < 60
    for mark in picture.dots:
        assert 0 <= mark.x <= 100 and 0 <= mark.y <= 100


def test_a_workspace_shows_each_buffer_where_and_while_it_lives(
    with_nodes: Callable[..., Profile], one_node: NodeProfile
) -> None:
    profile = with_nodes(one_node)
    buffers = (
        BufferProfile(name="a", values=("a", "b"), offset=0, nbytes=256, first=0, last=3),
        BufferProfile(name="c", values=("c",), offset=256, nbytes=768, first=1, last=1),
    )
    plan = PlanProfile(
        arena_bytes=1024,
        lower_bound_bytes=512,
        steps=("s0", "s1", "s2", "s3"),
        boundaries=(0, 2),
        buffers=buffers,
    )
    executor = profile.executors[0].model_copy(update={"plan": plan})
    picture = workspace(executor, styles_of(profile.executors))
    assert picture is not None
    a, c = picture.marks
    assert (a.x, a.y, a.width, a.height) == (0, 75, 100, 25)
    assert (c.x, c.y, c.width, c.height) == (25, 0, 25, 75)
    assert a.style == "c0 kept" and "a -> b: 256 B at offset 0, steps 0 to 3 (s0 to s3)" in a.title
    assert c.style == "whole", "no node is known of its step"
    assert [(line.style, line.x1, line.y1) for line in picture.lines] == [
        ("bound", 0, 50),
        ("boundary", 50, 0),
    ]


def test_buffers_of_a_plan_never_overlap_in_the_picture(large_profile: Profile) -> None:
    executor = large_profile.executors[0]
    picture = workspace(executor, styles_of(large_profile.executors))
    assert picture is not None and len(picture.marks) == len(executor.plan.buffers)
    marks = sorted(picture.marks, key=lambda mark: mark.x)
    for index, left in enumerate(marks):
        for right in marks[index + 1 :]:
            if right.x >= left.x + left.width - 1e-9:
                break
            low, high = sorted((left, right), key=lambda mark: mark.y)
            assert low.y + low.height <= high.y + 1e-9, (left.title, right.title)


def test_bars_of_acceptance() -> None:
    counts = AcceptanceCounts(
        rounds=10,
        drafted=18,
        committed=19,
        verified_by_position=(10, 8),
        accepted_by_position=(6, 3),
    )
    lengths = length_bars(counts)
    assert [mark.title for mark in lengths.marks] == [
        "0 drafts accepted: 4 rounds, 40.0%",
        "1 draft accepted: 3 rounds, 30.0%",
        "2 drafts accepted: 3 rounds, 30.0%",
    ]
    assert [mark.height for mark in lengths.marks] == [100, 75, 75]
    survival = survival_bars(counts)
    assert [round(mark.height, 1) for mark in survival.marks] == [60, 37.5]
    for mark, line in zip(survival.marks, survival.intervals, strict=True):
        assert line.y1 < mark.y < line.y2 <= 100
        assert line.x1 == line.x2 == pytest.approx(mark.x + mark.width / 2)


def test_regions_fold_and_keep_every_node(large_profile: Profile) -> None:
    nodes = tuple(large_profile.executors[0].nodes())
    regions = tree(nodes)
    assert [found.name for found in regions] == [
        "materialize",
        "propose",
        "verify",
        "accept",
        "commit",
    ]
    kept = [node.name for found in regions for node in found.every_node]
    assert sorted(kept) == sorted(node.name for node in nodes)
    verify = regions[2]
    layers = next(found for found in verify.children if found.name == "layer.0 to layer.63")
    assert [found.name for found in layers.children] == [f"layer.{i}" for i in range(64)]
    assert sum(found.floor_us for found in regions) == pytest.approx(
        large_profile.executors[0].floor_us
    )


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (time_text(0), "0"),
        (time_text(0.042), "42 ns"),
        (time_text(3.1e-8), "3e-05 ns"),
        (time_text(0.1), "0.1 µs"),
        (time_text(12.3), "12.3 µs"),
        (time_text(999.9), "1 ms"),
        (time_text(13170), "13.17 ms"),
        (time_text(2.1e6), "2.1 s"),
        (time_text(-3.5), "-3.5 µs"),
        (rate_text(989e12), "989 Tflop/s"),
        (rate_text(1e15), "1 Pflop/s"),
        (rate_text(12), "12 flop/s"),
        (ratio_text(1.267), "1.27\u00d7"),
        (ratio_text(64102.9), "64,103\u00d7"),
    ],
)
def test_quantities(found: str, text: str) -> None:
    assert found == text


@pytest.mark.parametrize("end", [1e-3, 0.7, 1, 9.99, 10, 17.17, 1000, 123456])
def test_steps_of_an_axis_are_round_and_few(end: float) -> None:
    steps = nice_steps(end)
    assert steps[0] == 0 and steps[-1] <= end * (1 + 1e-9)
    assert 2 <= len(steps) <= 7
