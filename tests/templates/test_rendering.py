"""Rendering: golden text, keys, the cache, and every refusal."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pytest

from dflash_graph import rendering
from dflash_graph.errors import TemplateError
from dflash_graph.rendering import load, render, template_info, template_names

GOLDEN = Path(__file__).with_name("golden")
LINEAR = {
    "O": 5120,
    "I": 17408,
    "dtype": "bfloat16",
    "unrounded": False,
    "BLOCK_O": 32,
    "BLOCK_I": 128,
    "BLOCK_R": 16,
    "SPLIT": 1,
    "TRIGGER": 1,
    "PREFETCH": 0,
    "pdl": False,
    "scaled": False,
}
ODD = LINEAR | {"O": 19, "I": 45, "dtype": "float32", "unrounded": True}
PARTS = LINEAR | {"SPLIT": 3, "PREFETCH": 256, "pdl": True}


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Puts other templates in the place of those that ship."""

    def place(texts: dict[str, str]) -> None:
        environment = rendering._environment_of(jinja2.DictLoader(texts))
        monkeypatch.setattr(rendering, "_environment", lambda: environment)

    return place


@pytest.mark.parametrize(
    ("name", "holes"), [("linear", LINEAR), ("linear_odd", ODD), ("linear_parts", PARTS)]
)
def test_golden(name: str, holes: dict[str, Any], tmp_path: Path, update_golden: bool) -> None:
    source = render("linear", holes, cache_dir=tmp_path).source
    path = GOLDEN / f"{name}.py.txt"
    if update_golden:
        path.write_text(source, encoding="utf-8")
    assert source == path.read_text(encoding="utf-8"), "review, then run with --update-golden"


def test_a_rendered_file_opens_with_its_identity_and_parses(tmp_path: Path) -> None:
    rendered = render("linear", LINEAR, cache_dir=tmp_path)
    assert rendered.path == tmp_path / f"linear_{rendered.key}.py"
    assert rendered.path.read_text(encoding="utf-8") == rendered.source
    lines = rendered.source.splitlines()
    assert lines[0] == "# Rendered from linear.py.jinja"
    assert "BLOCK_I=128, BLOCK_O=32, BLOCK_R=16, I=17408, O=5120" in lines[1]
    assert lines[2] == f"# key: {rendered.key}"
    ast.parse(rendered.source)


def test_every_template_names_its_op_and_lists_its_holes() -> None:
    assert "linear" in template_names()
    shared: set[str] = set()
    for name in template_names():
        info = template_info(name)
        assert info.ops
        assert "pdl" in info.holes
        others = set(info.texts) - {f"{name}.py.jinja"}
        assert "common/launch.py.jinja" in others
        shared |= others
    folder = resources.files("dflash_graph.templates").joinpath("common")
    assert shared == {f"common/{file.name}" for file in folder.iterdir()}


def test_equal_holes_give_equal_text_whatever_their_order(tmp_path: Path) -> None:
    turned = dict(reversed(LINEAR.items()))
    assert render("linear", turned, cache_dir=tmp_path) == render(
        "linear", LINEAR, cache_dir=tmp_path
    )
    assert len(list(tmp_path.iterdir())) == 1


def test_the_key_holds_values_template_included_files_and_schema(
    tmp_path: Path, templates: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = '{# op: x\nhole: N  int >= 1\n#}\nN = {{ N }}\n{% include "part.jinja" %}\n'
    main = main.replace("{# op", "{#\nop")

    def key(n: int = 1, text: str = main, part: str = "a = 1\n") -> str:
        templates({"x.py.jinja": text, "part.jinja": part})
        return render("x", {"N": n}, cache_dir=tmp_path).key

    keys = [key(), key(n=2), key(text=main + "#\n"), key(part="a = 2\n")]
    assert key() == keys[0]
    monkeypatch.setattr(rendering, "SCHEMA", rendering.SCHEMA + 1)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_good_file_is_left_alone_and_a_damaged_one_replaced(tmp_path: Path) -> None:
    rendered = render("linear", LINEAR, cache_dir=tmp_path)
    before = rendered.path.stat()
    assert render("linear", LINEAR, cache_dir=tmp_path) == rendered
    assert rendered.path.stat().st_mtime_ns == before.st_mtime_ns
    assert rendered.path.stat().st_ino == before.st_ino
    for damage in ("", rendered.source[:100], rendered.source.replace("5120", "5121")):
        rendered.path.write_text(damage, encoding="utf-8")
        render("linear", LINEAR, cache_dir=tmp_path)
        assert rendered.path.read_text(encoding="utf-8") == rendered.source
    assert list(tmp_path.iterdir()) == [rendered.path]


def test_writers_at_the_same_time_leave_one_good_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: render("linear", LINEAR, cache_dir=tmp_path), range(32)))
    assert len(set(made)) == 1
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == [made[0].source]


def test_the_cache_is_the_argument_then_the_variable_then_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GRAPH_CACHE", str(tmp_path / "variable"))
    assert rendering.cache_folder(tmp_path / "argument") == tmp_path / "argument"
    assert rendering.cache_folder() == tmp_path / "variable"
    monkeypatch.setenv("DFLASH_GRAPH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert rendering.cache_folder().parts[-2:] == ("dflash_graph", "kernels")
    if sys.platform == "linux":
        assert rendering.cache_folder() == tmp_path / "user" / "dflash_graph" / "kernels"
    assert not list(tmp_path.iterdir()), "looking up a folder must not make it"


def test_a_cache_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TemplateError, match="cache_dir: expected a folder, got the file"):
        render("linear", LINEAR, cache_dir=file)
    monkeypatch.setenv("DFLASH_GRAPH_CACHE", str(file))
    with pytest.raises(TemplateError, match="DFLASH_GRAPH_CACHE: expected a folder"):
        render("linear", LINEAR)
    with pytest.raises(TemplateError, match="expected to write a rendered kernel"):
        render("linear", LINEAR, cache_dir=file / "below")


def test_load_gives_one_module_a_key(
    tmp_path: Path, templates: Callable[[dict[str, str]], None]
) -> None:
    templates({"x.py.jinja": "{#\nop: x\nhole: N  int >= 1\n#}\nN = {{ N }}\n"})
    one, two = (render("x", {"N": n}, cache_dir=tmp_path) for n in (101, 102))
    first = load(one)
    assert (first.N, load(two).N) == (101, 102)
    assert load(one) is first
    assert sys.modules[first.__name__] is first
    assert first.__file__ == str(one.path)
    assert not (tmp_path / "__pycache__").exists()


def test_a_module_that_fails_is_not_kept(
    tmp_path: Path, templates: Callable[[dict[str, str]], None]
) -> None:
    templates({"x.py.jinja": "{#\nop: x\nhole: N  int >= 1\n#}\nraise OSError({{ N }})\n"})
    rendered = render("x", {"N": 7}, cache_dir=tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="7"):
            load(rendered)


def test_importing_does_nothing() -> None:
    code = (
        "import sys, dflash_graph.rendering as r\n"
        "assert 'triton' not in sys.modules and 'platformdirs' not in sys.modules\n"
        "assert r._environment.cache_info().currsize == 0\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_unknown_template_lists_what_ships(tmp_path: Path) -> None:
    for name in ("linaer", "", "../pyproject", "common/launch", "linear.py.jinja"):
        with pytest.raises(TemplateError, match=r"expected one of .*linear.*, got"):
            render(name, {}, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"O": 0}, r"linear.O: expected int >= 1, got 0"),
        ({"O": True}, r"linear.O: expected int >= 1, got True"),
        ({"O": "5120"}, r"linear.O: expected int >= 1, got '5120'"),
        ({"O": 5120.0}, r"linear.O: expected int >= 1, got 5120.0"),
        ({"BLOCK_R": 24}, r"linear.BLOCK_R: expected 16 \| 32 \| 64 \| 128, got 24"),
        ({"BLOCK_R": "16"}, r"linear.BLOCK_R: expected .*, got '16'"),
        ({"unrounded": 1}, r"linear.unrounded: expected bool, got 1"),
        ({"dtype": "float16"}, r"linear.dtype: expected bfloat16 \| float32, got 'float16'"),
        ({"dtype": "float32)\nimport os"}, r"linear.dtype: expected bfloat16 \| float32"),
        ({"extra": 1}, r"missing \[\], unknown \['extra'\]"),
    ],
)
def test_illegal_holes(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=message):
        render("linear", LINEAR | change, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_hole(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"missing \['I'\], unknown \[\]"):
        render("linear", {k: v for k, v in LINEAR.items() if k != "I"}, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "expected a header comment with a line 'op: NAME'"),
        ("{# a comment #}\nx = 1\n", "expected a header comment with a line 'op: NAME'"),
        ("{#\nop: x\n#}\n{{ N }}\n", r"not listed \['N'\], not used \[\]"),
        ("{#\nop: x\nhole: N  bool\n#}\n", r"not listed \[\], not used \['N'\]"),
        ("{#\nop: x\nhole: N  text\n  #}\n{{ N }}\n", None),
        ("{#\nop: x\nhole: N  a, b\n#}\n{{ N }}\n", "hole N: expected 'bool', 'int >= N'"),
        ("{#\nop: x\nhole: N  bool\n#}\n{% include N %}\n", "files named by a literal"),
    ],
)
def test_a_header_is_held_to_its_template(
    text: str, message: str | None, templates: Callable[[dict[str, str]], None]
) -> None:
    templates({"x.py.jinja": text})
    if message is None:  # an enumeration of one name
        assert template_info("x").holes["N"].choices == ("text",)
        return
    with pytest.raises(TemplateError, match=message):
        template_info("x")
