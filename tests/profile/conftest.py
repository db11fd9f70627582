"""Documents that exports are tested on: declared from shipped geometries, some with drawn times."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from dflash_graph.choices import shipped_choices
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.graph import Backend
from dflash_graph.models.pair import ModelPair
from dflash_graph.profile.build import declared_profile
from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import (
    AcceptanceCounts,
    Ceiling,
    Config,
    ExecutorProfile,
    KernelResources,
    NodeProfile,
    Samples,
    Stage,
)
from dflash_graph.profiles import load_preset


@cache
def declared(preset: str, backend: Backend, max_batch: int) -> Profile:
    configs = load_preset(preset)
    pair = ModelPair(
        target_geometry_from_config(configs["target"], preset),
        draft_geometry_from_config(configs["draft"], preset),
        "bfloat16",
    )
    return declared_profile(
        pair,
        backend,
        name=preset,
        draft_tokens=7,
        max_batch=max_batch,
        max_context=4096,
        context=1024,
        ceiling=Ceiling(read_tb_per_s=4.4, tflop_per_s=800),
        choices=shipped_choices()[0] if backend == "triton" else None,
    )


def drawn(around: float, random_numbers: random.Random, count: int = 5) -> Samples:
    """Times around a number of microseconds."""
    return Samples(values=tuple(around * random_numbers.uniform(0.98, 1.02) for _ in range(count)))


def timed_executor(executor: ExecutorProfile, seed: int) -> ExecutorProfile:
    """The executor with times drawn from a seed: none is below its floor."""
    numbers = random.Random(seed)
    segments = []
    for segment in executor.segments:
        nodes = []
        for node in segment.nodes:
            took = node.floor_us * numbers.uniform(1.05, 1.4) + numbers.uniform(0.8, 2.5)
            kernels = (
                KernelResources(
                    kernel=node.op,
                    registers=numbers.randrange(32, 200, 8),
                    shared_bytes=numbers.randrange(0, 160) * 1024,
                    spill_bytes=8 if numbers.random() < 0.05 else 0,
                ),
            )
            found = {"measured": drawn(took, numbers), "resources": kernels}
            nodes.append(node.model_copy(update=found))
        total = sum(node.measured.median for node in nodes if node.measured)
        found = {"nodes": tuple(nodes), "measured": drawn(total * 1.02, numbers)}
        segments.append(segment.model_copy(update=found))
    whole = sum(segment.measured.median for segment in segments if segment.measured)
    return executor.model_copy(
        update={
            "segments": tuple(segments),
            "measured": drawn(whole * 1.01, numbers, 20),
            "captured": True,
            "replays": 42,
            "capture_seconds": 0.4,
            "graph_bytes": 3 << 20,
        }
    )


def timed(profile: Profile, seed: int = 7) -> Profile:
    """A document as a start-up on a device would make it, with drawn times."""
    return profile.model_copy(
        update={
            "executors": tuple(timed_executor(found, seed) for found in profile.executors),
            "memory": tuple(
                found.model_copy(update={"actual_bytes": found.planned_bytes})
                for found in profile.memory
            ),
            "startup": (
                Stage(name="weights", seconds=21.5),
                Stage(name="compile", seconds=48.25),
                Stage(name="pools", seconds=0.5),
                Stage(name="bind", seconds=3.125),
                Stage(name="warm-up", seconds=2.0),
                Stage(name="capture", seconds=1.75),
            ),
            "acceptance": AcceptanceCounts(
                rounds=400,
                drafted=2790,
                committed=1710,
                verified_by_position=(400, 400, 400, 400, 400, 396, 394),
                accepted_by_position=(352, 290, 231, 180, 128, 83, 50),
                ms_per_round=14.9,
            ),
        }
    )


@pytest.fixture(scope="session")
def large_profile() -> Profile:
    """The 27B through triton as declared: 400 nodes in a round and no measurement."""
    return declared("qwen3.5-27b-dflash2", "triton", 1)


@pytest.fixture(scope="session")
def timed_profile(large_profile: Profile) -> Profile:
    """The 27B with drawn times."""
    return timed(large_profile)


@pytest.fixture(scope="session")
def demo_profile() -> Profile:
    """The demo pair as declared, two batch sizes, eager."""
    return declared("demo-dflash2", "eager", 2)


@pytest.fixture(scope="session")
def with_nodes(demo_profile: Profile) -> Callable[..., Profile]:
    """Makes a document with one executor of some nodes, in one segment and without buffers."""

    def make(*nodes: NodeProfile, **changes: object) -> Profile:
        executor = demo_profile.executors[0]
        segment = executor.segments[0].model_copy(update={"nodes": nodes, "first_step": 0})
        plan = executor.plan.model_copy(
            update={
                "arena_bytes": 0,
                "lower_bound_bytes": 0,
                "steps": tuple(node.name for node in nodes),
                "boundaries": (0,),
                "buffers": (),
            }
        )
        only = executor.model_copy(update={"segments": (segment,), "plan": plan})
        return demo_profile.model_copy(update={"executors": (only,), **changes})

    return make


@pytest.fixture(scope="session")
def one_node() -> NodeProfile:
    """A node that moves and computes."""
    return NodeProfile(
        name="verify/only",
        region="verify",
        op="linear",
        step=0,
        implementation="triton",
        config=Config(template="linear", holes={"BLOCK_N": 64}, num_warps=4, num_stages=3),
        read_bytes=1 << 20,
        write_bytes=1 << 12,
        flops=1 << 23,
        floor_us=0.25,
        bound="memory",
    )
