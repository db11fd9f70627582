"""parts: what the document of a profile is made of, and with it the schema.

Times are microseconds unless a name says otherwise, sizes bytes. What nobody measured is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

Bound = Literal["memory", "compute", "latency"]
Implementation = Literal["eager", "inductor", "triton", "library"]


def _require_inverse(value: float) -> float:
    if 0 < value < 1e-30:
        raise ValueError(f"expected 0 or at least 1e-30, got {value}")
    return value


#: Numbers and times that sums, ratios and logarithms of stay finite.
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Time = Annotated[float, Field(ge=0, le=1e18), AfterValidator(_require_inverse)]


class Part(BaseModel):
    """A part of the document: never edited, and without fields that the schema does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Samples(Part):
    """Repeated measurements of one thing, microseconds, in order of time."""

    values: tuple[Time, ...] = Field(min_length=1)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles; 0.0 of one measurement."""
        ordered = sorted(self.values)
        count = len(ordered)
        if count < 2:
            return 0.0
        half = count // 2
        return (median(ordered[count - half :]) - median(ordered[:half])) / 2


class DeviceIdentity(Part):
    """What the profile is for. `capability` is 90 for 9.0."""

    kind: str
    name: str
    capability: Count | None = None
    memory_bytes: Count | None = None
    driver: str | None = None


class Identity(Part):
    """What was built.

    Args:
        name: of the pair: a preset or the directories' names.
        created: ISO 8601, UTC.
        device: see `DeviceIdentity`.
        versions: package -> version.
        geometry: `target` and `draft` as JSON values.
        geometry_hash: of them.
        options: startup choices.
        choices: name of the tuned profile that kernels were chosen by, or "default".
    """

    name: str
    created: str
    device: DeviceIdentity
    versions: dict[str, str]
    geometry: dict[str, Any]
    geometry_hash: str
    options: dict[str, Any]
    choices: str = "default"

    @field_validator("geometry")
    @classmethod
    def _has_vocabularies(cls, geometry: dict[str, Any]) -> dict[str, Any]:
        target = geometry.get("target")
        if target is not None and not isinstance(target, dict):
            raise ValueError(f"expected target, an object, got {target!r}")
        for size in (geometry.get("emitted_vocab"), (target or {}).get("vocab")):
            if size is not None and type(size) is not int:
                raise ValueError(f"expected vocabularies, numbers of tokens, got {size!r}")
        return geometry


class Ceiling(Part):
    """What the device's memory and arithmetic give at most.

    Args:
        read_tb_per_s: 10^12 bytes a second.
        tflop_per_s: 10^12 operations a second; null where nobody stated it.
        source: where the numbers come from.
    """

    read_tb_per_s: float = Field(ge=1e-6, le=1e12)
    tflop_per_s: float | None = Field(default=None, ge=1e-6, le=1e12)
    source: Literal["stated", "measured"] = "stated"


class ValueFacts(Part):
    """A value that a node stores."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    nbytes: Count | None = None
    role: str


class Config(Part):
    """How a node's kernel is specialised and launched."""

    template: str
    holes: dict[str, int | bool | str]
    num_warps: int
    num_stages: int

    @property
    def text(self) -> str:
        """On one line, holes by name."""
        holes = " ".join(f"{name}={value}" for name, value in sorted(self.holes.items()))
        return f"{holes} warps={self.num_warps} stages={self.num_stages}"


class KernelResources(Part):
    """What one compiled kernel takes: registers a thread, bytes of shared memory and of spills."""

    kernel: str
    registers: Count
    shared_bytes: Count
    spill_bytes: Count


class NodeProfile(Part):
    """One node of a segment.

    Args:
        name: unique in its segment.
        region: path such as `verify/layer.3/mlp`.
        op: name of the op.
        step: number of its step in the executor's plan; nodes of a traced step share it.
        implementation: what runs it; for `inductor` whole traced steps are compiled.
        traced: the node is part of a step that is compiled as a whole.
        inputs: nodes of the same segment whose results it reads.
        outputs: what it makes.
        weights: storage of the weights it reads, as the checkpoint's tensors.
        config: specialisation of its kernel; null without a template.
        source: what the config comes from: "default", else the file of kernel choices, which ships,
            is the user's or was named.
        resources: of its compiled kernels; empty where they were not compiled.
        read_bytes, write_bytes, flops: by the op's contract.
        floor_us: the larger of bytes and operations over the ceiling.
        measured: null where the node was not timed; nodes of one traced step share what it took,
            by floor.
        bound: what limits it: `latency` where it takes several times its floor, or where its floor
            is below what a launch takes.
    """

    name: str
    region: str
    op: str
    step: Count
    implementation: Implementation
    traced: bool = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[ValueFacts, ...] = ()
    weights: tuple[str, ...] = ()
    config: Config | None = None
    source: str = "default"
    resources: tuple[KernelResources, ...] = ()
    read_bytes: Count
    write_bytes: Count
    flops: Count
    floor_us: Time
    measured: Samples | None = None
    bound: Bound

    @property
    def time_us(self) -> float | None:
        """Median of what was measured."""
        return None if self.measured is None else self.measured.median


class SegmentProfile(Part):
    """One segment of an executor: `forward` and `finish` of a round.

    Args:
        name: the segment's.
        graph_hash: of the graph that runs (after combining).
        first_step: number of its first step in the plan.
        nodes: in running order.
        measured: of the whole segment as it runs (captured where it is).
        host_syncs: host synchronizations seen in one run of it; null where nobody looked.
    """

    name: str
    graph_hash: str
    first_step: Count
    nodes: tuple[NodeProfile, ...]
    measured: Samples | None = None
    host_syncs: Count | None = None


class BufferProfile(Part):
    """A planned buffer; both ends of its life are included, as step numbers."""

    name: str
    values: tuple[str, ...]
    offset: Count
    nbytes: Count
    first: Count
    last: Count


class PlanProfile(Part):
    """The arena plan of one executor, for the address-by-time picture.

    Args:
        steps: names of the steps of all segments.
        boundaries: step number at which each segment starts.
    """

    arena_bytes: Count
    lower_bound_bytes: Count
    steps: tuple[str, ...]
    boundaries: tuple[Count, ...]
    buffers: tuple[BufferProfile, ...]

    @model_validator(mode="after")
    def _lies_inside(self) -> PlanProfile:
        steps = len(self.steps)
        if any(start > steps for start in self.boundaries):
            raise ValueError(f"expected boundaries in 0..{steps}, got {list(self.boundaries)}")
        for found in self.buffers:
            if not found.first <= found.last < steps:
                raise ValueError(
                    f"buffer {found.name!r}: expected first <= last < {steps} steps, got "
                    f"{found.first} and {found.last}"
                )
            if found.offset + found.nbytes > self.arena_bytes:
                raise ValueError(
                    f"buffer {found.name!r}: expected an end of at most {self.arena_bytes} (the "
                    f"arena), got {found.offset + found.nbytes}"
                )
        return self


class ExecutorProfile(Part):
    """One executor.

    Args:
        name: such as `round B=2`, `sampling B=2`, `first token`.
        batch: B.
        columns: W of a round, physical tokens of a chunk.
        context: tokens before the block that costs and times are for.
        captured: whether its segments are CUDA Graphs; null where nothing was started.
        replays: how often its first segment ran since start-up; null where nothing was started.
        capture_seconds, graph_bytes: of its capture; null where nothing was captured.
        frame_bytes: input and result frame.
        measured: whole rounds: all segments one after another.
    """

    name: str
    batch: Count
    columns: Count
    context: Count
    segments: tuple[SegmentProfile, ...]
    plan: PlanProfile
    frame_bytes: Count
    captured: bool | None = None
    replays: Count | None = None
    capture_seconds: Time | None = None
    graph_bytes: Count | None = None
    measured: Samples | None = None

    @field_validator("measured")
    @classmethod
    def _takes_time(cls, measured: Samples | None) -> Samples | None:
        if measured is not None and min(measured.values) <= 0:
            raise ValueError(f"expected times of rounds above 0, got {min(measured.values)}")
        return measured

    def nodes(self) -> Iterator[NodeProfile]:
        """The nodes of all segments, in running order."""
        for segment in self.segments:
            yield from segment.nodes

    @property
    def floor_us(self) -> float:
        """Sum of the nodes' floors."""
        return sum(node.floor_us for node in self.nodes())

    @property
    def attributed_us(self) -> float | None:
        """Sum of what was measured of nodes; None where none was timed."""
        times = [node.time_us for node in self.nodes() if node.time_us is not None]
        return sum(times) if times else None

    @property
    def unattributed_us(self) -> float | None:
        """Round less its nodes: launch gaps and frames; negative where nodes overlap in it."""
        attributed = self.attributed_us
        if self.measured is None or attributed is None:
            return None
        return self.measured.median - attributed

    def fraction(self, node: NodeProfile) -> float:
        """Share of a node in the round: measured where it was, else of the floors."""
        if self.measured is not None and node.time_us is not None:
            return node.time_us / self.measured.median if self.measured.median else 0.0
        floor = self.floor_us
        return node.floor_us / floor if floor else 0.0


class MemoryClass(Part):
    """One class of memory: `weights.target`, `weights.draft`, `state.<kind>`, `arena`, `frames`,
    `graphs`. Null is what is not known before a start-up.
    """

    name: str
    planned_bytes: Count | None
    actual_bytes: Count | None = None


class Stage(Part):
    """A stage of a start-up and its seconds."""

    name: str
    seconds: Time


class AcceptanceCounts(Part):
    """What rounds did, in tokens; see `dflash_graph.statistics.Statistics`.

    Args:
        ms_per_round: wall time of a round, where it was measured.
    """

    rounds: Count
    drafted: Count
    committed: Count
    verified_by_position: tuple[Count, ...]
    accepted_by_position: tuple[Count, ...]
    ms_per_round: Time | None = None
