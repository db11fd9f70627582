"""Frames: every field at its place in one buffer, and what a fill refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.frame import Frame, FrameLayout, input_layout, layout, output_layout
from dflash_graph.graph import Graph, GraphBuilder, GraphKey, Value
from dflash_graph.tensor import TensorSpec

NUMBERS = {"request_pages": 3}


def field(name: str, *shape: int | str, dtype: str = "int32") -> Value:
    return Value(name, TensorSpec(shape, dtype), "input")


def frame() -> Frame:
    return Frame(
        layout(
            [
                field("slots", 2),
                field("page_table", 2, "request_pages"),
                field("scores", 2, 4, dtype="float32"),
            ],
            NUMBERS,
        )
    )


def graphs() -> tuple[Graph, Graph]:
    """Two segments that share one input field and one state."""
    made = []
    for segment in ("forward", "finish"):
        g = GraphBuilder(GraphKey(segment, "eager", 0, 2, 1, "float32"))
        continuation = g.state("continuation", ("slots", 8))
        slots = g.input("slots", (2,))
        hidden = g.call("slot_hidden", continuation=continuation, slots=slots)
        if segment == "forward":
            g.output(hidden)
            g.input("page_table", (2, "request_pages"))
        else:
            g.call(
                "stage_hidden",
                hidden=hidden,
                continuation=continuation,
                slots=slots,
                committed=g.input("committed", (2,)),
            )
        made.append(g.build())
    return made[0], made[1]


def test_fields_lie_apart_at_whole_lines() -> None:
    found = frame().layout
    assert found.fields == {
        "slots": (0, (2,), "int32"),
        "page_table": (16, (2, 3), "int32"),
        "scores": (32, (2, 4), "float32"),
    }
    assert found.words == 48 and found.nbytes == 192


def test_a_large_field_takes_as_many_lines_as_it_needs() -> None:
    found = layout([field("a", 17), field("b", 16), field("c", 1)], {})
    assert [offset for offset, _, _ in found.fields.values()] == [0, 32, 48]
    assert found.words == 64
    ends = [(offset, offset + shape[0]) for offset, shape, _ in found.fields.values()]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_no_fields_still_make_a_buffer() -> None:
    assert layout([], {}) == FrameLayout({}, 16)


def test_a_capacity_must_be_bound() -> None:
    with pytest.raises(ShapeError, match="'request_pages' is not bound"):
        layout([field("page_table", 2, "request_pages")], {})


@pytest.mark.parametrize(
    "given",
    [
        [0.9, 1.0],
        [float("nan"), 0],
        1.0,
        torch.ones(2),
        torch.ones(2, dtype=torch.bfloat16),
        [[1], [1, 2]],
        None,
        "12",
        [1, None],
    ],
)
def test_integers_are_not_made_of_others(given: object) -> None:
    """Rounding a slot or a count would run another request's."""
    found = frame()
    found.fill(slots=7)
    with pytest.raises(ShapeError, match=r"frame\.slots"):
        found.fill(slots=given)
    assert found.read("slots") == [7, 7]
    found.fill(slots=torch.tensor([True, False]), scores=3)
    assert found.read("slots") == [1, 0] and found.read("scores")[0][0] == 3.0


def test_views_alias_the_one_buffer() -> None:
    found = frame()
    assert found.buffer.shape == (48,) and found.buffer.dtype == torch.int32
    found.fill(slots=[3, 5], page_table=[[0, 1, 2], [3, 4, -1]], scores=torch.full((2, 4), 1.5))
    assert found.buffer[:2].tolist() == [3, 5]
    assert found.buffer[16:22].tolist() == [0, 1, 2, 3, 4, -1]
    assert found.buffer[32:40].view(torch.float32).tolist() == [1.5] * 8
    assert found.buffer[2:16].eq(0).all(), "nothing is written between fields"
    copy = Frame(found.layout)
    copy.buffer.copy_(found.buffer)
    for name in ("slots", "page_table", "scores"):
        assert name in copy and torch.equal(copy[name], found[name])
        assert found[name].untyped_storage().data_ptr() == found.buffer.data_ptr()


def test_segments_see_what_the_host_fills() -> None:
    """On the CPU both sides are the same memory, and copies have nothing to do."""
    found = frame()
    assert found.host is found.buffer
    found.fill(slots=[3, 5], scores=2.5)
    found.upload()
    assert found.bound("slots").tolist() == [3, 5]
    assert found.bound("scores").dtype == torch.float32
    found.bound("page_table").fill_(8)
    found.download()
    assert found["page_table"].eq(8).all()
    assert found.bound("slots").data_ptr() == found["slots"].data_ptr()
    with pytest.raises(ShapeError, match=r"^frame has no field 'slot'; it has \['page_table', "):
        found.bound("slot")


def test_a_frame_without_a_host_side_is_its_own_twin() -> None:
    found = frame()
    assert found.twin() is found


def test_clear_zeroes_every_field() -> None:
    found = frame()
    found.fill(slots=7, page_table=[[0, 1, 2], [3, 4, -1]], scores=-1.5)
    found.clear()
    assert not found.buffer.any()
    assert found["scores"].eq(0.0).all() and found["slots"].tolist() == [0, 0]


def test_one_number_fills_a_field() -> None:
    found = frame()
    found.fill(slots=7, scores=torch.tensor(0.5))
    assert found["slots"].tolist() == [7, 7]
    assert found["scores"].eq(0.5).all()


def test_a_fill_keeps_other_fields() -> None:
    found = frame()
    found.fill(slots=[1, 2])
    found.fill(page_table=9)
    assert found["slots"].tolist() == [1, 2]


def test_bad_fills_are_refused() -> None:
    found = frame()
    with pytest.raises(ShapeError, match=r"^frame\.slots: expected shape \[2\], got \[3\]$"):
        found.fill(slots=[1, 2, 3])
    with pytest.raises(ShapeError, match=r"^frame\.slots: expected shape \[2\], got \[1\]$"):
        found.fill(slots=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"^frame has no field 'slot'; it has \['page_table', "):
        found.fill(slot=[1, 2])
    assert "slot" not in found


def test_segments_share_fields_by_name() -> None:
    forward, finish = graphs()
    found = input_layout((forward, finish), NUMBERS)
    assert list(found.fields) == ["slots", "page_table", "committed"]
    assert list(output_layout((forward, finish), NUMBERS).fields) == ["slot_hidden"]


def test_a_field_is_read_as_lists() -> None:
    found = frame()
    found.fill(slots=[4, 7], scores=0.5)
    assert found.read("slots") == [4, 7]
    assert found.read("scores") == [[0.5] * 4] * 2
    with pytest.raises(ShapeError, match=r"frame has no field 'pages'; it has \['page_table'"):
        found.read("pages")


def test_take_copies_every_field() -> None:
    found, other = frame(), frame()
    other.fill(slots=7, page_table=[[0, 1, 2], [3, 4, -1]], scores=-1.5)
    found.take(other)
    assert torch.equal(found.buffer, other.buffer)
    other.fill(slots=8)
    assert found["slots"].eq(7).all()
