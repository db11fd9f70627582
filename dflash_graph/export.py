"""export: a graph as text, JSON, DOT and Mermaid. Equal graphs give equal bytes in every form.

Text is for reading and for golden files, JSON is what the content hash is made of, DOT and Mermaid
are pictures. A picture of 64 layers is of no use, so both fold: layers that are alike into one of
them, or every region at some depth into one box.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from dflash_graph.errors import OptionError
from dflash_graph.graph import Edge, Graph, Node, Role

#: How a picture folds: ``"layers"``, the depth of the regions that become one box, or not at all.
Collapse = Literal["layers"] | int | None

#: Stands before a value's name in text.
SIGILS: Final[Mapping[Role, str]] = {
    "input": "#",
    "weight": "$",
    "state": "@",
    "scratch": "%",
    "retained": "^",
    "output": "*",
}

_HASH_PREFIX: Final = 16
_LAYER: Final = re.compile(r"[^/]*\.\d+")

#: A region, as the parts of its path.
Path = tuple[str, ...]


def to_text(graph: Graph, *, values: bool = False) -> str:
    """A graph as text: a header, then a line a node below the headings of its region.

    A value is written with the sigil of its role, and `!` follows a state that the node changes.
    Names of computed values are relative to the node's region; a slash leads one from elsewhere.

    Args:
        graph: what to print.
        values: append a table of all values.
    """
    counts = ", ".join(
        f"{len(found)} {role} ({sigil})"
        for role, sigil in SIGILS.items()
        if (found := graph.by_role(role))
    )
    lines = [
        str(graph.key),
        f"hash {graph.content_hash[:_HASH_PREFIX]}, {len(graph.nodes)} nodes",
        f"values: {counts}",
    ]
    region: Path = ()
    for node in graph.nodes:
        path = _path(node)
        shared = _common(region, path)
        if shared == 0 and path != region:
            lines.append("")
        lines += ["  " * depth + path[depth] for depth in range(shared, len(path))]
        lines.append("  " * len(path) + _node_line(graph, node))
        region = path
    if values:
        lines += ["", *_value_table(graph)]
    return "\n".join(lines) + "\n"


def to_json(graph: Graph) -> str:
    """A graph as a JSON document: its content hash and `Graph.to_dict`."""
    return json.dumps({"hash": graph.content_hash, **graph.to_dict()}, indent=2) + "\n"


def to_dot(graph: Graph, *, collapse: Collapse = None) -> str:
    """A graph as a DOT digraph; regions are clusters.

    Solid edges hand values over, dashed ones order two users of a state, dotted ones lead from one
    layer to the next of those that were folded into one.

    Args:
        graph: what to draw.
        collapse: `"layers"` folds layers that are alike into the first of them; a number folds
            every region at that depth into one box; None draws every node.

    Raises:
        OptionError: `collapse` is none of these.
    """
    picture = _draw(graph, collapse)
    lines = [
        "digraph {",
        "  rankdir=TB",
        f"  label={_dot(str(graph.key))}",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif"]',
    ]
    clusters = (f"cluster_{number}" for number in range(len(picture.titles)))

    def write(path: Path, indent: str) -> None:
        for box in picture.boxes_in(path):
            lines.append(
                f"{indent}{box.name} [label={_dot(*box.lines)}, tooltip={_dot(box.detail)}, "
                f"fillcolor={_FILL[box.kind]}]"
            )
        for inner in picture.regions_in(path):
            lines.append(f"{indent}subgraph {next(clusters)} {{")
            lines.append(f"{indent}  label={_dot(picture.titles[inner])}")
            write(inner, indent + "  ")
            lines.append(f"{indent}}}")

    write((), "  ")
    for arrow in picture.arrows:
        style = _DOT_STYLE[arrow.kind]
        lines.append(f"  {arrow.before} -> {arrow.after} [tooltip={_dot(arrow.detail)}{style}]")
    lines.append("}")
    return "\n".join(lines) + "\n"


def to_mermaid(graph: Graph, *, collapse: Collapse = None) -> str:
    """A graph as a Mermaid flowchart; regions are subgraphs.

    Solid edges hand values over, dotted ones order two users of a state, thick ones lead from one
    layer to the next of those that were folded into one. Mermaid draws at most 500 edges unless
    told otherwise.

    Args:
        graph: what to draw.
        collapse: as in `to_dot`.

    Raises:
        OptionError: `collapse` is none of these.
    """
    picture = _draw(graph, collapse)
    lines = ["flowchart TB", f"  %% {graph.key}"]
    identifiers = (f"r{number}" for number in range(len(picture.titles)))

    def write(path: Path, indent: str) -> None:
        for box in picture.boxes_in(path):
            lines.append(f"{indent}{box.name}[{_mermaid(*box.lines)}]:::{box.kind}")
        for inner in picture.regions_in(path):
            lines.append(
                f"{indent}subgraph {next(identifiers)} [{_mermaid(picture.titles[inner])}]"
            )
            write(inner, indent + "  ")
            lines.append(f"{indent}end")

    write((), "  ")
    for arrow in picture.arrows:
        lines.append(f"  {arrow.before} {_MERMAID_ARROW[arrow.kind]} {arrow.after}")
    lines += [
        f"  classDef {kind} fill:{color},stroke:#555" for kind, color in _MERMAID_FILL.items()
    ]
    return "\n".join(lines) + "\n"


def _path(node: Node) -> Path:
    return tuple(node.region.split("/")) if node.region else ()


def _common(a: Path, b: Path) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def _node_line(graph: Graph, node: Node) -> str:
    updated = set(node.updates())

    def shown(name: str) -> str:
        role = graph.values[name].role
        if role in ("scratch", "retained", "output"):
            local = name.removeprefix(f"{node.region}/") if node.region else name
            name = local if local != name or not node.region else f"/{name}"
        return f"{SIGILS[role]}{name}{'!' if name in updated else ''}"

    arguments = [
        f"{argument}={shown(names)}"
        if isinstance(names, str)
        else f"{argument}=[{', '.join(shown(name) for name in names)}]"
        for argument, names in node.inputs.items()
    ]
    attributes = [f"{name}={_attribute(value)}" for name, value in node.attributes.items()]
    call = ", ".join(arguments) + ("; " if attributes else "") + ", ".join(attributes)
    results = ", ".join(
        f"{shown(name)} {graph.values[name].spec}" for name in node.outputs.values()
    )
    label = node.name.removeprefix(f"{node.region}/") if node.region else node.name
    return f"{label} = {node.op}({call})" + (f" -> {results}" if results else "")


def _attribute(value: object) -> str:
    if isinstance(value, tuple):
        return f"({','.join(str(one) for one in value)})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value_table(graph: Graph) -> Iterator[str]:
    yield "values"
    width = max((len(name) for name in graph.values), default=0)
    for value in graph.values.values():
        parts = f"  {' + '.join(value.weight.parts)}" if value.weight else ""
        yield f"  {SIGILS[value.role]}{value.name:<{width}}  {value.spec}{parts}"


BoxKind = Literal["op", "changes", "folded"]
ArrowKind = Literal["data", "order", "repeat"]

_FILL: Final[Mapping[BoxKind, str]] = {
    "op": '"#ffffff"',
    "changes": '"#ffe3c2"',
    "folded": '"#dbe9ff"',
}
_MERMAID_FILL: Final[Mapping[BoxKind, str]] = {
    kind: color.strip('"') for kind, color in _FILL.items()
}
_DOT_STYLE: Final[Mapping[ArrowKind, str]] = {
    "data": "",
    "order": ", style=dashed",
    "repeat": ", style=dotted, constraint=false",
}
_MERMAID_ARROW: Final[Mapping[ArrowKind, str]] = {"data": "-->", "order": "-.->", "repeat": "==>"}


@dataclass(frozen=True)
class _Box:
    """One drawn node."""

    name: str
    region: Path
    lines: tuple[str, ...]
    detail: str
    kind: BoxKind


@dataclass(frozen=True)
class _Arrow:
    """One drawn edge between boxes."""

    before: str
    after: str
    kind: ArrowKind
    detail: str


@dataclass(frozen=True)
class _Picture:
    """What DOT and Mermaid draw; `titles` has every region that is drawn as a frame."""

    titles: Mapping[Path, str]
    boxes: tuple[_Box, ...]
    arrows: tuple[_Arrow, ...]

    def boxes_in(self, path: Path) -> list[_Box]:
        return [box for box in self.boxes if box.region == path]

    def regions_in(self, path: Path) -> list[Path]:
        return [inner for inner in self.titles if inner[:-1] == path]


@dataclass
class _Fold:
    """Which box stands for each node, and the titles of frames that stand for several."""

    boxes: dict[str, str] = field(default_factory=dict)  # node -> node or region that is drawn
    titles: dict[Path, str] = field(default_factory=dict)


def _draw(graph: Graph, collapse: Collapse) -> _Picture:
    if collapse == "layers":
        fold = _fold_layers(graph)
    elif collapse is None:
        fold = _Fold({node.name: node.name for node in graph.nodes})
    elif isinstance(collapse, int) and not isinstance(collapse, bool) and collapse >= 1:
        fold = _fold_depth(graph, collapse)
    else:
        raise OptionError(f"collapse: expected 'layers', a depth from 1, or None, got {collapse!r}")

    members: dict[str, list[Node]] = {}
    for node in graph.nodes:
        members.setdefault(fold.boxes[node.name], []).append(node)
    boxes = {
        key: _box(graph, key, nodes, f"n{number}")
        for number, (key, nodes) in enumerate(members.items())
    }
    titles: dict[Path, str] = {}
    for box in boxes.values():
        for depth in range(1, len(box.region) + 1):
            path = box.region[:depth]
            titles.setdefault(path, fold.titles.get(path, path[-1]))
    return _Picture(titles, tuple(boxes.values()), _arrows(graph, fold, boxes))


def _box(graph: Graph, key: str, nodes: Sequence[Node], name: str) -> _Box:
    first = nodes[0]
    if key != first.name:  # the key is a region
        *outer, label = key.split("/")
        changed = len({state for node in nodes for state in node.updates()})
        lines = (label, f"{len(nodes)} ops" + (f", changes {changed} states" if changed else ""))
        return _Box(name, tuple(outer), lines, key, "folded")
    label = first.name.removeprefix(f"{first.region}/")
    specs = tuple(
        f"{graph.values[value].spec}" + (" retained" if _is_retained(graph, value) else "")
        for value in first.outputs.values()
    )
    op = () if label.split(".")[0] == first.op else (first.op,)
    kind: BoxKind = "changes" if first.updates() else "op"
    return _Box(name, _path(first), (label, *op, *specs), _node_line(graph, first), kind)


def _is_retained(graph: Graph, value: str) -> bool:
    return graph.values[value].role == "retained"


def _arrows(graph: Graph, fold: _Fold, boxes: Mapping[str, _Box]) -> tuple[_Arrow, ...]:
    """Edges between boxes, each pair once; one that leads backwards repeats a folded layer."""
    found: dict[tuple[str, str], tuple[ArrowKind, str]] = {}
    order = {key: index for index, key in enumerate(boxes)}
    rank: Mapping[ArrowKind, int] = {"data": 0, "repeat": 1, "order": 2}
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    edges = sorted(graph.digraph.edges(data="edge"), key=lambda e: (position[e[0]], position[e[1]]))
    for before, after, edge in edges:
        pair = fold.boxes[before], fold.boxes[after]
        if pair[0] == pair[1]:
            continue
        kind = _arrow_kind(edge, order[pair[0]] > order[pair[1]])
        if pair not in found or rank[kind] < rank[found[pair][0]]:
            found[pair] = kind, ", ".join(edge.values or edge.hazards)
    return tuple(
        _Arrow(boxes[before].name, boxes[after].name, kind, detail)
        for (before, after), (kind, detail) in found.items()
    )


def _arrow_kind(edge: Edge, backwards: bool) -> ArrowKind:
    if backwards:
        return "repeat"
    return "data" if edge.values else "order"


def _fold_depth(graph: Graph, depth: int) -> _Fold:
    """Every region at `depth` becomes one box; nodes above it stay."""
    fold = _Fold()
    for node in graph.nodes:
        path = _path(node)
        fold.boxes[node.name] = "/".join(path[:depth]) if len(path) >= depth else node.name
    return fold


def _fold_layers(graph: Graph) -> _Fold:
    """Layers of one parent that are alike are drawn as the first of them.

    Alike means the same ops with the same attributes, shapes and wiring inside; which weights they
    read and whether a later segment needs a result makes no difference.
    """
    layers: dict[Path, list[Node]] = {}
    fold = _Fold({node.name: node.name for node in graph.nodes})
    for node in graph.nodes:
        path = _path(node)
        for depth, part in enumerate(path, start=1):
            if _LAYER.fullmatch(part):
                layers.setdefault(path[:depth], []).append(node)
                break
    kinds: dict[tuple[object, ...], list[Path]] = {}
    for path, nodes in layers.items():
        kinds.setdefault((path[:-1], *_likeness(graph, path, nodes)), []).append(path)
    for alike in kinds.values():
        first = alike[0]
        if len(alike) > 1:
            fold.titles[first] = f"{first[-1]} .. x{len(alike)}"
        for path in alike:
            for node, shown in zip(layers[path], layers[first], strict=True):
                fold.boxes[node.name] = shown.name
    return fold


def _likeness(graph: Graph, path: Path, nodes: Sequence[Node]) -> Iterator[object]:
    """What two layers must share to be drawn as one."""
    made: dict[str, int] = {}
    for node in nodes:
        sources = tuple((argument, made.get(name)) for argument, name in node.operands())
        specs = tuple(graph.values[name].spec for name in node.outputs.values())
        yield _path(node)[len(path) :], node.op, tuple(node.attributes.items()), sources, specs
        for name in node.outputs.values():
            made[name] = len(made)


def _quoted(escape: Callable[[str], str], lines: Sequence[str], separator: str) -> str:
    return '"' + separator.join(escape(line) for line in lines) + '"'


def _dot(*lines: str) -> str:
    """A DOT string of one or more lines."""
    return _quoted(lambda line: line.replace("\\", "\\\\").replace('"', '\\"'), lines, "\\n")


_MERMAID_ENTITIES: Final = str.maketrans(
    {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\n": " "}
)


def _mermaid(*lines: str) -> str:
    """A Mermaid string of one or more lines."""
    return _quoted(lambda line: line.translate(_MERMAID_ENTITIES), lines, "<br/>")
