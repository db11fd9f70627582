"""Imports go one way: a module may import its own level and those further in, never further out."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("ops", "templates", "profiles")

#: Innermost first; a name covers the modules below it. To place a new module, add it to its level.
LEVELS = (
    {"errors"},
    {
        *("tensor", "options", "config_fields", "geometry", "demo", "profiles", "templates"),
        # formulas
        *("arithmetic", "head", "block_attention", "grouped_convolution", "delta_rule"),
        *("philox", "sampling", "selector", "turns"),
    },
    {"op"},
    {"ops"},
    {"graph"},
    {"models"},
    {"choices"},
    {"passes"},
    {"planner", "export", "rendering", "profile_store"},
    {"kernels"},
    {
        *("ahead_of_time", "lowering", "capture", "weights", "state", "report", "checkpoint"),
        *("frame", "pace"),
    },
    {"executors", "rounds"},
    {
        *("engine", "scheduler", "contexts", "request", "statistics", "stop_text", "submission"),
        *("text", "profile", "rehearsal"),
    },
    {"__init__"},  # the public names: only the outermost level imports `dflash_graph` itself
    {"cli", "testing", "autotune", "bench", "__main__"},
)


def sources() -> dict[str, Path]:
    """Every module by its name below dflash_graph ("__init__" is dflash_graph itself)."""
    found = {}
    for folder in ("dflash_graph", *MAPPED):
        prefix = () if folder == "dflash_graph" else (folder,)
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts)
            if len(parts) > 1 and parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join(parts)] = path
    return found


def imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a source file imports, inside functions and for type checking too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    base = ["dflash_graph", *(part for part in package.split(".") if part != "__init__" and part)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = base[: len(base) + 1 - node.level] if node.level else []
            source = ".".join([*parent, *([node.module] if node.module else [])])
            wanted = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in wanted:
            top, _, rest = dotted.partition(".")
            if top == "dflash_graph":
                while rest and rest not in modules:  # a name in a module: the module itself
                    rest = rest.rpartition(".")[0]
                yield rest or "__init__"


def level(name: str) -> int:
    for number, members in enumerate(LEVELS):
        if name.partition(".")[0] in members:
            return number
    raise AssertionError(
        f"dflash_graph.{name} has no level; add it to LEVELS in tests/test_imports.py, beside the "
        f"modules that may import it as it may import them"
    )


def test_every_module_has_a_level() -> None:
    for name in sources():
        level(name)


def test_no_module_imports_outwards() -> None:
    modules = sources()
    wrong = [
        f"{name} (level {level(name)}) imports {other} (level {level(other)})"
        for name, path in modules.items()
        for other in imports(name, path, modules)
        if level(other) > level(name)
    ]
    assert not wrong, "imports must point inwards:\n" + "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    modules = sources()
    edges = {name: set(imports(name, path, modules)) - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_the_check_sees_each_form_of_import(tmp_path: Path) -> None:
    modules = {name: tmp_path for name in ("__init__", "op", "ops", "ops.add", "cli", "cli.main")}
    path = tmp_path / "main.py"
    path.write_text(
        "import torch, dflash_graph.op\n"
        "from dflash_graph import Engine\n"
        "from dflash_graph.ops.add import OP\n"
        "def f():\n    from . import other\n    from ..ops import add\n"
    )
    seen = set(imports("cli.main", path, modules))
    assert seen == {"op", "__init__", "ops.add", "cli"}
