"""Profiles of choices: what is read, what is refused, and that shipped ones fit their kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.choices import (
    SCHEMA,
    Choice,
    Choices,
    Entry,
    choices_document,
    choices_for,
    entry_document,
    layered,
    parse_choices,
    shipped_choices,
)
from dflash_graph.errors import ProfileError
from dflash_graph.kernels import ROW_BUCKETS, default_choice, kernel_case, shipped_cases
from dflash_graph.op import Sizes
from dflash_graph.rendering import render
from dflash_graph.tensor import TensorSpec

TILES = default_choice("linear", Sizes(O=19, I=45, B=1, W=3), "float32").tiles


def document(**changes: Any) -> dict[str, Any]:
    entry = {
        "op": "linear",
        "dtype": "float32",
        "sizes": {"O": 19, "I": 45},
        "tiles": {**TILES, "BLOCK_O": 64},
        "num_warps": 8,
        "num_stages": {"16": 4, "64": 3},
    }
    device = {"name": "A device", "capability": 90}
    made = {"schema": SCHEMA, "device": device, "pdl": True, "choices": [entry]}
    return {**made, **changes}


def parsed(**changes: Any) -> Choices:
    return parse_choices(json.dumps(document(**changes)), "a.json")


def test_a_profile_is_read() -> None:
    found = parsed()
    assert (found.device, found.capability, found.pdl, found.source) == (
        "A device",
        90,
        True,
        "a.json",
    )
    (entry,) = found.entries
    assert (entry.op, entry.dtype, entry.sizes) == ("linear", "float32", {"O": 19, "I": 45})
    assert entry.num_stages == {16: 4, 64: 3}


@pytest.mark.parametrize(("rows", "stages"), [(16, 4), (32, 3), (64, 3), (128, 2)])
def test_stages_follow_the_nearest_row_tile(rows: int, stages: int) -> None:
    found = parsed().find("linear", Sizes(O=19, I=45, B=1, W=3), "float32", rows)
    assert found == Choice({**TILES, "BLOCK_O": 64}, 8, stages, pdl=True)


def wide(**changes: Any) -> dict[str, Any]:
    """An entry that may vary: a product on tensor cores."""
    entry = {**document()["choices"][0], "dtype": "bfloat16"}
    return {**entry, "tiles": {**TILES, "BLOCK_O": 128}, **changes}


def test_a_row_tile_may_have_tiles_and_warps_of_its_own() -> None:
    own = {
        "64": {"tiles": {"BLOCK_O": 64}, "num_warps": 2},
        "32": {"tiles": {"TRIGGER": 0, "HALVES": 1}},
    }
    found = parsed(choices=[wide(variations=own)])
    sizes, common = Sizes(O=19, I=45), {**TILES, "BLOCK_O": 128}
    expected = {
        16: Choice(common, 8, 4, pdl=True),
        32: Choice({**common, "TRIGGER": 0, "HALVES": 1}, 8, 3, pdl=True),
        64: Choice({**common, "BLOCK_O": 64}, 2, 3, pdl=True),
        128: Choice(common, 8, 1, pdl=True),
    }
    for rows, choice in expected.items():
        assert found.find("linear", sizes, "bfloat16", rows) == choice, rows
    (entry,) = found.entries
    assert entry_document(entry)["variations"] == {
        "32": {"tiles": {"HALVES": 1, "TRIGGER": 0}},
        "64": {"tiles": {"BLOCK_O": 64}, "num_warps": 2},
    }
    again = parse_choices(json.dumps(choices_document(found)), "a.json")
    assert again == found


@pytest.mark.parametrize(
    ("entry", "tiles"),
    [
        (wide(), {"SPLIT": 2}),
        (wide(), {"BLOCK_O": 32}),
        (wide(tiles={**TILES, "BLOCK_O": 64}), {"HALVES": 1}),
        (wide(tiles={**TILES, "BLOCK_O": 32}), {"BLOCK_O": 64}),
        (wide(tiles={"WORKERS": 16}), {"TRIGGER": 0}),
        (wide(dtype="float32"), {"BLOCK_I": 64}),
    ],
)
def test_a_variation_that_changes_bits_is_refused(entry: Any, tiles: dict[str, int]) -> None:
    given = {**entry, "variations": {"64": {"tiles": tiles}}}
    with pytest.raises(ProfileError, match=r"a.json: linear: row tile 64: expected variations of"):
        parsed(choices=[given])


@pytest.mark.parametrize("own", [{"64": {}}, {"few": {"tiles": {}}}, {"64": 3}, [1]])
def test_a_damaged_variation_is_refused(own: Any) -> None:
    entry = {**document()["choices"][0], "variations": own}
    with pytest.raises(ProfileError, match=r"a.json: expected a profile of choices"):
        parsed(choices=[entry])


@pytest.mark.parametrize(
    ("op", "sizes", "dtype"),
    [
        ("linear", {"O": 19, "I": 46}, "float32"),
        ("linear", {"O": 19}, "float32"),
        ("linear", {"O": 19, "I": 45}, "bfloat16"),
        ("linear_norm", {"O": 19, "I": 45}, "float32"),
    ],
)
def test_only_the_call_that_was_measured_is_found(op: str, sizes: Any, dtype: str) -> None:
    assert parsed().find(op, Sizes(sizes), dtype, 16) is None


def test_one_node_may_differ_from_its_profile() -> None:
    entry = {**document()["choices"][0], "pdl": False}
    found = parsed(choices=[entry])
    assert found.pdl
    choice = found.find("linear", Sizes(O=19, I=45), "float32", 16)
    assert choice is not None and not choice.pdl


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json: expected a profile of choices, got JSONDecodeError"),
        ("[]", "a.json: expected a profile of choices, got TypeError"),
        ("[" * 100_000, "a.json: expected a profile of choices, got RecursionError"),
        ("{}", r"a.json: expected a profile of choices, got KeyError\('schema'\)"),
        ('{"schema": 0}', f"a.json: expected schema {SCHEMA}, got 0"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_choices(text, "a.json")


@pytest.mark.parametrize("field", ["device", "pdl", "choices"])
def test_a_missing_field_is_named(field: str) -> None:
    given = document()
    del given[field]
    with pytest.raises(ProfileError, match=f"a.json: expected .*KeyError.*'{field}'"):
        parse_choices(json.dumps(given), "a.json")


@pytest.mark.parametrize("field", ["op", "dtype", "sizes", "tiles", "num_warps", "num_stages"])
def test_a_missing_field_of_an_entry_is_named(field: str) -> None:
    entry = document()["choices"][0]
    del entry[field]
    with pytest.raises(ProfileError, match=f"a.json: expected .*KeyError.*'{field}'"):
        parsed(choices=[entry])


def test_row_tiles_are_numbers() -> None:
    entry = {**document()["choices"][0], "num_stages": {"few": 3}}
    with pytest.raises(ProfileError, match=r"a.json: expected .*invalid literal"):
        parsed(choices=[entry])


def test_stages_of_no_row_tile_are_refused() -> None:
    entry = {**document()["choices"][0], "num_stages": {}}
    with pytest.raises(ProfileError, match=r"a.json: expected .*num_stages is empty"):
        parsed(choices=[entry])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("op", 3, "op: expected a text, got 3"),
        ("dtype", None, "linear: dtype: expected a text"),
        ("sizes", [["O", 19]], "linear: sizes: expected an object"),
        ("tiles", [["BLOCK_O", 64]], "linear: tiles: expected an object"),
        ("tiles", {"BLOCK_O": "64"}, "linear: tiles.BLOCK_O: expected 0 or more, got '64'"),
        ("tiles", {"BLOCK_O": -1}, "linear: tiles.BLOCK_O: expected 0 or more, got -1"),
        ("tiles", {"BLOCK_O": True}, "linear: tiles.BLOCK_O: expected 0 or more, got True"),
        ("num_warps", 3, "linear: num_warps: expected one of 1, 2, 4, 8, 16, got 3"),
        ("num_warps", "8", "linear: num_warps: expected one of 1, 2, 4, 8, 16, got '8'"),
        ("num_warps", True, "linear: num_warps: expected one of"),
        ("num_stages", {"0": 3}, "linear: num_stages: expected row tiles of 1 and more, got 0"),
        ("num_stages", {"16": 0}, "linear: num_stages.16: expected 1 or more, got 0"),
        ("num_stages", {"16": "3"}, "linear: num_stages.16: expected 1 or more, got '3'"),
        ("num_stages", [16], "expected a profile of choices, got AttributeError"),
        ("pdl", 1, "linear: pdl: expected true or false, got 1"),
        ("template", 7, "linear: template: expected a hash, got 7"),
        ("versions", {"torch": 2.0}, "linear: versions.torch: expected a text, got 2.0"),
        ("evidence", [], "linear: evidence: expected an object"),
        ("evidence", {"margin": "0.1"}, "linear: evidence.margin: expected a number"),
        ("evidence", {"winner_us": 10**400}, "linear: evidence.winner_us: expected a number"),
        ("evidence", {"lead": float("inf")}, "Infinity is no finite number"),
        ("variations", {"0": {"tiles": {}}}, "variations.0: expected row tiles of 1 and more"),
        ("variations", {"64": {"tiles": {"TRIGGER": 0.5}}}, "variations.64.tiles.TRIGGER: expect"),
        ("variations", {"64": {"tiles": {}, "num_warps": 5}}, "variations.64.num_warps: expected"),
        ("variations", {"64": {"tiles": {}, "warps": 4}}, "of num_warps, tiles, got warps"),
        ("numwarps", 8, "linear: expected fields of .*num_warps.*, got numwarps"),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=f"^a.json: .*{message}") as raised:
        parsed(choices=[wide(**{field: value})])
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": {"name": 3, "capability": 90}}, "device.name: expected a text, got 3"),
        ({"device": {"name": "a", "capability": "90"}}, "capability: expected such as 90, got '90"),
        ({"device": {"name": "a", "capability": 0}}, "capability: expected such as 90, got 0"),
        ({"pdl": "yes"}, "pdl: expected true or false, got 'yes'"),
        ({"measured": [{"round_us": float("nan")}]}, "NaN is no finite number"),
    ],
)
def test_what_a_profile_says_of_all_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=f"^a.json: .*{message}"):
        parsed(**changes)


def test_what_an_entry_may_leave_out_is_not_known() -> None:
    (entry,) = parsed().entries
    assert (entry.template, entry.versions, entry.evidence) == (None, {}, {})
    assert entry.source == "a.json"
    full = {**document()["choices"][0], "template": "0f", "evidence": {"margin": 0.1}}
    (entry,) = parsed(choices=[full], versions={"torch": "2.0"}).entries
    assert (entry.template, entry.versions, entry.evidence) == (
        "0f",
        {"torch": "2.0"},
        {"margin": 0.1},
    )
    own = {**full, "versions": {"torch": "3.0"}}
    (entry,) = parsed(choices=[own], versions={"torch": "2.0", "triton": "3.6"}).entries
    assert entry.versions == {"torch": "3.0"}
    assert entry_document(entry) == own


def test_a_document_is_read_as_what_was_written() -> None:
    found = parsed()
    again = parse_choices(json.dumps(choices_document(found)), "a.json")
    assert again == found


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({}, False),
        ({"tiles": {}, "num_warps": 1, "num_stages": {"16": 1}}, False),
        ({"op": "linear_norm"}, True),
        ({"dtype": "bfloat16"}, True),
        ({"sizes": {"O": 19, "I": 46}}, True),
        ({"sizes": {"O": 19}}, True),
    ],
)
def test_a_key_is_op_dtype_and_sizes(changes: dict[str, Any], is_other: bool) -> None:
    (first,) = parsed().entries
    (second,) = parsed(choices=[{**document()["choices"][0], **changes}]).entries
    assert (first.key != second.key) is is_other


def test_earlier_layers_go_first() -> None:
    base = document()["choices"][0]
    other = {**base, "sizes": {"O": 7, "I": 45}, "num_warps": 2}
    first = parsed(choices=[base], pdl=False)
    second = parse_choices(
        json.dumps(document(choices=[{**base, "num_warps": 1}, other])), "b.json"
    )
    found = layered("A device", 90, [first, second])
    assert (found.source, found.pdl) == ("a.json, b.json", False)
    choice = found.find("linear", Sizes(O=19, I=45), "float32", 16)
    assert choice is not None and (choice.num_warps, choice.pdl) == (8, False)
    choice = found.find("linear", Sizes(O=7, I=45), "float32", 16)
    assert choice is not None and (choice.num_warps, choice.pdl) == (2, True)
    entry = found.entry("linear", Sizes(O=7, I=45), "float32")
    assert entry is not None and entry.source == "b.json"
    assert layered("A device", 90, []) == Choices("A device", 90)


def test_a_kernel_takes_what_its_device_measured() -> None:
    specs = {"x": TensorSpec((1, 3, 45), "float32"), "weight": TensorSpec((19, 45), "float32")}
    case = kernel_case("linear", specs, {"tiled": True}, choices=parsed())
    assert case is not None
    assert (dict(case.holes)["BLOCK_O"], case.num_warps, case.num_stages) == (64, 8, 4)
    assert dict(case.holes)["pdl"] is True
    other = {**specs, "weight": TensorSpec((20, 45), "float32")}
    case = kernel_case("linear", other, {"tiled": True}, choices=parsed())
    default = kernel_case("linear", other, {"tiled": True})
    assert case is not None and default is not None
    assert dict(case.holes) == {**dict(default.holes), "pdl": True}
    assert (case.num_warps, case.num_stages) == (default.num_warps, default.num_stages)


def test_another_device_has_the_defaults() -> None:
    for found in shipped_choices():
        assert choices_for(found.device, found.capability) is found
        assert choices_for(found.device, found.capability + 1).entries == ()
    found = choices_for("Another device", 120)
    assert (found.device, found.capability, found.entries, found.pdl) == (
        "Another device",
        120,
        (),
        False,
    )


@pytest.fixture
def profiles() -> tuple[Choices, ...]:
    found = shipped_choices()
    assert found
    return found


def test_shipped_profiles_name_a_device_each(profiles: tuple[Choices, ...]) -> None:
    assert len({(found.device, found.capability) for found in profiles}) == len(profiles)
    for found in profiles:
        assert found.source.endswith(".json")
        assert found.capability >= 90 or not (found.pdl or any(e.pdl for e in found.entries))


def test_shipped_choices_are_those_of_kernels_that_ship(
    profiles: tuple[Choices, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each entry is what some node of a preset runs with, and its template takes the values."""
    used: set[int] = set()

    def noted(find: Callable[..., bool]) -> Callable[..., bool]:
        def fits(self: Entry, *given: Any) -> bool:
            found = find(self, *given)
            if found:
                used.add(id(self))
            return found

        return fits

    monkeypatch.setattr(Entry, "fits", noted(Entry.fits))
    for found in profiles:
        cases = shipped_cases(found)
        for case in cases:
            render(case.template, dict(case.holes), cache_dir=tmp_path)
            assert case.num_warps in (1, 2, 4, 8, 16) and case.num_stages >= 1
        for entry in found.entries:
            assert id(entry) in used, f"{found.source}: no preset has {entry}"
            assert set(entry.num_stages) <= set(ROW_BUCKETS)
            assert set(entry.variations) <= set(ROW_BUCKETS)
        assert len({str((e.op, e.dtype, sorted(e.sizes.items()))) for e in found.entries}) == len(
            found.entries
        )


@pytest.mark.parametrize(
    ("block", "own", "stages", "expected"),
    [
        (128, {}, {"64": 4}, 3),  # 4 (128 + 64) / (128 + 128)
        (64, {}, {"16": 6, "64": 4}, 2),
        (64, {"64": {"tiles": {"BLOCK_O": 128}}}, {"64": 4}, 4),
        (64, {"128": {"tiles": {"BLOCK_O": 128}}}, {"64": 4}, 2),
        (128, {}, {"16": 1}, 1),
        (128, {}, {"64": 4, "128": 4}, 4),  # measured
        (None, {}, {"16": 2}, 2),  # no product: a stage does not follow the rows
    ],
)
def test_stages_of_a_row_tile_that_was_not_measured(
    block: int | None, own: dict[str, Any], stages: dict[str, int], expected: int
) -> None:
    """No more shared memory than the largest that was measured takes."""
    tiles = {"WORKERS": 8} if block is None else {"BLOCK_O": block}
    entry = {**document()["choices"][0], "dtype": "bfloat16", "tiles": tiles}
    (found,) = parsed(choices=[{**entry, "num_stages": stages, "variations": own}]).entries
    assert found.choice(128).num_stages == expected
    assert found.choice(16).num_stages == next(iter(stages.values()))
