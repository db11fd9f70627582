"""The page of a profile in a real browser: what it looks like at two widths, in light and in dark.

The browser is Chromium, spoken to through its debugging pipe: JSON messages that end with a zero.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dflash_graph.profile.document import Profile
from dflash_graph.profile.html import render_html
from dflash_graph.profile.parts import NodeProfile

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH"),
]

NARROW, WIDE = (360, 740), (1600, 1000)

#: Counts a picture's colours; a picture of nothing has one, of text and rectangles hundreds.
LOOK = """
(async () => {
  const image = new Image();
  image.src = "data:image/png;base64," + %s;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  let light = 0;
  for (const [pixel, count] of counts)
    light += count * ((pixel & 255) + (pixel >> 8 & 255) + (pixel >> 16 & 255)) / 765;
  return {
    width: image.width, height: image.height, colours: counts.size,
    largest: Math.max(...counts.values()) / pixels.length, light: light / pixels.length,
  };
})()
"""

#: Everything that stands out of the page to the right and not inside a box that scrolls.
OVERFLOW = """
[...document.querySelectorAll("body *")].filter(element => {
  const box = element.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !element.closest(".scroll, pre, svg");
}).map(element => element.outerHTML.slice(0, 80))
"""


class Tab:
    """One page of the browser."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self._target, self.session = target, attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self.session, **parameters)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self.session]

    def of_method(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def look_like(self, size: tuple[int, int], scheme: str) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", media="", features=[feature])

    def open(self, path: Path) -> None:
        before = len(self.of_method("Page.loadEventFired"))
        self.send("Page.navigate", url=path.as_uri())
        self._browser.wait(lambda: len(self.of_method("Page.loadEventFired")) > before)

    def evaluate(self, expression: str) -> Any:
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self) -> dict[str, Any]:
        """Size, colours and brightness of a screenshot."""
        self.send("Page.bringToFront")
        found = self.send("Page.captureScreenshot", format="png")
        result: dict[str, Any] = self.evaluate(LOOK % json.dumps(found["data"]))
        return result

    def errors(self) -> list[Any]:
        """What the console shows in red, uncaught exceptions, violations of the page's policy."""
        return [
            *(
                found["entry"]["text"]
                for found in self.of_method("Log.entryAdded")
                if found["entry"]["level"] in ("error", "warning")
            ),
            *self.of_method("Runtime.exceptionThrown"),
            *self.of_method("Runtime.consoleAPICalled"),
        ]

    def requests(self) -> list[str]:
        return [found["request"]["url"] for found in self.of_method("Network.requestWillBeSent")]

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)


class Browser:
    """A Chromium of its own, without a window."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        ends = [_high(end) for pair in (os.pipe(), os.pipe()) for end in pair]
        child_in, self._to, self._from, child_out = ends
        # In a container there is seldom what the sandbox or shared memory needs.
        command = (
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={folder}"),
        )
        with (folder / "chromium.log").open("wb") as log:
            self._process = os.posix_spawn(
                CHROMIUM,
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, child_in, 3),
                    (os.POSIX_SPAWN_DUP2, child_out, 4),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
            )
        os.close(child_in)
        os.close(child_out)
        self.events: list[dict[str, Any]] = []
        self._replies: dict[int, dict[str, Any]] = {}
        self._left, self._sent = b"", 0

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        number = self._sent
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        self.wait(lambda: number in self._replies)
        reply = self._replies.pop(number)
        assert "error" not in reply, (method, reply["error"])
        result: dict[str, Any] = reply["result"]
        return result

    def wait(self, until: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not until():
            ready, _, _ = select.select([self._from], [], [], end - time.monotonic())
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, "the browser has ended, or does not answer"
            *messages, self._left = (self._left + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._replies[message["id"]] = message
                else:
                    self.events.append(message)

    def close(self) -> None:
        self.send("Browser.close")
        os.close(self._to)
        os.close(self._from)
        os.waitpid(self._process, 0)


def _high(end: int) -> int:
    """The same end of a pipe under a number that no child expects anything at."""
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    found = Tab(browser)
    yield found
    found.close()


@pytest.fixture(params=["declared", "timed", "one node", "no executor"])
def page(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    large_profile: Profile,
    timed_profile: Profile,
    with_nodes: Callable[..., Profile],
    one_node: NodeProfile,
) -> Path:
    """Pages with many nodes, with one and with none, with and without measurements."""
    profile = {
        "declared": lambda: large_profile,
        "timed": lambda: timed_profile,
        "one node": lambda: with_nodes(one_node),
        "no executor": lambda: with_nodes().model_copy(update={"executors": (), "memory": ()}),
    }[request.param]()
    path = tmp_path / "page.html"
    path.write_text(render_html(profile), encoding="utf-8")
    return path


def test_the_page_shows_in_light_and_dark_at_both_widths(tab: Tab, page: Path) -> None:
    for size in (NARROW, WIDE):
        seen = {}
        for scheme in ("light", "dark"):
            tab.look_like(size, scheme)
            tab.open(page)
            seen[scheme] = tab.look()
            assert (seen[scheme]["width"], seen[scheme]["height"]) == size
            assert seen[scheme]["colours"] > 50, "a page of text and pictures has many colours"
            assert seen[scheme]["largest"] < 0.98, "nearly all of the page has one colour"
        assert seen["light"]["light"] > 0.8
        assert seen["dark"]["light"] < 0.35
    assert not tab.errors()


def test_nothing_is_fetched(tab: Tab, page: Path) -> None:
    tab.look_like(WIDE, "light")
    tab.open(page)
    assert tab.requests()[0] == page.as_uri()
    assert not [url for url in tab.requests()[1:] if not url.startswith("data:")]
    assert not tab.errors()


def test_nothing_stands_out_of_the_page(tab: Tab, page: Path) -> None:
    for size in (NARROW, (768, 900), WIDE):
        tab.look_like(size, "light")
        tab.open(page)
        for opened in (False, True):
            if opened:
                tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
            assert tab.evaluate("document.documentElement.scrollWidth") <= size[0], opened
            assert tab.evaluate(OVERFLOW) == [], opened


def test_marks_lie_inside_their_pictures(tab: Tab, tmp_path: Path, timed_profile: Profile) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_html(timed_profile), encoding="utf-8")
    tab.look_like(WIDE, "light")
    tab.open(path)
    outside = """
    [...document.querySelectorAll(".executor[open] svg")].flatMap(svg => {
      const frame = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("rect, circle, line")].filter(mark => {
        const box = mark.getBoundingClientRect(), x = box.x + box.width / 2;
        return x < frame.left - 1 || x > frame.right + 1 || box.width > frame.width + 13
          || box.top < frame.top - 13 || box.bottom > frame.bottom + 13;
      }).map(mark => mark.outerHTML);
    })
    """
    assert tab.evaluate("document.querySelectorAll('.executor[open] svg circle').length") > 5
    assert tab.evaluate("document.querySelectorAll('.executor[open] .arena rect').length") > 500
    assert tab.evaluate(outside) == []


def test_text_is_readable_on_its_ground(tab: Tab, page: Path) -> None:
    contrast = """
    (() => {
      const parse = text => text.match(/[\\d.]+/g).map(Number);
      const light = text => { const [r, g, b] = parse(text).map(v => v / 255)
        .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b; };
      const ground = element => { for (let e = element; e; e = e.parentElement) {
        const found = getComputedStyle(e).backgroundColor;
        if (found !== "rgba(0, 0, 0, 0)") return found; } return "rgb(255, 255, 255)"; };
      const worst = new Map();
      const check = (element, colour, least) => {
        const [a, b] = [light(colour), light(ground(element))].sort((x, y) => y - x);
        const found = (a + .05) / (b + .05);
        if (found < least) worst.set(element.tagName + "." + element.getAttribute("class"), found);
      };
      for (const e of document.querySelectorAll("h1,h2,h3,p,td,th,dt,dd,a,span,small,b,li"))
        check(e, getComputedStyle(e).color, 4.5);
      for (const e of document.querySelectorAll("svg text"))
        check(e, getComputedStyle(e).fill, 4.5);
      for (const e of document.querySelectorAll(".swatch")) check(e.parentElement,
        getComputedStyle(e).color, 3);
      return [...worst];
    })()
    """
    for scheme in ("light", "dark"):
        tab.look_like(WIDE, scheme)
        tab.open(page)
        assert tab.evaluate(contrast) == [], scheme


def test_the_table_of_nodes_sorts_and_regions_unfold(
    tab: Tab, tmp_path: Path, timed_profile: Profile
) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_html(timed_profile), encoding="utf-8")
    tab.look_like(WIDE, "light")
    tab.open(path)
    table = "document.querySelector('.executor[open] table.sortable')"
    column = f"[...{table}.tHead.rows[0].cells].findIndex(c => c.textContent === 'floor')"
    values = f"[...{table}.tBodies[0].rows].map(r => Number(r.cells[{column}].dataset.v))"
    floors = [node.floor_us for node in timed_profile.executors[0].nodes()]
    click = f"{table}.tHead.rows[0].cells[{column}].querySelector('button').click()"
    assert tab.evaluate(values) == floors
    tab.evaluate(click)
    assert tab.evaluate(values) == sorted(floors, reverse=True)
    tab.evaluate(click)
    assert tab.evaluate(values) == sorted(floors)
    inner = "document.querySelector('.executor[open] .tree details details > summary')"
    assert tab.evaluate(f"{inner}.parentElement.open") is False
    tab.evaluate(f"{inner}.click()")
    assert tab.evaluate(f"{inner}.parentElement.open") is True
    last = len(timed_profile.executors) - 1
    assert tab.evaluate(f"document.getElementById('x{last}').open") is False
    tab.evaluate(f"document.querySelector('a[href=\"#x{last}\"]').click()")
    tab.evaluate("new Promise(done => setTimeout(done, 100))")
    assert tab.evaluate(f"document.getElementById('x{last}').open") is True
    assert not tab.errors()


def test_a_hostile_document_runs_nothing(
    tab: Tab, tmp_path: Path, with_nodes: Callable[..., Profile], one_node: NodeProfile
) -> None:
    evil = "</script><script>document.title='owned'</script><img src=x onerror=\"alert(1)\">"
    profile = with_nodes(one_node.model_copy(update={"name": evil, "region": evil, "op": evil}))
    path = tmp_path / "page.html"
    path.write_text(render_html(profile), encoding="utf-8")
    tab.look_like(WIDE, "light")
    tab.open(path)
    assert tab.evaluate("document.title") == f"Profile of {profile.identity.name}"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert evil in tab.evaluate("document.body.innerText") or evil in tab.evaluate(
        "document.querySelector('table.sortable').textContent"
    )
    assert not tab.errors()


def test_the_page_prints(tab: Tab, tmp_path: Path, with_nodes: Callable[..., Profile]) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_html(with_nodes()), encoding="utf-8")
    tab.look_like(WIDE, "dark")
    tab.open(path)
    pdf = base64.b64decode(tab.send("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 5000
    tab.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
