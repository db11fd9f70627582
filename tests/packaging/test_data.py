"""The demo checkpoints, the prompts and the presets, through the functions that find them."""

from __future__ import annotations

import json

import pytest

from dflash_graph import demo
from dflash_graph.errors import OptionError
from dflash_graph.geometry import (
    check_pair,
    draft_geometry_from_config,
    target_geometry_from_config,
)
from dflash_graph.profiles import load_preset, preset_names


def test_demo_folders_hold_checkpoints() -> None:
    folders = [demo.target_directory(), *(demo.draft_directory(kind) for kind in demo.DRAFT_KINDS)]
    for folder in folders:
        assert (folder / "config.json").is_file()
        assert (folder / "model.safetensors").stat().st_size > 1_000_000
    assert (demo.target_directory() / "tokenizer.json").is_file()


def test_unknown_draft_lists_what_ships() -> None:
    with pytest.raises(OptionError, match=r"expected one of 'dflash', 'dflash2', got 'eagle'"):
        demo.draft_directory("eagle")


def test_prompts_are_twenty_texts() -> None:
    prompts = demo.prompts()
    assert len(prompts) == 20
    assert all(isinstance(prompt, str) and prompt for prompt in prompts)


def test_preset_names_are_sorted_and_load() -> None:
    names = preset_names()
    assert names == ["demo-dflash", "demo-dflash2", "qwen3.5-27b-dflash2"]
    for name in names:
        preset = load_preset(name)
        assert set(preset) == {"name", "description", "target", "draft"}
        assert preset["name"] == name


@pytest.mark.parametrize("name", ["", "missing", "../pyproject", "demo-dflash.json"])
def test_unknown_preset_lists_what_ships(name: str) -> None:
    with pytest.raises(OptionError, match=r"expected one of demo-dflash, demo-dflash2, qwen3\.5"):
        load_preset(name)


@pytest.mark.parametrize("kind", demo.DRAFT_KINDS)
def test_demo_presets_are_the_demo_configs(kind: str) -> None:
    preset = load_preset(f"demo-{kind}")
    for part, folder in (
        ("target", demo.target_directory()),
        ("draft", demo.draft_directory(kind)),
    ):
        assert preset[part] == json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_pairs_that_the_package_reads(name: str) -> None:
    preset = load_preset(name)
    target = target_geometry_from_config(preset["target"], f"{name}.target")
    draft = draft_geometry_from_config(preset["draft"], f"{name}.draft")
    check_pair(target, draft)


def test_27b_preset_has_the_published_pattern() -> None:
    preset = load_preset("qwen3.5-27b-dflash2")
    target, draft = preset["target"], preset["draft"]
    assert target["layer_types"] == 16 * (3 * ["linear_attention"] + ["full_attention"])
    assert draft["layer_types"] == 5 * ["sliding_attention"]
    assert draft["dflash_config"]["target_layer_ids"] == [5, 19, 33, 47, 61]
