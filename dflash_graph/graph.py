"""The declarative op graph: op calls as nodes of a `networkx.DiGraph`, values as what its edges
carry.

A graph is immutable and built for one exact `GraphKey`. Nodes stand in program order, which is a
topological order; besides data edges there are hazard edges that keep every reader and writer of
one state in that order. Equal declarations give equal text, JSON and hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import networkx as nx

from dflash_graph.errors import GraphError, ShapeError
from dflash_graph.op import Attribute, Cost, Op, Specs
from dflash_graph.ops import get_op
from dflash_graph.tensor import TensorSpec, WeightUse

Role = Literal["input", "weight", "state", "scratch", "retained", "output"]
Backend = Literal["eager", "inductor", "triton"]

#: Roles whose storage is not made by the segment that reads them.
EXTERNAL: frozenset[Role] = frozenset({"input", "weight", "state"})


@dataclass(frozen=True)
class GraphKey:
    """What a graph is built for.

    Args:
        segment: ``"forward"``, ``"finish"``, ``"prefill"``, ``"first_token"`` or ``"catch_up"``;
            ``"state"`` where only pools are declared.
        backend: the lowering it is meant for.
        draft_tokens: K; 0 is plain decoding.
        batch: B, requests, exact.
        columns: W of a round, or the physical tokens of a prefill chunk.
        dtype: the model dtype.
    """

    segment: str
    backend: Backend
    draft_tokens: int
    batch: int
    columns: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.segment} backend={self.backend} K={self.draft_tokens} B={self.batch} "
            f"W={self.columns} {self.dtype}"
        )


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    Roles: ``input`` stands in the frame, ``weight`` and ``state`` outlive rounds, ``scratch`` lives
        in the arena,
    ``retained`` lives there from its producer until commit, ``output`` stands in the result frame.
    """

    name: str
    spec: TensorSpec
    role: Role
    weight: WeightUse | None = None


@dataclass(frozen=True)
class Node:
    """One op call. `inputs` maps an argument to a value's name, or to several for a variadic
    argument.
    """

    name: str
    op: str
    region: str
    inputs: Mapping[str, str | tuple[str, ...]]
    outputs: Mapping[str, str]
    attributes: Mapping[str, Attribute]

    def operands(self) -> Iterator[tuple[str, str]]:
        """(argument, value name) of every input, variadic ones unrolled."""
        for argument, names in self.inputs.items():
            for name in (names,) if isinstance(names, str) else names:
                yield argument, name

    @property
    def contract(self) -> Op:
        return get_op(self.op)

    def updates(self) -> tuple[str, ...]:
        """Names of the state values that the call changes."""
        names: list[str] = []
        for argument in self.contract.updated:
            given = self.inputs[argument]
            names.extend((given,) if isinstance(given, str) else given)
        return tuple(names)


@dataclass(frozen=True)
class Edge:
    """Why one node stands before another: values handed over, and states both touch (at least one
    writes).
    """

    values: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()


class Graph:
    """An immutable op graph.

    Args:
        key: what it is built for.
        nodes: op calls in program order.
        values: every value, by name, in order of first appearance.

    Raises:
        GraphError: a node reads what is not there or comes later, writes twice, breaks its op's
            contract, or changes something that is not state. The message names the node.
    """

    def __init__(self, key: GraphKey, nodes: Sequence[Node], values: Mapping[str, Value]) -> None:
        self.key = key
        self.nodes = tuple(nodes)
        self.values: Mapping[str, Value] = MappingProxyType(dict(values))
        self.digraph = self._connect()

    def _connect(self) -> nx.DiGraph:
        digraph: nx.DiGraph = nx.DiGraph()
        producer: dict[str, str] = {}
        edges: dict[tuple[str, str], Edge] = {}
        writer: dict[str, str] = {}
        readers: dict[str, list[str]] = {}

        def join(before: str, after: str, value: str, hazard: bool) -> None:
            if before == after:
                return
            edge = edges.get((before, after), Edge())
            if hazard and value not in edge.hazards:
                edge = replace(edge, hazards=(*edge.hazards, value))
            elif not hazard and value not in edge.values:
                edge = replace(edge, values=(*edge.values, value))
            edges[before, after] = edge

        written = {name for node in self.nodes for name in node.outputs.values()}
        for index, node in enumerate(self.nodes):
            if node.name in digraph:
                raise GraphError(
                    f"{node.name}: two nodes have this name; give the second call its own name"
                )
            digraph.add_node(node.name, node=node, index=index)
            updates = set(node.updates())
            for argument, name in node.operands():
                value = self._operand(node, argument, name)
                if value.role in ("scratch", "output") or (
                    value.role == "retained" and name in written
                ):
                    if name not in producer:
                        raise GraphError(
                            f"{node.name}.{argument}: reads {name!r}, which no earlier node writes"
                        )
                    join(producer[name], node.name, name, hazard=False)
                if value.role == "state":
                    if name in writer:
                        join(writer[name], node.name, name, hazard=True)
                    if name in updates:
                        for reader in readers.get(name, ()):
                            join(reader, node.name, name, hazard=True)
            for argument, name in node.operands():
                if name in updates:
                    if self.values[name].role != "state":
                        raise GraphError(
                            f"{node.name}.{argument}: changes {name!r}, whose role is "
                            f"{self.values[name].role!r}; only state may be changed in place"
                        )
                    writer[name], readers[name] = node.name, []
                elif self.values[name].role == "state":
                    readers.setdefault(name, []).append(node.name)
            for name in node.outputs.values():
                if name in producer:
                    raise GraphError(
                        f"{node.name}: writes {name!r}, already written by {producer[name]}"
                    )
                if name not in self.values or self.values[name].role in EXTERNAL:
                    raise GraphError(
                        f"{node.name}: writes {name!r}, "
                        "which is no scratch, retained or output value"
                    )
                producer[name] = node.name
            self._check_contract(node)
        for (before, after), edge in edges.items():
            digraph.add_edge(before, after, edge=edge)
        self._producer = producer
        return digraph

    def _operand(self, node: Node, argument: str, name: str) -> Value:
        if name not in self.values:
            raise GraphError(f"{node.name}.{argument}: value {name!r} does not exist in the graph")
        return self.values[name]

    def _check_contract(self, node: Node) -> None:
        try:
            inferred = node.contract.infer(
                self.specs(node), node.attributes, where=node.name, model_dtype=self.key.dtype
            )
        except ShapeError as error:
            raise GraphError(str(error)) from None
        found = {output: self.values[name].spec for output, name in node.outputs.items()}
        if found != inferred:
            raise GraphError(
                f"{node.name}: outputs are declared as { {k: str(v) for k, v in found.items()} }, "
                f"{node.op} gives { {k: str(v) for k, v in inferred.items()} }"
            )

    def specs(self, node: Node) -> dict[str, Specs]:
        """Specs of a node's arguments."""
        return {
            argument: self.values[names].spec
            if isinstance(names, str)
            else tuple(self.values[name].spec for name in names)
            for argument, names in node.inputs.items()
        }

    @cached_property
    def updated(self) -> frozenset[str]:
        """Names of the state values that some node changes."""
        return frozenset(name for node in self.nodes for name in node.updates())

    def producer(self, value: str) -> Node | None:
        """The node that writes `value`, or None if it comes from outside."""
        name = self._producer.get(value)
        return None if name is None else self.node(name)

    def node(self, name: str) -> Node:
        """The node called `name`; raises GraphError if there is none."""
        if name not in self.digraph:
            raise GraphError(f"{name}: no node has this name in {self.key}")
        node: Node = self.digraph.nodes[name]["node"]
        return node

    def by_role(self, *roles: Role) -> tuple[Value, ...]:
        """Values of these roles, in order of first appearance."""
        return tuple(value for value in self.values.values() if value.role in roles)

    def region_nodes(self, prefix: str) -> tuple[Node, ...]:
        """Nodes whose region is `prefix` or below it."""
        return tuple(
            n for n in self.nodes if n.region == prefix or n.region.startswith(prefix + "/")
        )

    def cost(self, *, context: int = 0) -> dict[str, Cost]:
        """Exact traffic of each node with `context` tokens before the block."""
        return {
            node.name: node.contract.cost(
                self.specs(node), node.attributes, context=context, model_dtype=self.key.dtype
            )
            for node in self.nodes
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description; the content hash is made of exactly this."""
        return {
            "key": {name: getattr(self.key, name) for name in self.key.__dataclass_fields__},
            "values": [
                {
                    "name": value.name,
                    "role": value.role,
                    "shape": list(value.spec.shape),
                    "dtype": value.spec.dtype,
                    **({"parts": list(value.weight.parts)} if value.weight else {}),
                }
                for value in self.values.values()
            ],
            "nodes": [
                {
                    "name": node.name,
                    "op": node.op,
                    "region": node.region,
                    "inputs": {
                        k: v if isinstance(v, str) else list(v) for k, v in node.inputs.items()
                    },
                    "outputs": dict(node.outputs),
                    "attributes": {
                        k: list(v) if isinstance(v, tuple) else v
                        for k, v in node.attributes.items()
                    },
                }
                for node in self.nodes
            ],
        }

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the canonical JSON, in hex: what compiled artefacts are keyed by."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class GraphBuilder:
    """Declares a graph call by call.

    Example:
        >>> import dflash_graph.ops
        >>> g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 1, "float32"))
        >>> x = g.input("x", (1, 1, 8), "float32")
        >>> w = g.weight("norm", ("target/norm.weight",), (8,))
        >>> with g.region("verify"):
        ...     y = g.output(g.call("rms_norm", x=x, weight=w, eps=1e-6, offset=True))
        >>> [node.name for node in g.build().nodes]
        ['verify/rms_norm']
    """

    def __init__(self, key: GraphKey) -> None:
        self.key = key
        self._nodes: list[Node] = []
        self._names: set[str] = set()
        self._values: dict[str, Value] = {}
        self._regions: list[str] = []

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Nodes called inside stand in region `name` below the current one."""
        self._regions.append(name)
        try:
            yield
        finally:
            self._regions.pop()

    def input(self, name: str, shape: tuple[int | str, ...], dtype: str = "int32") -> Value:
        """A field of the input frame."""
        return self._add(Value(name, TensorSpec(shape, dtype), "input"))

    def weight(
        self, name: str, parts: tuple[str, ...], shape: tuple[int, ...], dtype: str | None = None
    ) -> Value:
        """A weight made of checkpoint tensors `parts`, in the model dtype unless `dtype` says
        otherwise.
        """
        spec = TensorSpec(shape, dtype or self.key.dtype)
        return self._add(Value(name, spec, "weight", WeightUse(parts, spec)))

    def state(self, name: str, shape: tuple[int | str, ...], dtype: str | None = None) -> Value:
        """State that outlives a round; capacities in `shape` are names."""
        return self._add(Value(name, TensorSpec(shape, dtype or self.key.dtype), "state"))

    def retained(self, value: Value) -> Value:
        """A value that another segment of the round produced and kept."""
        return self._add(replace(value, role="retained"))

    def retain(self, value: Value) -> Value:
        """Keep a value of this segment until commit."""
        return self._change(value, "retained")

    def output(self, value: Value) -> Value:
        """Return a value in the result frame."""
        return self._change(value, "output")

    def call(self, op: str, label: str = "", /, **arguments: Any) -> Any:
        """Call an op.

        Args:
            op: its name.
            label: name of the node in its region; the op's name by default, numbered on repetition.
            **arguments: values (or lists of them) and attributes of the op's contract.

        Returns:
            The output value, a tuple of them, or None for an op without outputs.

        Raises:
            GraphError: the call is outside the contract.
        """
        contract = get_op(op)
        region = "/".join(self._regions)
        node_name = self._unique("/".join((*self._regions, label or op)))
        inputs: dict[str, str | tuple[str, ...]] = {}
        attributes: dict[str, Attribute] = {}
        for argument, given in arguments.items():
            if isinstance(given, Value):
                inputs[argument] = given.name
            elif isinstance(given, (list, tuple)) and given and isinstance(given[0], Value):
                inputs[argument] = tuple(value.name for value in given)
            else:
                attributes[argument] = given
        specs: dict[str, Specs] = {
            argument: self._values[names].spec
            if isinstance(names, str)
            else tuple(self._values[name].spec for name in names)
            for argument, names in inputs.items()
        }
        try:
            inferred = contract.infer(
                specs, attributes, where=node_name, model_dtype=self.key.dtype
            )
        except ShapeError as error:
            raise GraphError(str(error)) from None
        made = {
            output: self._add(
                Value(node_name if len(inferred) == 1 else f"{node_name}.{output}", spec, "scratch")
            )
            for output, spec in inferred.items()
        }
        self._nodes.append(
            Node(
                node_name,
                op,
                region,
                MappingProxyType({argument: inputs[argument] for argument in contract.inputs}),
                MappingProxyType({output: value.name for output, value in made.items()}),
                MappingProxyType(
                    {attribute: attributes[attribute] for attribute in contract.attributes}
                ),
            )
        )
        values = tuple(made.values())
        return values[0] if len(values) == 1 else (values or None)

    def build(self) -> Graph:
        """The finished graph, validated."""
        return Graph(self.key, self._nodes, self._values)

    def _add(self, value: Value) -> Value:
        known = self._values.setdefault(value.name, value)
        if known != value:
            raise GraphError(
                f"value {value.name!r} is declared as {known.spec} and as {value.spec}"
            )
        return known

    def _change(self, value: Value, role: Role) -> Value:
        if self._values[value.name].role != "scratch":
            raise GraphError(
                f"value {value.name!r}: only scratch becomes {role}, it is {value.role}"
            )
        changed = replace(value, role=role)
        self._values[value.name] = changed
        return changed

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}.{count}"
        self._names.add(candidate)
        return candidate
