"""Choices moved one at a time: which moves there are, and which of them stay."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dflash_graph.choices import Choices, Entry, Variation, choices_document, parse_choices
from dflash_graph.kernels import row_bucket
from dflash_graph.profile_store import document_text

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "refine.py"
TILES = {"BLOCK_O": 64, "BLOCK_I": 128, "SPLIT": 1, "TRIGGER": 1, "PREFETCH": 256}


@pytest.fixture(scope="module")
def refine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refine", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["refine"] = module
    spec.loader.exec_module(module)
    return module


def entry(op: str = "linear", dtype: str = "bfloat16", **tiles: int) -> Entry:
    return Entry(op, dtype, {"O": 256}, {**TILES, **tiles}, 4, {16: 3, 64: 2})


def test_moves_change_one_row_tile_and_leave_sums_alone(refine: ModuleType) -> None:
    base = entry()
    found = dict(refine.moves(base, 64))
    assert {"1 stages", "3 stages", "4 stages", "8 warps", "TRIGGER = 2", "BLOCK_I = 64"} <= set(
        found
    )
    assert found["BLOCK_I = 64, 4 stages"].choice(64).num_stages == 4
    assert not any("= 64" in name and "BLOCK_O" in name for name in found)  # as it is
    for name, made in found.items():
        assert made.choice(64) != base.choice(64), name
        assert made.choice(16) == base.choice(16), name
        assert made.key == base.key
        # What is written can be read again: variations that order sums anew are refused there.
        text = document_text(choices_document(Choices("a device", 90, (made,))))
        assert parse_choices(text, "there").entries[0].choice(64) == made.choice(64)


def test_tiles_that_order_sums_only_move_in_stages(refine: ModuleType) -> None:
    for fixed in (entry(dtype="float32"), entry(BLOCK_O=32)):
        assert [name for name, _ in refine.moves(fixed, 16)] == ["2 stages", "4 stages", "5 stages"]


def test_what_is_faster_stays_and_is_moved_on(refine: ModuleType) -> None:
    """The best place of either entry is reached, no move is tried twice."""
    choices = Choices("a device", 90, (entry("linear"), entry("gdn_project")))
    names: list[str] = []

    def cost(found: Choices) -> float:
        total = 0.0
        for held in found.entries:
            now = held.choice(16)
            total += abs(now.num_stages - 6) + abs(now.tiles["TRIGGER"] - 2)
            total += now.num_warps / 4
        return total

    best = [cost(choices)]

    def is_faster(name: str, found: Choices) -> bool:
        names.append(name)
        if stays := cost(found) < best[-1]:
            best.append(cost(found))
        return stays

    made = refine.descend(choices, 16, ["gdn_project", "linear"], is_faster, lambda: True)
    assert best[-1] == 2.0 and len(best) == 1 + 2 * (3 + 1)
    assert names[0].startswith("gdn_project bfloat16 O=256: ")
    for held in made.entries:
        assert held.num_stages == {16: 6, 64: 2}
        assert held.variations == {16: Variation({"TRIGGER": 2}, None)}


def test_only_ops_that_are_named_move_and_time_ends(refine: ModuleType) -> None:
    choices = Choices("a device", 90, (entry("linear"), entry("gdn_project")))
    names: list[str] = []

    def never(name: str, _: Choices) -> bool:
        names.append(name)
        return False

    assert refine.descend(choices, 16, ["linear"], never, lambda: True) is choices
    assert len(names) == len(list(refine.moves(choices.entries[0], 16)))
    assert all(name.startswith("linear ") for name in names)
    names.clear()
    refine.descend(choices, 16, [], never, lambda: len(names) < 3)
    assert len(names) == 3


@pytest.mark.parametrize(("text", "expected"), [("200s", 200.0), ("10m", 600.0), ("1h", 3600.0)])
def test_budgets(refine: ModuleType, text: str, expected: float) -> None:
    assert refine.seconds(text) == expected and row_bucket(8) == 16
