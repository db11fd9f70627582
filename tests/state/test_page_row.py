"""A request's row of a page table: kept, and always what its list of pages says."""

from __future__ import annotations

from random import Random

from dflash_graph.options import SamplingParams
from dflash_graph.request import Request


def request() -> Request:
    return Request(0, (1, 2), SamplingParams(), frozenset(), 4)


def expected(pages: list[int], capacity: int) -> list[int]:
    return [*pages, *[-1] * (capacity - len(pages))]


def test_it_follows_pages_that_come() -> None:
    found, random = request(), Random(0)
    assert found.page_table(9).tolist() == [-1] * 9
    for count in (1, 1, 3, 0, 4):
        found.pages += [random.randrange(100) for _ in range(count)]
        row = found.page_table(9)
        assert row.dtype == "int32" and row.tolist() == expected(found.pages, 9)


def test_it_starts_again_with_other_pages() -> None:
    found = request()
    found.pages += [5, 6, 7]
    assert found.page_table(4).tolist() == [5, 6, 7, -1]
    found.pages = []
    assert found.page_table(4).tolist() == [-1] * 4
    found.pages = [3, 6, 1, 2]
    assert found.page_table(4).tolist() == [3, 6, 1, 2]
    del found.pages[2:]
    assert found.page_table(4).tolist() == [3, 6, -1, -1]
