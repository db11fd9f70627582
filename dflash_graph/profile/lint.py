"""lint: what a profile shows that should not be so, rule by rule.

A rule sees one executor of one profile. `error` is what breaks the promise of a round, `warning`
what costs time, `note` what is worth a look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from dflash_graph.errors import OptionError
from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import ExecutorProfile, NodeProfile, SegmentProfile, ValueFacts

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")

#: A node with a smaller share of its round is not in the hot path.
HOT_SHARE: Final = 0.01

#: Time of a round that belongs to no node may be this share of it.
UNATTRIBUTED_SHARE: Final = 0.15

#: ptxas keeps a register or two in local memory across the loop of some products; see `make
#: kernels`.
SPILL_BYTES: Final = 8


@dataclass(frozen=True)
class Finding:
    """One finding: the rule's id, how bad it is, where, and what was found."""

    rule: str
    severity: Severity
    executor: str
    where: str
    message: str


Check = Callable[[Profile, ExecutorProfile], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Rule:
    """A rule: `check` gives (where, message) of each finding."""

    id: str
    severity: Severity
    summary: str
    check: Check


_RULES: dict[str, Rule] = {}


def _rule(id: str, severity: Severity, summary: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        assert id not in _RULES, f"two lint rules are called {id}"
        _RULES[id] = Rule(id, severity, summary, check)
        return check

    return add


def rules() -> tuple[Rule, ...]:
    """Every rule, in order of declaration."""
    return tuple(_RULES.values())


def lint(profile: Profile, ignore: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Findings of all rules.

    Args:
        profile: what to look at.
        ignore: ids of rules to leave out.

    Raises:
        OptionError: no rule has such an id.
    """
    unknown = sorted(ignore - _RULES.keys())
    if unknown:
        raise OptionError(f"rule: expected one of {', '.join(_RULES)}, got {', '.join(unknown)}")
    return tuple(
        Finding(rule.id, rule.severity, executor.name, where, message)
        for rule in rules()
        if rule.id not in ignore
        for executor in profile.executors
        for where, message in rule.check(profile, executor)
    )


def is_round(executor: ExecutorProfile) -> bool:
    """Whether an executor is in the hot path: its segments are those of a round."""
    return any(segment.name == "finish" for segment in executor.segments)


@_rule("default-config", "note", "a hot node runs its template's default choice")
def _default_config(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    if not is_round(executor):
        return
    for node in executor.nodes():
        if node.config is None or node.source != "default":
            continue
        share = executor.fraction(node)
        if share >= HOT_SHARE:
            yield node.name, f"{node.op} takes {share:.1%} of the round and was never tuned"


@_rule("no-kernel", "error", "a node of a triton round has no kernel")
def _no_kernel(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    for node in executor.nodes():
        if node.implementation == "triton" and node.config is None:
            yield node.name, f"{node.op} has no kernel for this call; binding it is an error"


@_rule("uncaptured", "error", "kernels are launched one by one, outside a CUDA Graph")
def _uncaptured(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    launches = sum(node.implementation == "triton" for node in executor.nodes())
    if executor.captured is False and launches:
        yield executor.name, f"{launches} nodes are launched by the host in every run"


@_rule("host-sync", "error", "a segment waits for the device on the host while it runs")
def _host_sync(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    for segment in executor.segments:
        if segment.host_syncs:
            yield segment.name, f"{segment.host_syncs} host synchronizations in one run"


@_rule("dense-q", "error", "the proposal's distribution is stored over the whole vocabulary")
def _dense_q(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    vocab = _vocab(profile)
    for node in executor.nodes():
        if not node.region.startswith("propose"):
            continue
        for value in node.outputs:
            if vocab and _last(value) in vocab and value.dtype in ("float32", "bfloat16"):
                shape = " ".join(map(str, value.shape))
                yield (
                    node.name,
                    f"stores {value.name} [{shape}]: q belongs over its candidates only",
                )


@_rule("cast-only", "warning", "a kernel of its own only changes a dtype")
def _cast_only(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    for segment in executor.segments:
        made = {node.name: node for node in segment.nodes}
        for node in segment.nodes:
            source = _cast_source(node, made)
            if source is not None:
                (result,) = node.outputs
                yield node.name, f"turns {source.name} from {source.dtype} into {result.dtype}"


@_rule("weight-twice", "warning", "one stage of a round reads a weight more than once")
def _weight_twice(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    for segment in executor.segments:
        for (stage, weight), nodes in _weight_readers(segment).items():
            if len(nodes) > 1:
                yield f"{segment.name}/{stage}", f"{weight} is read by {', '.join(nodes)}"


@_rule("never-replayed", "warning", "an executor that was started never ran beside others that did")
def _never_replayed(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    ran = any(other.replays for other in profile.executors)
    if executor.replays == 0 and ran:
        took = executor.graph_bytes or 0
        yield executor.name, f"never ran; its graphs take {took} bytes"


@_rule("spills", "warning", "a kernel keeps registers in local memory")
def _spills(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    for node in executor.nodes():
        for kernel in node.resources:
            if kernel.spill_bytes > SPILL_BYTES:
                yield node.name, f"{kernel.kernel} spills {kernel.spill_bytes} bytes a thread"


@_rule("unattributed", "note", "much of a round belongs to no node")
def _unattributed(profile: Profile, executor: ExecutorProfile) -> Iterator[tuple[str, str]]:
    lost = executor.unattributed_us
    if executor.measured is None or lost is None:
        return
    share = lost / executor.measured.median
    if share > UNATTRIBUTED_SHARE:
        yield executor.name, f"{lost:.1f} us, {share:.1%} of the round, lie between nodes"


def _vocab(profile: Profile) -> frozenset[int]:
    geometry = profile.identity.geometry
    sizes = {geometry.get("emitted_vocab"), (geometry.get("target") or {}).get("vocab")}
    return frozenset(size for size in sizes if isinstance(size, int))


def _last(value: ValueFacts) -> int | str | None:
    """The last size of a value that has more than one row."""
    rows = [size for size in value.shape[:-1] if isinstance(size, int)]
    return value.shape[-1] if rows and prod(rows) >= 1 else None


def _cast_source(node: NodeProfile, made: dict[str, NodeProfile]) -> ValueFacts | None:
    """What a node casts: it reads one value, no weight, computes nothing, and stores as many
    elements of another dtype.
    """
    if node.weights or node.flops or node.traced or len(node.inputs) != 1 or len(node.outputs) != 1:
        return None
    (result,) = node.outputs
    source = made.get(node.inputs[0])
    sources = [] if source is None else list(source.outputs)
    return next(
        (
            value
            for value in sources
            if value.shape == result.shape
            and value.dtype != result.dtype
            and value.nbytes == node.read_bytes
        ),
        None,
    )


def _weight_readers(segment: SegmentProfile) -> dict[tuple[str, str], list[str]]:
    readers: dict[tuple[str, str], list[str]] = {}
    for node in segment.nodes:
        stage = node.region.partition("/")[0]
        for weight in node.weights:
            readers.setdefault((stage, weight), []).append(node.name)
    return readers
