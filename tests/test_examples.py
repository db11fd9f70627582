"""Every example in docstrings, guide and README runs, and every public name stands in one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import dflash_graph as dg
import dflash_graph.ops

ROOT = Path(__file__).resolve().parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_names() -> list[str]:
    found = ["dflash_graph"]
    for package in (dflash_graph, dflash_graph.ops):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not info.name.endswith("__main__"):
                found.append(info.name)
    return sorted(set(found))


def examples(name: str) -> list[doctest.DocTest]:
    return [t for t in doctest.DocTestFinder().find(importlib.import_module(name)) if t.examples]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("name", module_names())
def test_docstrings(name: str) -> None:
    for test in examples(name):
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, clear_globs=False)
        assert result.failed == 0, test.name


def test_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = doctest.testfile(
        str(ROOT / "docs" / "guide.md"), module_relative=False, optionflags=FLAGS
    )
    assert result.attempted > 30 and result.failed == 0


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("README.md")
    exec(compile(code, "README.md", "exec"), {})
    assert "tokens in" in capsys.readouterr().out


def test_every_public_name_has_an_example() -> None:
    shown = "\n".join(
        [
            *blocks("docs/guide.md"),
            *blocks("README.md"),
            *(
                e.source
                for name in module_names()
                for test in examples(name)
                for e in test.examples
            ),
        ]
    )
    missing = [
        n for n in dg.__all__ if n != "__version__" and not re.search(rf"\bdg\.{n}\b", shown)
    ]
    assert not missing, f"public names without an example: {missing}"
