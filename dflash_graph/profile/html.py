"""html: a profile as one self-contained page, and the document that such a page carries.

The page asks nothing of a network: styles and pictures stand in it, and its own content policy
forbids the rest. Whatever a document says is text there, never markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from typing import Any, Final

import jinja2
from markupsafe import Markup

from dflash_graph.errors import ProfileError
from dflash_graph.profile.bars import length_bars, survival_bars
from dflash_graph.profile.charts import (
    Roofline,
    Timeline,
    Workspace,
    roofline,
    spread_text,
    timeline,
    workspace,
)
from dflash_graph.profile.document import Profile
from dflash_graph.profile.marks import count_text
from dflash_graph.profile.parts import ExecutorProfile, NodeProfile
from dflash_graph.profile.quantities import rate_text, ratio_text, time_text
from dflash_graph.profile.regions import Region, node_us, styles_of, top_region, tree
from dflash_graph.report import size_text

_TEMPLATE: Final = "page.html.jinja"

#: Id of the script element that holds the document.
_DOCUMENT_ID: Final = "profile-document"

#: What may not stand in a script element as it is; in a JSON string the escapes mean the same.
_IN_SCRIPTS: Final = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}


def render_html(profile: Profile) -> str:
    """The page of a profile.

    Args:
        profile: the document; nothing in it needs to be measured.

    Returns:
        One HTML file: no link, image, font or script is outside of it.
    """
    styles = styles_of(profile.executors)
    executors = [_ExecutorView.of(found, profile, styles) for found in profile.executors]
    counts = profile.acceptance
    return _page().render(
        profile=profile,
        executors=executors,
        opened=_opened(profile),
        styles=styles,
        length_bars=length_bars(counts) if counts and counts.rounds else None,
        survival_bars=survival_bars(counts) if counts and counts.verified_by_position else None,
        memory_rows=_memory_rows(profile),
        startup_seconds=sum(stage.seconds for stage in profile.startup),
        document_id=_DOCUMENT_ID,
        document=_script_json(profile),
    )


def document_in(html: str, where: str = "page") -> Profile:
    """The document that a page carries.

    Args:
        html: what `render_html` returned.
        where: what errors name.

    Raises:
        ProfileError: the page carries none, or it is damaged.
    """
    reader = _DocumentReader()
    reader.feed(html)
    reader.close()
    if reader.text is None:
        raise ProfileError(
            f"{where}: expected a page with a profile (script element {_DOCUMENT_ID!r}), got none"
        )
    return Profile.parse(reader.text, where)


class _DocumentReader(HTMLParser):
    """Reads the script element that holds the document."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text: str | None = None
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script" and dict(attrs).get("id") == _DOCUMENT_ID:
            self._inside, self.text = True, ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside and self.text is not None:
            self.text += data


def _script_json(profile: Profile) -> Markup:
    """The document as JSON that no script element ends early."""
    text = json.dumps(profile.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_IN_SCRIPTS))


@dataclass(frozen=True)
class _RegionRow:
    """A top region in the table below a timeline; `share` is of the round's time."""

    name: str
    style: str
    nodes: int
    floor_us: float
    measured_us: float | None
    share: float
    bounds: str


@dataclass(frozen=True)
class _ExecutorView:
    """What the page shows of one executor."""

    facts: ExecutorProfile
    count: int
    us: float
    timeline: Timeline
    roofline: Roofline | None
    workspace: Workspace | None
    rows: tuple[_RegionRow, ...]
    regions: tuple[Region, ...]

    @classmethod
    def of(
        cls, executor: ExecutorProfile, profile: Profile, styles: Mapping[str, str]
    ) -> _ExecutorView:
        nodes = tuple(executor.nodes())
        return cls(
            facts=executor,
            count=len(nodes),
            us=sum(map(node_us, nodes)),
            timeline=timeline(executor, styles),
            roofline=roofline(executor, profile.ceiling, styles),
            workspace=workspace(executor, styles),
            rows=tuple(_region_rows(executor, styles)),
            regions=tree(nodes),
        )


def _region_rows(executor: ExecutorProfile, styles: Mapping[str, str]) -> Iterator[_RegionRow]:
    for top in dict.fromkeys(top_region(node.region) for node in executor.nodes()):
        nodes = [node for node in executor.nodes() if top_region(node.region) == top]
        times = [node.time_us for node in nodes if node.time_us is not None]
        bounds: dict[str, int] = {}
        for node in nodes:
            bounds[node.bound] = bounds.get(node.bound, 0) + 1
        yield _RegionRow(
            name=top,
            style=styles[top],
            nodes=len(nodes),
            floor_us=sum(node.floor_us for node in nodes),
            measured_us=sum(times) if times else None,
            share=sum(map(executor.fraction, nodes)),
            bounds=", ".join(f"{count} {bound}" for bound, count in sorted(bounds.items())),
        )


def _opened(profile: Profile) -> int:
    """Which executor the page opens with: the first that was measured, else the first."""
    measured = (
        number
        for number, executor in enumerate(profile.executors)
        if executor.measured is not None or executor.attributed_us is not None
    )
    return next(measured, 0)


@dataclass(frozen=True)
class _MemoryRow:
    """A class of memory; widths are percent of the largest class."""

    name: str
    planned: int | None
    actual: int | None
    planned_width: float
    actual_width: float


def _memory_rows(profile: Profile) -> tuple[_MemoryRow, ...]:
    largest = max(
        (max(found.planned_bytes or 0, found.actual_bytes or 0) for found in profile.memory),
        default=0,
    )

    def width(nbytes: int | None) -> float:
        return 100 * (nbytes or 0) / largest if largest else 0.0

    return tuple(
        _MemoryRow(
            found.name,
            found.planned_bytes,
            found.actual_bytes,
            width(found.planned_bytes),
            width(found.actual_bytes),
        )
        for found in profile.memory
    )


@cache
def _page() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dflash_graph.profile", ""),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        time=lambda us: "-" if us is None else time_text(us),
        size=lambda nbytes: "-" if nbytes is None else size_text(nbytes),
        spread=lambda samples: "-" if samples is None else spread_text(samples),
        rate=lambda tflop: rate_text(tflop * 1e12),
        seconds=lambda value: f"{value:.2f}",
        share=lambda part: f"{part:.1%}",
        ratio=ratio_text,
        number=lambda value: f"{value:.3f}".rstrip("0").rstrip("."),
        count=count_text,
        plain=lambda value: "-" if value is None else value,
        pretty=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        near=_near,
        short=_short,
    )
    environment.globals.update(node_us=node_us, resource_sums=_resource_sums)
    return environment.get_template(_TEMPLATE)


def _short(node: NodeProfile) -> str:
    """A node's name within its region."""
    return _near(node.name, node.region)


def _near(name: str, region: str) -> str:
    """A name as it is said within a region: without the region's path."""
    return name.removeprefix(f"{region}/") if region else name


def _resource_sums(node: NodeProfile) -> dict[str, Any]:
    """The largest registers and shared memory of a node's kernels, and all of their spills."""
    if not node.resources:
        return {"registers": None, "shared": None, "spills": None}
    return {
        "registers": max(kernel.registers for kernel in node.resources),
        "shared": max(kernel.shared_bytes for kernel in node.resources),
        "spills": sum(kernel.spill_bytes for kernel in node.resources),
    }
