"""Replicas on the host and in files: bytes that come back, and files that are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.contexts import FACTS_FILE, STATE_FILE, Checkpoint
from dflash_graph.errors import ContextError
from dflash_graph.rounds import Model

Load = Callable[..., dg.Engine]

PARAMS = dg.SamplingParams(max_new_tokens=20, ignore_eos=True)

#: Continues what argv[3] holds in a process of its own: argv 1 and 2 are target and draft.
CHILD = """
import json, sys, torch
torch.set_num_threads(1)
import dflash_graph as dg
target, draft, folder, params = sys.argv[1:]
options = dg.EngineOptions(
    device="cpu", lowering="eager", max_batch=2, max_context=256, draft_tokens=5,
    speculative=draft != "none",
)
engine = dg.Engine.load(target, None if draft == "none" else draft, options)
request = engine.restore(folder, dg.SamplingParams(**json.loads(params)))
while not request.is_finished:
    engine.step()
rounds = [[r.proposed, r.accepted, r.licensed, r.committed] for r in request.rounds]
print(json.dumps([request.token_ids, rounds]))
"""


def taken(shop: Any, engine: dg.Engine, name: str, params: dg.SamplingParams) -> tuple[Any, Any]:
    """A run, and its checkpoint after the third round, when columns were pending."""
    run = shop.run(engine, shop.prompt(name), params, checkpoints=True)
    return run, run.checkpoints[2]


@pytest.fixture
def saved(shop: Any, load: Load, tmp_path: Path) -> tuple[dg.Engine, Checkpoint, Path]:
    """An engine, a checkpoint of it, and where that is saved."""
    engine = load("golden mixed")
    _, (_, checkpoint) = taken(shop, engine, "golden mixed", PARAMS)
    checkpoint.save(tmp_path / "saved")
    return engine, checkpoint, tmp_path / "saved"


def refused(engine: dg.Engine, source: Checkpoint | Path, *words: str) -> str:
    """The message of a refusal that left the engine as it was and names all of `words`."""
    before = (
        engine.rounds.state.storage.clone(),
        engine.scheduler.slots.free,
        engine.scheduler.pages.free,
    )
    number = engine._next_id
    with pytest.raises(ContextError) as caught:
        engine.restore(source, PARAMS)
    assert torch.equal(engine.rounds.state.storage, before[0])
    assert (engine.scheduler.slots.free, engine.scheduler.pages.free, engine._next_id) == (
        *before[1:],
        number,
    )
    assert engine.is_idle
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    return message


# -- replicas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo dflash", "demo dflash2", "demo plain", "golden mixed"])
def test_round_trip(
    shop: Any, load: Load, tmp_path: Path, sampled: dg.SamplingParams, name: str
) -> None:
    """Device, host and files hold the same bytes, and continue alike."""
    params = sampled.replace(max_new_tokens=20)
    engine = load(name, max_batch=3)
    run, (published, checkpoint) = taken(shop, engine, name, params)
    host = checkpoint.to_host()
    host.save(tmp_path / "a" / "b")
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [FACTS_FILE, STATE_FILE]
    loaded = Checkpoint.load(tmp_path / "a" / "b")
    for replica in (host, loaded):
        assert shop.bytes_of(replica) == shop.bytes_of(checkpoint)
        assert {image.device.type for image in replica.images.values()} == {"cpu"}
        assert replica.nbytes == checkpoint.nbytes and replica.frontier == checkpoint.frontier
        assert replace(replica, images={}).__dict__ == replace(checkpoint, images={}).__dict__
    rest = params.replace(max_new_tokens=20 - published)
    sources = (checkpoint, host, loaded, tmp_path / "a" / "b", str(tmp_path / "a" / "b"))
    requests = [engine.restore(source, rest) for source in sources]
    shop.drain(engine)
    for request in requests:
        assert tuple(request.token_ids) == run.text[published:]
        assert request.rounds == run.rounds_after(published)


@pytest.mark.parametrize("name", ["demo dflash", "demo dflash2", "golden mixed", "golden plain"])
def test_new_process(
    shop: Any, load: Load, tmp_path: Path, sampled: dg.SamplingParams, name: str
) -> None:
    """Saved here, restored by a process that knows nothing else."""
    params = sampled.replace(max_new_tokens=20)
    run, (published, checkpoint) = taken(shop, load(name), name, params)
    checkpoint.save(tmp_path)
    rest = params.replace(max_new_tokens=20 - published)
    target, draft = shop.directories[name]
    command = [sys.executable, "-c", CHILD, str(target), str(draft or "none"), str(tmp_path)]
    child = subprocess.run(
        [*command, rest.model_dump_json()], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    tokens, rounds = json.loads(child.stdout)
    assert tuple(tokens) == run.text[published:]
    assert [dg.RoundRecord(*r) for r in rounds] == run.rounds_after(published)


def test_a_loaded_replica_is_free_of_its_file(shop: Any, saved: Any) -> None:
    """What happens to the file afterwards, overwritten in place or cut, does not reach it."""
    _, checkpoint, folder = saved
    loaded = Checkpoint.load(folder)
    path = folder / STATE_FILE
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert shop.bytes_of(loaded) == shop.bytes_of(checkpoint)


def test_saving_again(shop: Any, saved: Any) -> None:
    """A later state replaces an earlier one, whole."""
    engine, checkpoint, folder = saved
    fork = engine.fork(checkpoint, PARAMS.replace(max_new_tokens=4), keep=True)
    shop.drain(engine)
    fork.checkpoint.save(folder)
    loaded = Checkpoint.load(folder)
    assert loaded.tokens == fork.checkpoint.tokens != checkpoint.tokens
    assert shop.bytes_of(loaded) == shop.bytes_of(fork.checkpoint)
    assert sorted(p.name for p in folder.iterdir()) == [FACTS_FILE, STATE_FILE]


# -- another model's -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "engine", "options", "words"),
    [
        ("demo dflash", "golden mixed", {}, ("target",)),
        ("golden mixed", "golden dflash2", {}, ("draft",)),
        ("demo dflash2", "demo dflash", {}, ("draft",)),
        ("golden plain", "golden mixed", {}, ("draft", "got none")),
        ("golden mixed", "golden plain", {}, ("draft", "none (this engine's)")),
        ("golden mixed", "golden mixed", {"dtype": "bfloat16"}, ("dtype", "float32", "bfloat16")),
        ("golden mixed", "golden mixed", {"draft_causality": "sliding"}, ("draft",)),
    ],
)
def test_another_model(
    shop: Any, load: Load, source: str, engine: str, options: Any, words: tuple[str, ...]
) -> None:
    if "draft_causality" in options:
        pair = replace(shop.model(engine).pair, draft_causality="sliding")
        model = Model(pair, shop.model(engine).weights)
        options = {"model": model, **options}
    _, (_, checkpoint) = taken(shop, load(source), source, PARAMS)
    message = refused(load(engine, **options), checkpoint, *words)
    assert f"another {words[0]}" in message


def test_same_model_loaded_again(shop: Any, load: Load) -> None:
    """Coverage is of content: another load of the same files, of another batch, is the same."""
    one = load("golden mixed", max_batch=1)
    target, draft = shop.directories["golden mixed"]
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=128)
    other = dg.Engine.load(target, draft, options)
    assert one.scheduler.coverage() == other.scheduler.coverage()
    assert one.scheduler.coverage().target == load("golden plain").scheduler.coverage().target


@pytest.mark.parametrize("owner", ["target", "draft"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_changed_weight(
    shop: Any, load: Load, rng: torch.Generator, owner: str, place: str
) -> None:
    """One element of one tensor, wherever it stands, inside a stack of several too."""
    model = shop.model("golden mixed")
    uses = [use for use in model.weights if use.parts[0].startswith(owner + "/")]
    engine = load("golden mixed", max_batch=1)
    _, (_, checkpoint) = taken(shop, engine, "golden mixed", PARAMS)
    for index in torch.randint(len(uses), (3,), generator=rng).tolist():
        changed = model.weights[uses[index]].clone()
        flat = changed.view(-1)
        at = {"first": 0, "middle": flat.numel() // 2, "last": flat.numel() - 1}[place]
        flat[at] += 0.5
        engine.rounds.model = Model(model.pair, {**model.weights, uses[index]: changed})
        engine.scheduler._coverage = None
        refused(engine, checkpoint, f"another {owner}")


# -- damaged files ---------------------------------------------------------------------------------


def facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FACTS_FILE).read_text())


def write_facts(folder: Path, changed: Any) -> None:
    (folder / FACTS_FILE).write_text(json.dumps(changed))


@pytest.mark.parametrize("name", [FACTS_FILE, STATE_FILE])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "garbage", "folder"])
def test_damaged_file(saved: Any, name: str, damage: str) -> None:
    engine, _, folder = saved
    path = folder / name
    content = path.read_bytes()
    if damage in ("missing", "folder"):
        path.unlink()
        if damage == "folder":
            path.mkdir()
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    else:
        cut = {"empty": b"", "cut": content[: len(content) // 2], "garbage": bytes(range(256)) * 9}
        path.write_bytes(cut[damage])
    refused(engine, folder, str(path), "expected")


def test_cut_at_every_scale(saved: Any) -> None:
    """However little is missing."""
    engine, _, folder = saved
    for name in (FACTS_FILE, STATE_FILE):
        content = (folder / name).read_bytes()
        for size in (1, 7, 8, 9, 100, len(content) - 100, len(content) - 3):
            (folder / name).write_bytes(content[:size])
            refused(engine, folder, name)
        (folder / name).write_bytes(content)
    Checkpoint.load(folder)


def test_one_flipped_bit(saved: Any, rng: torch.Generator) -> None:
    engine, _, folder = saved
    for name in (FACTS_FILE, STATE_FILE):
        content = (folder / name).read_bytes()
        for at in torch.randint(len(content), (12,), generator=rng).tolist():
            bit = 1 << int(torch.randint(8, (), generator=rng))
            changed = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
            (folder / name).write_bytes(changed)
            if name == FACTS_FILE and _same_json(changed, content):
                continue  # white space
            refused(engine, folder, name)
        (folder / name).write_bytes(content)


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "content",
    ["[]", "null", "7", '"text"', "{}", '{"format": 1}', "[" * 200_000, "\ufeff{}", "NaN"],
    ids=["list", "null", "number", "text", "object", "format", "deep", "mark", "nan"],
)
def test_other_json(saved: Any, content: str) -> None:
    engine, _, folder = saved
    (folder / FACTS_FILE).write_text(content, encoding="utf-8")
    refused(engine, folder, FACTS_FILE, "expected")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", lambda old: [*old[:-1], old[-1] ^ 1]),
        ("tokens", lambda old: old[:-1]),
        ("tokens", lambda old: [*old, 3]),
        ("anchor", lambda old: old ^ 1),
        ("generated", lambda old: old[1:]),
        ("rope_delta", lambda old: old + 1),
        ("state_sha256", lambda old: old[::-1]),
        ("coverage", lambda old: {**old, "target": "0" * 64}),
    ],
)
def test_edited_facts(saved: Any, field: str, value: Callable[[Any], Any]) -> None:
    engine, _, folder = saved
    changed = facts(folder)
    changed[field] = value(changed[field])
    write_facts(folder, changed)
    refused(engine, folder, FACTS_FILE, "changed")


@pytest.mark.parametrize("number", [0, 2, -1, 1.5, "1", None, [1]])
def test_another_format(saved: Any, number: Any) -> None:
    engine, _, folder = saved
    write_facts(folder, {**facts(folder), "format": number})
    refused(engine, folder, FACTS_FILE, "expected format 1", repr(number))


def test_missing_fact(saved: Any) -> None:
    engine, _, folder = saved
    whole = facts(folder)
    for name in whole:
        write_facts(folder, {k: v for k, v in whole.items() if k != name})
        refused(engine, folder, FACTS_FILE)


@pytest.mark.parametrize("swapped", [FACTS_FILE, STATE_FILE])
def test_swapped_files(shop: Any, saved: Any, tmp_path: Path, swapped: str) -> None:
    """Two checkpoints of one request: a file of one beside a file of the other."""
    engine, checkpoint, folder = saved
    fork = engine.fork(checkpoint, PARAMS.replace(max_new_tokens=2), keep=True)
    shop.drain(engine)
    fork.checkpoint.save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / swapped, folder / swapped)
    refused(engine, folder, STATE_FILE, FACTS_FILE)


@pytest.mark.parametrize("renames", [0, 1])
def test_torn_save(shop: Any, saved: Any, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """A save that dies before its first file stands leaves the old state; between both, none."""
    engine, checkpoint, folder = saved
    fork = engine.fork(checkpoint, PARAMS.replace(max_new_tokens=2), keep=True)
    shop.drain(engine)
    done: list[Any] = []

    class Killed(BaseException):
        pass

    def rename(source: Any, target: Any) -> None:
        if len(done) == renames:
            raise Killed
        done.append(target)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", rename)
        with pytest.raises(Killed):
            fork.checkpoint.save(folder)
    if renames == 0:
        assert shop.bytes_of(Checkpoint.load(folder)) == shop.bytes_of(checkpoint)
    else:
        refused(engine, folder, STATE_FILE, FACTS_FILE)
    fork.checkpoint.save(folder)
    assert shop.bytes_of(Checkpoint.load(folder)) == shop.bytes_of(fork.checkpoint)


# -- values that do not belong together ------------------------------------------------------------


def test_parts_that_disagree(saved: Any) -> None:
    """Images of fewer or more positions than tokens, missing, misshapen, of another dtype."""
    engine, checkpoint, _ = saved
    images = dict(checkpoint.images)
    page = next(name for name in images if name.endswith("k_pages"))
    ring = next(name for name in images if name.endswith("k_ring"))
    state = next(name for name in images if name.endswith("gdn_state"))
    bad: list[tuple[str, dict[str, Any]]] = [
        (page, {"images": {k: v for k, v in images.items() if k != page}}),
        ("other", {"images": {**images, "other": images[ring]}}),
        (ring, {"images": {**images, ring: images[ring][:-1]}}),
        (state, {"images": {**images, state: images[state].double()}}),
        (page, {"images": {**images, page: images[page].repeat(2, 1, 1, 1)}}),
        (page, {"tokens": checkpoint.tokens * 9}),
        ("token", {"tokens": ()}),
        ("token", {"tokens": (*checkpoint.tokens[:-1], 160)}),
        ("token", {"tokens": (*checkpoint.tokens[:-1], -1)}),
        ("anchor", {"anchor": 160}),
        ("generated", {"generated": (160,)}),
    ]
    for word, changes in bad:
        refused(engine, replace(checkpoint, **changes), word)


def test_no_room(shop: Any, load: Load) -> None:
    """The last token that fits can still be generated; one processed token more is refused."""
    engine = load("golden mixed", max_context=128)
    vocab = engine.rounds.model.pair.target.vocab
    small = load("golden mixed", max_context=70)
    prompt = tuple(i * 7 % vocab for i in range(68))
    one = PARAMS.replace(max_new_tokens=1)
    fits = shop.run(engine, prompt, one, keep=True).request.checkpoint
    assert fits.frontier == 68
    last = small.restore(fits, PARAMS)
    shop.drain(small)
    assert last.finish_reason == "length" and len(last.token_ids) == 1
    assert tuple(last.token_ids) == shop.plain("golden mixed", prompt, 2)[1:]
    one_more = shop.run(engine, (*prompt, 9), one, keep=True)
    with pytest.raises(dg.RequestError, match=r"expected fewer than 69 .* got 69"):
        small.restore(one_more.request.checkpoint, PARAMS)
    assert small._next_id == 1 and small.is_idle


def test_params_of_a_fork_are_checked(saved: Any) -> None:
    engine, checkpoint, _ = saved
    number = engine._next_id
    with pytest.raises(dg.RequestError, match="stop_token_ids"):
        engine.fork(checkpoint, PARAMS.replace(stop_token_ids=(160,)))
    with pytest.raises(dg.RequestError, match="tokenizer"):
        engine.fork(checkpoint, PARAMS.replace(stop=("x",)))
    assert engine.is_idle and engine._next_id == number
    engine.close()
    with pytest.raises(dg.EngineClosedError):
        engine.fork(checkpoint, PARAMS)
