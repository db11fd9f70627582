"""Reports: units, and weights of which several uses share one storage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dflash_graph.checkpoint import draft_schema, target_schema
from dflash_graph.choices import Entry, shipped_choices
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.profiles import load_preset
from dflash_graph.report import plan_memory, size_text, storages, weight_bytes
from dflash_graph.state import Capacities
from dflash_graph.tensor import TensorSpec, WeightUse


def use(*parts: str, rows: int = 4, dtype: str = "bfloat16") -> WeightUse:
    return WeightUse(parts, TensorSpec((rows * len(parts), 8), dtype))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (40 * 2**20, "40.00 MiB"),
        (1536 * 2**20, "1.50 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_a_run_of_parts_is_a_view() -> None:
    qkv = use("draft/q", "draft/k", "draft/v")
    kv, q = use("draft/k", "draft/v"), use("draft/q")
    assert storages([kv, qkv, q, qkv]) == (qkv,)
    assert weight_bytes([kv, qkv, q]) == {"draft": 3 * 4 * 8 * 2}


def test_other_parts_need_their_own_storage() -> None:
    qkv, qv = use("draft/q", "draft/k", "draft/v"), use("draft/q", "draft/v")
    assert storages([qkv, qv]) == (qkv, qv)
    float_q = use("draft/q", dtype="float32")
    assert storages([qkv, float_q]) == (qkv, float_q)


def test_owners_are_counted_apart() -> None:
    assert weight_bytes([use("draft/fc"), use("target/lm_head"), use("draft/fc")]) == {
        "draft": 64,
        "target": 64,
    }


@pytest.mark.parametrize("name", ["demo-dflash", "demo-dflash2", "qwen3.5-27b-dflash2"])
def test_a_pair_takes_what_its_checkpoints_hold(name: str) -> None:
    """Every tensor once, in bfloat16 but for the two float32 vectors of a recurrent layer."""
    preset = load_preset(name)
    target = target_geometry_from_config(preset["target"], name)
    draft = draft_geometry_from_config(preset["draft"], name)
    report = plan_memory(
        ModelPair(target, draft, "bfloat16"), "eager", draft_tokens=7, max_batch=1,
        prefill_chunk=8, capacities=Capacities(slots=1, context=64),
    )  # fmt: skip
    expected = {
        "target": sum(
            math.prod(shape) * (4 if tensor.endswith(("A_log", "dt_bias")) else 2)
            for tensor, shape in target_schema(target).items()
        ),
        "draft": sum(math.prod(shape) * 2 for shape in draft_schema(draft).values()),
    }
    assert report.weights == expected


def test_a_devices_choices_decide_about_workspace() -> None:
    """The arena of eight requests on the card that was measured: its benchmark allocated this."""
    preset = load_preset("qwen3.5-27b-dflash2")
    pair = ModelPair(
        target_geometry_from_config(preset["target"], "target"),
        draft_geometry_from_config(preset["draft"], "draft"),
        dtype="bfloat16",
    )
    (choices,) = (found for found in shipped_choices() if found.device == "NVIDIA H200")
    shape = {"draft_tokens": 7, "max_batch": 8, "prefill_chunk": 1024}
    capacities = Capacities(8, 3072)
    found = plan_memory(pair, "triton", capacities=capacities, choices=choices, **shape)
    assert found.arena_bytes == 223_284_224
    assert all(executor.plan.ratio < 1.02 for executor in found.executors)
    wider = replace(choices, entries=tuple(map(_more_workers, choices.entries)))
    other = plan_memory(pair, "triton", capacities=capacities, choices=wider, **shape)
    assert other.arena_bytes > found.arena_bytes


def _more_workers(entry: Entry) -> Entry:
    if entry.op != "gated_attention":
        return entry
    return replace(entry, tiles={**entry.tiles, "WORKERS": 64})
