"""Pairs that declarations are tested on: demo presets, golden configs, the 27B geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.geometry import (
    draft_geometry_from_config,
    read_draft_geometry,
    read_target_geometry,
    target_geometry_from_config,
)
from dflash_graph.models.pair import ModelPair
from dflash_graph.profiles import load_preset

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GOLDEN_DRAFTS = (
    "dflash_mixed_w6",
    "dflash_mixed_w16",
    "dflash_causal_unset",
    "dflash_host_full_attention",
    "dflash2_g8",
    "dflash2_g16",
)
PAIR_NAMES = ("demo-dflash", "demo-dflash2", *GOLDEN_DRAFTS, "27b-dflash", "27b-dflash2")


def preset_pair(name: str, dtype: str = "bfloat16") -> ModelPair:
    preset = load_preset(name)
    return ModelPair(
        target_geometry_from_config(preset["target"], name),
        draft_geometry_from_config(preset["draft"], name),
        dtype,
    )


def large_dflash_pair() -> ModelPair:
    """The 27B target with a DFlash draft: five local layers, then one full one."""
    preset = load_preset("qwen3.5-27b-dflash2")
    own: dict[str, Any] = {
        key: value
        for key, value in preset["draft"]["dflash_config"].items()
        if not key.startswith(("conv_", "selector_"))
    }
    draft = preset["draft"] | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "dflash_config": own,
    }
    return ModelPair(
        target_geometry_from_config(preset["target"], "27B"),
        draft_geometry_from_config(draft, "27B DFlash"),
        "bfloat16",
    )


def golden_pair(name: str) -> ModelPair:
    """A golden draft with its host, or with a dense target of the same width for one of experts."""
    host = json.loads((GOLDEN / name / "expected.json").read_text())["host"]
    host = {"target_moe": "target_dense_2x"}.get(host, host)
    return ModelPair(read_target_geometry(GOLDEN / host), read_draft_geometry(GOLDEN / name))


def pair_called(name: str) -> ModelPair:
    """The pair of one of `PAIR_NAMES`."""
    if name == "27b-dflash":
        return large_dflash_pair()
    if name == "27b-dflash2":
        return preset_pair("qwen3.5-27b-dflash2")
    return preset_pair(name) if name.startswith("demo") else golden_pair(name)


@pytest.fixture(params=PAIR_NAMES)
def pair(request: pytest.FixtureRequest) -> ModelPair:
    return pair_called(request.param)


@pytest.fixture(params=("27b-dflash", "27b-dflash2"))
def large_pair(request: pytest.FixtureRequest) -> ModelPair:
    return pair_called(request.param)


@pytest.fixture
def large_dflash2_pair() -> ModelPair:
    return pair_called("27b-dflash2")
