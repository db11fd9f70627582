"""The store: order of look-up, what excludes an entry, and files that survive their writers."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_graph import profile_store, rounds
from dflash_graph.choices import Entry, choices_for, parse_choices, shipped_choices
from dflash_graph.errors import OptionError, ProfileError
from dflash_graph.op import Sizes
from dflash_graph.profile_store import (
    Identity,
    differences,
    document_text,
    file_name,
    find_layers,
    lookup,
    read_profile,
    save,
    template_hash,
    update,
    user_file,
)

MakeEntry = Callable[..., Entry]

#: Saves entries one by one: arguments are the file, a first number and a count.
WRITER = """
import sys
from dflash_graph.choices import Entry
from dflash_graph.profile_store import Identity, save
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
number = 0
while count < 0 or number < count:
    size = first + number % 1000
    entry = Entry("linear", "bfloat16", {"O": size, "I": 32}, {"BLOCK_O": 64}, 4, {16: 3})
    save(path, Identity("A Device 1", 90, {}), [entry])
    number += 1
"""


def writer(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def outputs(path: Path) -> set[int]:
    return {entry.sizes["O"] for entry in read_profile(path).entries}


def warps(identity: Identity, explicit: Path | None = None) -> int | None:
    found = lookup(identity, explicit).find("linear", Sizes(O=64, I=32), "bfloat16", 16)
    return found and found.num_warps


# ---------------------------------------------------------------- order


def test_an_explicit_file_goes_before_the_users_and_that_before_what_ships(
    identity: Identity, entry: MakeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warps(identity) is None
    shipped = tmp_path / "shipped.json"
    save(shipped, identity, [entry(num_warps=1)])
    monkeypatch.setattr(profile_store, "shipped_choices", lambda: (read_profile(shipped),))
    assert warps(identity) == 1
    save(user_file(identity.device, 90), identity, [entry(num_warps=2)])
    assert warps(identity) == 2
    explicit = tmp_path / "mine.json"
    save(explicit, identity, [entry(num_warps=8)])
    assert warps(identity, explicit) == 8
    assert warps(identity) == 2
    layers = find_layers(identity.device, 90, explicit)
    assert [layer.name for layer in layers] == ["explicit", "user", "shipped"]


def test_layers_fill_what_earlier_ones_lack(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    explicit = tmp_path / "mine.json"
    save(explicit, identity, [entry(outputs=64, num_warps=8)], pdl=True)
    save(user_file(identity.device, 90), identity, [entry(outputs=128, num_warps=2)])
    found = lookup(identity, explicit)
    of_user = found.find("linear", Sizes(O=128, I=32), "bfloat16", 16)
    of_explicit = found.find("linear", Sizes(O=64, I=32), "bfloat16", 16)
    assert of_user is not None and (of_user.num_warps, of_user.pdl) == (2, False)
    assert of_explicit is not None and (of_explicit.num_warps, of_explicit.pdl) == (8, True)
    assert found.pdl
    located = found.entry("linear", Sizes(O=128, I=32), "bfloat16")
    assert located is not None and located.source == str(user_file(identity.device, 90))


def test_what_ships_is_found_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Entries without a template's hash are used, others are of the templates that ship."""
    for shipped in shipped_choices():
        found = lookup(Identity(shipped.device, shipped.capability, {"torch": "0.0"}))
        assert [e.key for e in found.entries] == [e.key for e in shipped.entries]
        assert all(e.template in (None, template_hash(e.op)) for e in shipped.entries)
        assert "torch: measured with" in caplog.text
        assert found.pdl is choices_for(shipped.device, shipped.capability).pdl


def test_a_device_without_profiles_has_none(identity: Identity) -> None:
    found = lookup(identity)
    assert (found.entries, found.source, found.pdl) == ((), "default", False)
    assert not profile_store.user_folder().exists()


def test_an_explicit_file_must_be_there(identity: Identity, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent.json: expected a profile .*, got no file"):
        lookup(identity, tmp_path / "absent.json")


def test_the_folder_is_the_variable_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_store.user_folder() == Path(os.environ[profile_store.VARIABLE])
    monkeypatch.delenv(profile_store.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/a/config")
    if sys.platform == "linux":
        assert profile_store.user_folder() == Path("/a/config/dflash_graph/profiles")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "nvidia-h200-sm90.json"),
        ("../A/B", "a-b-sm90.json"),
        ("", "device-sm90.json"),
    ],
)
def test_a_files_name_is_made_of_the_devices(device: str, name: str) -> None:
    assert file_name(device, 90) == name


# ---------------------------------------------------------------- identity


def test_another_template_excludes_an_entry_and_says_so(
    identity: Identity, entry: MakeEntry, caplog: pytest.LogCaptureFixture
) -> None:
    save(user_file(identity.device, 90), identity, [entry(template="0123456789abcdef")])
    assert warps(identity) is None
    assert "linear bfloat16 I=32 O=64: template: measured with 0123456789abcdef, here " in (
        caplog.text
    )
    assert "defaults are used instead" in caplog.text


def test_an_entry_that_no_template_takes_is_excluded(entry: MakeEntry, identity: Identity) -> None:
    tiles = {"BLOCK_O": 63, "BLOCK_Z": 4}
    found = differences(entry(template=None, tiles=tiles), identity)
    assert [(d.field, d.excludes) for d in found] == [
        ("tile BLOCK_O", True),
        ("tile BLOCK_Z", True),
    ]
    (found_op,) = differences(entry(op="no_op"), identity)
    assert (found_op.field, found_op.excludes) == ("op", True)


@pytest.mark.parametrize("name", profile_store.VERSIONS)
def test_another_version_is_said_once_and_used(
    name: str, identity: Identity, entry: MakeEntry, caplog: pytest.LogCaptureFixture
) -> None:
    versions = {**identity.versions, name: "0.0"}
    entries = [entry(versions=versions), entry(versions=versions, outputs=128)]
    save(user_file(identity.device, 90), identity, entries)
    for _ in range(2):
        assert warps(identity) == 4
    (said,) = (r.getMessage() for r in caplog.records)
    assert f"{name}: measured with 0.0, here {identity.versions[name]}" in said


def test_what_is_not_known_does_not_differ(identity: Identity, entry: MakeEntry) -> None:
    assert differences(entry(versions={}, template=None), identity) == ()
    assert differences(entry(), Identity(identity.device, 90, {})) == ()


@pytest.mark.parametrize(
    ("here", "field"),
    [(Identity("Another", 90), "device name"), (Identity("A Device 1", 120), "device capability")],
)
def test_another_device_is_named_and_not_used(
    here: Identity,
    field: str,
    identity: Identity,
    entry: MakeEntry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "mine.json"
    save(path, identity, [entry()])
    assert lookup(here, path).entries == ()
    assert f"mine.json: {field}: measured with" in caplog.text
    with pytest.raises(ProfileError, match=rf"mine.json: expected a profile of {field}"):
        save(path, here, [entry()])


@pytest.mark.parametrize(
    "changes", [{"outputs": 65}, {"inputs": 33}, {"dtype": "float32"}, {"op": "swiglu_linear"}]
)
def test_geometry_and_dtype_match_exactly(
    changes: dict[str, Any], identity: Identity, entry: MakeEntry
) -> None:
    save(user_file(identity.device, 90), identity, [entry(**changes)])
    assert warps(identity) is None


# ---------------------------------------------------------------- saving


def test_a_save_merges_by_key_and_keeps_what_it_does_not_know(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    save(path, identity, [entry(outputs=1), entry(outputs=2)], pdl=True)
    document = json.loads(path.read_text())
    document["measured"] = [{"round_us": 1.5}]
    path.write_text(json.dumps(document))
    save(path, identity, [entry(outputs=2, num_warps=8), entry(outputs=3)])
    found = read_profile(path)
    assert {(e.sizes["O"], e.num_warps) for e in found.entries} == {(1, 4), (2, 8), (3, 4)}
    assert found.pdl
    assert json.loads(path.read_text())["measured"] == [{"round_us": 1.5}]


def test_what_is_saved_is_what_is_read(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    made = entry(pdl=False, evidence={"margin": 0.1, "runner_up": {"tiles": {"BLOCK_O": 32}}})
    save(tmp_path / "a.json", identity, [made])
    assert read_profile(tmp_path / "a.json").entries == (made,)


def test_the_entry_that_says_more_is_found_first(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    few, many = entry(sizes={"I": 32}, num_warps=1), entry(sizes={"I": 32, "O": 64}, num_warps=2)
    save(tmp_path / "a.json", identity, [few, many])
    assert warps(identity, tmp_path / "a.json") == 2


def test_versions_of_a_file_stay_with_its_entries(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    save(path, identity, [entry(versions={})])
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "versions": {"torch": "1.0"}}))
    save(path, identity, [entry(outputs=128)])
    assert {e.sizes["O"]: e.versions["torch"] for e in read_profile(path).entries} == {
        64: "1.0",
        128: "2.13",
    }


def test_eight_writers_lose_nothing_while_a_reader_looks_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    writers = [writer(path, 1000 * n, 20) for n in range(8)]
    seen: set[int] = set()
    while any(process.poll() is None for process in writers):
        if path.exists():
            now = outputs(path)  # a torn file would raise
            assert now >= seen, "an entry was lost"
            seen = now
        time.sleep(0.002)
    assert [process.returncode for process in writers] == [0] * 8
    assert outputs(path) == {1000 * n + k for n in range(8) for k in range(20)}
    assert not list(tmp_path.glob("*.new")) and not list(tmp_path.glob(".*.new"))


def test_a_killed_writer_leaves_a_valid_file(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    save(path, identity, [entry(outputs=9_000_000)])
    for attempt in range(6):
        process = writer(path, 1000 * attempt, -1)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.037 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 9_000_000 in outputs(path)
    save(path, identity, [entry(outputs=9_000_001)])
    assert {9_000_000, 9_000_001} <= outputs(path)
    assert not list(tmp_path.glob(".*.new")), "what killed writers left is removed"


def test_a_crash_between_write_and_replace_leaves_the_old_file(
    identity: Identity, entry: MakeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    save(path, identity, [entry()])
    before = path.read_bytes()

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        save(path, identity, [entry(num_warps=8)])
    assert path.read_bytes() == before


def test_data_are_on_the_disk_before_the_name_is(
    identity: Identity, entry: MakeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *p: (done.append("replace"), replace(*p)))
    save(tmp_path / "a.json", identity, [entry()])
    assert done == ["fsync", "replace", "fsync"]


GOOD = {"schema": 1, "device": {"name": "A Device 1", "capability": 90}, "pdl": False}
DAMAGED = {
    "empty": b"",
    "truncated": json.dumps({**GOOD, "choices": []}).encode()[:40],
    "garbage": bytes(range(256)),
    "schema": json.dumps({**GOOD, "schema": 99, "choices": []}).encode(),
    "list": b"[1, 2]",
    "stages": json.dumps(
        {**GOOD, "choices": [{"op": "linear", "dtype": "float32", "sizes": {}, "tiles": {},
                              "num_warps": 4, "num_stages": {}}]}
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_a_miss_with_one_warning_and_healed(
    kind: str, identity: Identity, entry: MakeEntry, caplog: pytest.LogCaptureFixture
) -> None:
    path = user_file(identity.device, 90)
    path.parent.mkdir(parents=True)
    path.write_bytes(DAMAGED[kind])
    for _ in range(3):
        assert lookup(identity).entries == ()
    assert lookup(identity, path).entries == ()
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    save(path, identity, [entry()])
    assert warps(identity) == 4
    assert path.with_name(f"{path.name}.damaged").read_bytes() == DAMAGED[kind]
    assert len(caplog.records) == 1


def test_a_read_only_folder_is_read(identity: Identity, entry: MakeEntry) -> None:
    path = user_file(identity.device, 90)
    save(path, identity, [entry()])
    script = (
        "import os, sys, filelock\n"
        "from dflash_graph.profile_store import Identity, lookup, save\n"
        "here = Identity('A Device 1', 90, {})\n"
        "lookup(here)  # imports, before the interpreter's own files are out of reach\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(len(lookup(here).entries))\n"
        "try: save(sys.argv[1], here, lookup(here).entries)\n"
        "except Exception as error: print(type(error).__name__, '\\n' in str(error))\n"
    )
    for above in path.parents:  # pytest's folders are their owner's alone
        if Path(tempfile.gettempdir()) in above.parents:
            above.chmod(0o555 if above == path.parent else 0o755)
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": "/nonexistent"},
        )
    finally:
        path.parent.chmod(0o755)
    assert done.stdout.splitlines() == ["1", "ProfileError False"], done.stderr


def test_an_update_may_leave_a_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    update(path, lambda document: None)
    assert not path.exists()


def test_no_update_writes_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"a.json: expected schema"):
        update(tmp_path / "a.json", lambda document: {"schema": 7})
    assert not (tmp_path / "a.json").exists()


def test_a_folder_that_is_a_file_is_one_error(
    identity: Identity, entry: MakeEntry, folder: Path
) -> None:
    folder.write_text("")
    assert lookup(identity).entries == ()
    with pytest.raises(ProfileError, match=profile_store.VARIABLE):
        save(user_file(identity.device, 90), identity, [entry()])


def test_an_entry_takes_a_line_for_each_field(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    save(tmp_path / "a.json", identity, [entry()])
    text = (tmp_path / "a.json").read_text()
    assert '   "sizes": {"O": 64, "I": 32},\n' in text
    assert parse_choices(document_text(json.loads(text)), "again").entries == (entry(),)


def test_a_device_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(OptionError, match="expected a CUDA device, got none"):
        profile_store.device_identity()
    assert profile_store.running_versions()["torch"]


# ---------------------------------------------------------------- engines


def test_rounds_look_up_the_file_of_their_options(
    identity: Identity, entry: MakeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "device_identity", lambda: identity)
    save(user_file(identity.device, 90), identity, [entry(num_warps=2)])
    explicit = tmp_path / "mine.json"
    save(explicit, identity, [entry(num_warps=8)])
    for given, expected in ((None, 2), (explicit, 8)):
        found = rounds._device_choices(given).find("linear", Sizes(O=64, I=32), "bfloat16", 16)
        assert found is not None and found.num_warps == expected
    with pytest.raises(ProfileError, match="got no file"):
        rounds._device_choices(tmp_path / "absent.json")


#: Generates with a profile and prints what a kernel was chosen by, and the tokens.
GENERATE = """
import sys
import dflash_graph as dg
options = dg.EngineOptions(device="cuda", max_batch=2, max_context=256, profile=sys.argv[1])
with dg.Engine.demo(options) as engine:
    results = engine.generate([[5, 6, 7, 8], [9, 10, 11]], dg.SamplingParams(max_new_tokens=40))
    sampled = engine.generate([[5, 6, 7]], dg.SamplingParams(max_new_tokens=40, temperature=0.9))
print([result.token_ids for result in (*results, *sampled)])
"""


@pytest.mark.gpu
def test_two_cold_starts_with_one_store_give_the_same_tokens(tmp_path: Path) -> None:
    here = profile_store.device_identity()
    tiles = {"BLOCK_O": 32, "BLOCK_I": 64, "SPLIT": 2, "TRIGGER": 1}
    sizes = {"O": 256, "I": 768}
    stages = {rows: 2 for rows in (16, 32, 64, 128)}
    made = Entry("linear_residual_norm", "bfloat16", sizes, tiles, 4, stages)
    path = tmp_path / "mine.json"
    save(path, here, [made])
    found = lookup(here, path).find("linear_residual_norm", Sizes(sizes), "bfloat16", 16)
    assert found is not None and found.tiles == tiles
    said = []
    for start in range(2):
        env = os.environ | {
            "DFLASH_GRAPH_CACHE": str(tmp_path / f"kernels{start}"),
            "TRITON_CACHE_DIR": str(tmp_path / f"triton{start}"),
        }
        command = [sys.executable, "-P", "-c", GENERATE, str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and said[0].startswith("[")
