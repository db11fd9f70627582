"""Every rule on a document that breaks it, and on the same document mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dflash_graph.errors import OptionError
from dflash_graph.profile.document import Profile
from dflash_graph.profile.lint import lint, rules
from dflash_graph.profile.parts import KernelResources, NodeProfile, Samples, ValueFacts

Make = Callable[..., Profile]


def found(profile: Profile, rule: str) -> list[tuple[str, str]]:
    return [(one.executor, one.where) for one in lint(profile) if one.rule == rule]


def changed(profile: Profile, **changes: Any) -> Profile:
    """The document with fields of its only executor changed."""
    (executor,) = profile.executors
    return profile.model_copy(update={"executors": (executor.model_copy(update=changes),)})


def as_round(profile: Profile) -> Profile:
    """The document's only executor with a finish segment of no nodes: it is a round then."""
    (executor,) = profile.executors
    segments = (
        *executor.segments,
        executor.segments[0].model_copy(update={"name": "finish", "nodes": ()}),
    )
    return changed(profile, segments=segments)


def node(base: NodeProfile, **changes: Any) -> NodeProfile:
    return base.model_copy(update=changes)


def value(name: str, *shape: int, dtype: str = "bfloat16", nbytes: int = 64) -> ValueFacts:
    return ValueFacts(name=name, shape=shape, dtype=dtype, nbytes=nbytes, role="scratch")


def test_default_config(with_nodes: Make, one_node: NodeProfile) -> None:
    hot = as_round(with_nodes(one_node))
    assert found(hot, "default-config") == [("round B=1", "verify/only")]
    assert not found(with_nodes(one_node), "default-config"), "not in the hot path"
    tuned = as_round(with_nodes(node(one_node, source="nvidia-h200.json")))
    assert not found(tuned, "default-config")
    eager = as_round(with_nodes(node(one_node, implementation="eager", config=None)))
    assert not found(eager, "default-config")
    cold = node(one_node, name="verify/cold", floor_us=0.0001)
    warm = node(one_node, source="nvidia-h200.json")
    assert not found(as_round(with_nodes(warm, cold)), "default-config")


def test_no_kernel(with_nodes: Make, one_node: NodeProfile) -> None:
    assert found(with_nodes(node(one_node, config=None)), "no-kernel")
    assert not found(with_nodes(one_node), "no-kernel")
    assert not found(with_nodes(node(one_node, config=None, implementation="eager")), "no-kernel")


def test_uncaptured(with_nodes: Make, one_node: NodeProfile) -> None:
    launched = with_nodes(one_node)
    assert found(changed(launched, captured=False), "uncaptured")
    assert not found(changed(launched, captured=True), "uncaptured")
    assert not found(launched, "uncaptured"), "nothing was started"
    eager = with_nodes(node(one_node, implementation="eager", config=None))
    assert not found(changed(eager, captured=False), "uncaptured")


def with_segment(profile: Profile, **changes: Any) -> Profile:
    (executor,) = profile.executors
    (segment,) = executor.segments
    return changed(profile, segments=(segment.model_copy(update=changes),))


def test_host_sync(with_nodes: Make, one_node: NodeProfile) -> None:
    assert found(with_segment(with_nodes(one_node), host_syncs=2), "host-sync")
    assert not found(with_segment(with_nodes(one_node), host_syncs=0), "host-sync")
    assert not found(with_nodes(one_node), "host-sync")


def test_dense_q(with_nodes: Make, one_node: NodeProfile) -> None:
    vocab = 2048  # of the demo pair
    q = node(one_node, region="propose/select", outputs=(value("q", 1, 7, vocab, dtype="float32"),))
    assert found(with_nodes(q), "dense-q") == [("round B=1", "verify/only")]
    candidates = node(q, outputs=(value("q", 1, 7, 16, dtype="float32"),))
    assert not found(with_nodes(candidates), "dense-q")
    p = node(q, region="verify")
    assert not found(with_nodes(p), "dense-q"), "scores of the target are p"
    row = node(q, outputs=(value("bias", vocab),))
    assert not found(with_nodes(row), "dense-q")


def test_cast_only(with_nodes: Make, one_node: NodeProfile) -> None:
    source = node(one_node, name="verify/a", outputs=(value("a", 2, 16, nbytes=64),))
    cast = node(
        one_node,
        name="verify/b",
        inputs=("verify/a",),
        outputs=(value("b", 2, 16, dtype="float32", nbytes=128),),
        read_bytes=64,
        flops=0,
    )
    assert found(with_nodes(source, cast), "cast-only") == [("round B=1", "verify/b")]
    for mended in (
        node(cast, flops=32),
        node(cast, weights=("target/w",)),
        node(cast, traced=True),
        node(cast, outputs=(value("b", 2, 16),)),
        node(cast, outputs=(value("b", 2, 8, dtype="float32"),)),
        node(cast, read_bytes=128),
    ):
        assert not found(with_nodes(source, mended), "cast-only")


def test_weight_twice(with_nodes: Make, one_node: NodeProfile) -> None:
    first = node(one_node, name="verify/a", weights=("target/w", "target/x"))
    second = node(one_node, name="verify/b", weights=("target/w",))
    assert found(with_nodes(first, second), "weight-twice") == [("round B=1", "forward/verify")]
    elsewhere = node(second, region="propose")
    assert not found(with_nodes(first, elsewhere), "weight-twice"), "another stage has to"
    assert not found(with_nodes(first), "weight-twice")


def test_never_replayed(with_nodes: Make, one_node: NodeProfile) -> None:
    (executor,) = with_nodes(one_node).executors

    def with_runs(*runs: int | None) -> Profile:
        executors = tuple(
            executor.model_copy(update={"name": f"round B={at}", "replays": count})
            for at, count in enumerate(runs, 1)
        )
        return with_nodes(one_node).model_copy(update={"executors": executors})

    assert found(with_runs(3, 0), "never-replayed") == [("round B=2", "round B=2")]
    assert not found(with_runs(3, 1), "never-replayed")
    assert not found(with_runs(0, 0), "never-replayed"), "nothing was asked of it yet"
    assert not found(with_runs(None, None), "never-replayed")


def test_spills(with_nodes: Make, one_node: NodeProfile) -> None:
    def spilling(nbytes: int) -> Profile:
        kernel = KernelResources(
            kernel="linear_kernel", registers=255, shared_bytes=0, spill_bytes=nbytes
        )
        return with_nodes(node(one_node, resources=(kernel,)))

    assert found(spilling(64), "spills") and not found(spilling(8), "spills")


def test_unattributed(with_nodes: Make, one_node: NodeProfile) -> None:
    timed = with_nodes(node(one_node, measured=Samples(values=(60.0,))))
    assert found(changed(timed, measured=Samples(values=(100.0,))), "unattributed")
    assert not found(changed(timed, measured=Samples(values=(62.0,))), "unattributed")
    assert not found(timed, "unattributed")


def test_every_rule_has_a_test_here() -> None:
    tests = {name.removeprefix("test_").replace("_", "-") for name in globals()}
    assert {rule.id for rule in rules()} <= tests


def test_rules_can_be_left_out(with_nodes: Make, one_node: NodeProfile) -> None:
    profile = with_nodes(node(one_node, config=None))
    assert lint(profile, frozenset({"no-kernel"})) == ()
    with pytest.raises(OptionError, match=r"no-kernel.*got nonsense"):
        lint(profile, frozenset({"nonsense"}))


def test_what_ships_has_no_error(large_profile: Profile, demo_profile: Profile) -> None:
    """Nor a warning: a notice that always comes teaches nobody."""
    for profile in (large_profile, demo_profile):
        assert {one.severity for one in lint(profile)} <= {"note"}
