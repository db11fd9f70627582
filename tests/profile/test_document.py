"""The document: schema, JSON, files, what damage is called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.errors import ProfileError
from dflash_graph.profile.document import SCHEMA, VERSION, Profile, json_schema
from dflash_graph.profile.parts import NodeProfile, Samples
from dflash_graph.profile_store import require_place, update

Spoil = Callable[[dict[str, Any]], None]


def test_json_is_the_whole_document(timed_profile: Profile) -> None:
    text = timed_profile.to_json()
    assert Profile.parse(text) == timed_profile
    assert json.loads(text) == timed_profile.model_dump(mode="json")


def test_entries_of_a_list_stand_on_lines_of_their_own(timed_profile: Profile) -> None:
    lines = timed_profile.to_json().splitlines()
    buffer = timed_profile.executors[0].plan.buffers[0]
    own = [one for one in lines if f'"name": "{buffer.name}", "values"' in one]
    assert json.loads(own[0].strip().rstrip(","))["nbytes"] == buffer.nbytes
    stages = [one for one in lines if '"seconds"' in one and '"name"' in one]
    assert len(stages) == len(timed_profile.startup)


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a JSON value is as a schema says: the keywords that ours uses."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(conforms(value, one, root) for one in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        if not isinstance(value, dict) or set(schema.get("required", ())) - value.keys():
            return False
        named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(
            conforms(part, named[name], root)
            if name in named
            else other is True or (isinstance(other, dict) and conforms(part, other, root))
            for name, part in value.items()
        )
    if kind == "array":
        return isinstance(value, list) and all(
            conforms(one, schema["items"], root) for one in value
        )
    kinds: dict[str | None, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
        None: (object,),
    }
    return isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool))


def test_the_published_schema_describes_documents(timed_profile: Profile) -> None:
    schema = json_schema()
    document = timed_profile.model_dump(mode="json")
    assert schema["$id"] == f"{SCHEMA}.v{VERSION}"
    assert conforms(document, schema, schema)
    node = document["executors"][0]["segments"][0]["nodes"][0]
    node["bound"] = "luck"
    assert not conforms(document, schema, schema)
    node["bound"] = "memory"
    node["floor_us"] = "fast"
    assert not conforms(document, schema, schema)
    node["floor_us"] = 1.0
    del document["identity"]
    assert not conforms(document, schema, schema)


def drop_identity(document: dict[str, Any]) -> None:
    del document["identity"]


def other_version(document: dict[str, Any]) -> None:
    document["schema_version"] = VERSION + 1


def other_schema(document: dict[str, Any]) -> None:
    document["schema_name"] = "something else"


def unknown_field(document: dict[str, Any]) -> None:
    document["ceiling"]["colour"] = "red"


def no_samples(document: dict[str, Any]) -> None:
    document["executors"][0]["measured"]["values"] = []


def put(*path: str | int, value: Any) -> Spoil:
    """Puts a value at a place of a document."""

    def spoil(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = value

    return spoil


EXECUTOR = ("executors", 0)
NODE = (*EXECUTOR, "segments", 0, "nodes", 0)
BUFFER = (*EXECUTOR, "plan", "buffers", 0)

DAMAGE: dict[str, tuple[Spoil, str]] = {
    "a part is missing": (drop_identity, "identity"),
    "of a later version": (other_version, f"version {VERSION + 1}"),
    "of another schema": (other_schema, "something else"),
    "an unknown field": (unknown_field, "ceiling.colour"),
    "a measurement of nothing": (no_samples, "executors.0.measured.values"),
    "no executors": (put("executors", value=[]), "executors: "),
    "a target of text": (put("identity", "geometry", "target", value="x"), "geometry: .*target"),
    "a vocabulary of lists": (put("identity", "geometry", "emitted_vocab", value=[]), "vocabular"),
    "a ceiling beyond floats": (put("ceiling", "read_tb_per_s", value=1e300), "read_tb_per_s"),
    "rounds of no time": (put(*EXECUTOR, "measured", "values", value=[0.0]), "rounds above 0"),
    "a round before its start": (put(*EXECUTOR, "measured", "values", value=[-1.0]), "values.0"),
    "a time without inverse": (put(*NODE, "floor_us", value=1e-320), "floor_us: .*1e-30"),
    "a time without end": (put(*NODE, "floor_us", value=1e300), "floor_us"),
    "huge bytes of a node": (put(*NODE, "read_bytes", value=10**400), "read_bytes"),
    "huge bytes of memory": (put("memory", 0, "planned_bytes", value=1 << 63), "planned_bytes"),
    "negative bytes": (put(*NODE, "write_bytes", value=-1), "write_bytes"),
    "a life past the steps": (put(*BUFFER, "last", value=10**6), "plan: .*first <= last < "),
    "a life before the steps": (put(*BUFFER, "first", value=-1), "buffers.0.first"),
    "a life that ends first": (
        put(
            *EXECUTOR,
            "plan",
            "buffers",
            value=[{"name": "x", "values": ["x"], "offset": 0, "nbytes": 0, "first": 1, "last": 0}],
        ),
        "buffer 'x': expected first <= last",
    ),
    "a buffer past the arena": (put(*BUFFER, "offset", value=1 << 62), "plan: .*the arena"),
    "a segment past the steps": (
        put(*EXECUTOR, "plan", "boundaries", value=[0, 10**6]),
        "plan: .*boundaries in 0",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(timed_profile: Profile, spoil: Spoil, words: str) -> None:
    document = timed_profile.model_dump(mode="json")
    spoil(document)
    with pytest.raises(ProfileError, match=words) as raised:
        Profile.parse(json.dumps(document), "some.json")
    assert str(raised.value).startswith("some.json: ") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lowering": None}, "expected lowering, a text, got None"),
        ({"draft_tokens": "7"}, r"expected draft_tokens in 0\.\.15, got '7'"),
        ({"draft_tokens": 16}, r"expected draft_tokens in 0\.\.15, got 16"),
        ({"max_batch": 0}, "expected max_batch, 1 or more, got 0"),
    ],
)
def test_a_file_has_the_options_that_commands_read(
    demo_profile: Profile, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "some.json"
    document = demo_profile.model_dump(mode="json")
    document["identity"]["options"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=rf"some\.json: identity\.options: {words}"):
        Profile.load(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "\x00\x01", '{"schema_name": 3}', "[" * 100_000],
    ids=["empty", "torn", "list", "null", "bytes", "another", "deep"],
)
def test_what_is_no_profile(text: str) -> None:
    with pytest.raises(ProfileError):
        Profile.parse(text)


def test_a_file_survives_and_is_replaced_whole(demo_profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    demo_profile.save(path)
    first = path.read_text()
    demo_profile.model_copy(update={"startup": ()}).save(path)
    assert Profile.load(path) == demo_profile and path.read_text() == first
    assert [found.name for found in tmp_path.iterdir()] == ["profile.json"]


def test_a_failed_save_leaves_the_old_file(
    demo_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    demo_profile.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ProfileError, match="No space left"):
        demo_profile.model_copy(update={"memory": ()}).save(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["profile.json"]


def test_a_link_stays_one_and_a_pipe_is_written_to(demo_profile: Profile, tmp_path: Path) -> None:
    """To replace what a name leads to would take a device node, or a repository's file, away."""
    (tmp_path / "kept").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "kept" / "target.json"
    link.symlink_to(target)
    demo_profile.save(link)
    assert link.is_symlink() and Profile.load(target) == demo_profile
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(pipe.read_text)
        demo_profile.save(pipe)
        assert text.result(60) == demo_profile.to_json()
    assert pipe.is_fifo()
    with pytest.raises(ProfileError, match="no regular file"):
        update(pipe, lambda document: {})
    assert sorted(found.name for found in tmp_path.iterdir()) == ["kept", "link.json", "pipe"]


def test_a_place_is_tried_before_the_work(tmp_path: Path) -> None:
    for path in (tmp_path / "new.json", Path("/dev/null"), Path("new.json")):
        require_place(path)
    for path in (tmp_path, Path(""), tmp_path / "nothing" / "new.json"):
        with pytest.raises(ProfileError, match="expected a place to write"):
            require_place(path)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_used(demo_profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"missing\.json"):
        Profile.load(tmp_path / "missing.json")
    with pytest.raises(ProfileError, match="expected a profile"):
        Profile.load(tmp_path)
    with pytest.raises(ProfileError, match="expected a place to write"):
        demo_profile.save(tmp_path / "nothing" / "profile.json")
    torn = tmp_path / "torn.json"
    torn.write_text(demo_profile.to_json()[:-500])
    with pytest.raises(ProfileError, match=r"torn\.json: expected a profile's JSON"):
        Profile.load(torn)


def test_totals_reconcile(timed_profile: Profile) -> None:
    executor = timed_profile.executor("round B=1")
    assert executor.measured is not None and executor.attributed_us is not None
    assert executor.unattributed_us is not None
    whole = executor.attributed_us + executor.unattributed_us
    assert whole == pytest.approx(executor.measured.median)
    shares = sum(map(executor.fraction, executor.nodes()))
    assert shares == pytest.approx(executor.attributed_us / executor.measured.median)


def test_shares_are_those_of_floors_where_nothing_is_timed(demo_profile: Profile) -> None:
    executor = demo_profile.executors[0]
    assert executor.unattributed_us is None and executor.attributed_us is None
    assert sum(map(executor.fraction, executor.nodes())) == pytest.approx(1)


def test_unknown_executors_list_those_that_exist(demo_profile: Profile) -> None:
    with pytest.raises(ProfileError, match=r"'round B=1'.*got 'round B=9'"):
        demo_profile.executor("round B=9")


@pytest.mark.parametrize(
    ("values", "median", "spread"),
    [
        ((3.0,), 3.0, 0.0),
        ((1.0, 3.0), 2.0, 1.0),
        ((5.0, 1.0, 3.0), 3.0, 2.0),
        ((4.0, 1.0, 2.0, 3.0), 2.5, 1.0),
    ],
)
def test_samples(values: tuple[float, ...], median: float, spread: float) -> None:
    samples = Samples(values=values)
    assert (samples.median, samples.spread) == (median, spread)


def test_parts_are_frozen(one_node: NodeProfile) -> None:
    with pytest.raises(ValueError, match="frozen"):
        one_node.op = "other"  # type: ignore[misc]
