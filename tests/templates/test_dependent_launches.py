"""Programmatic dependent launches: every kernel waits before it touches what another one wrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.choices import Choices
from dflash_graph.errors import GraphError
from dflash_graph.graph import GraphBuilder, GraphKey
from dflash_graph.kernels import KernelCase, kernel_ops, node_case, shipped_cases
from dflash_graph.kernels.catalog import shipped_graphs
from dflash_graph.lowering.triton import check_ahead
from dflash_graph.rendering import render

WAIT = "tl.extra.cuda.gdc_wait()"


@cache
def cases(pdl: bool) -> dict[str, KernelCase]:
    """A case of each op, as a device with dependent launches would get it, or one without."""
    return {case.op: case for case in shipped_cases(Choices("a device", 90, pdl=pdl))}


def kernels(source: str) -> Iterator[ast.FunctionDef]:
    """The kernels of a rendered file: what is named in KERNELS, not the helpers they call."""
    for node in ast.parse(source).body:
        is_jit = isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        )
        if is_jit and not node.name.startswith(("_", "philox")):  # type: ignore[union-attr]
            assert isinstance(node, ast.FunctionDef)
            yield node


@pytest.mark.parametrize("op", kernel_ops())
def test_kernels_wait_first(op: str, tmp_path: Path) -> None:
    """What stands before the wait is arithmetic, tables that a binding made once, and reads of what
    the file says is read ahead; nothing lets the next launch in.
    """
    case = cases(pdl=True)[op]
    source = render(case.template, dict(case.holes), cache_dir=tmp_path).source
    ahead = {"table", *constants(source).get("AHEAD", ())}
    found = list(kernels(source))
    assert found
    assert source.count(f"{WAIT}\n") == len(found), "each kernel waits once"
    for kernel in found:
        place = [ast.unparse(node) for node in kernel.body].index(WAIT)
        before = kernel.body[:place]
        for statement in map(ast.unparse, before):
            assert "tl.store" not in statement and "tl.dot" not in statement, kernel.name
            assert "gdc_" not in statement, kernel.name
        arguments = {arg.arg for arg in kernel.args.args}
        pointers = {name for name in arguments if f'"{name}": "*' in source}
        read = read_through(before, pointers)
        assert read <= ahead, f"{kernel.name} reads {sorted(read - ahead)} before it waits"


def constants(source: str) -> dict[str, Any]:
    """The literals that a rendered file assigns."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def read_through(statements: list[ast.stmt], pointers: set[str]) -> set[str]:
    """Which pointers reach a load or a helper, by themselves or through names assigned before."""
    behind = {name: {name} for name in pointers}
    read: set[str] = set()

    def reached(node: ast.AST) -> set[str]:
        names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        return set().union(*(behind.get(name, set()) for name in names))

    for statement in statements:
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name == "tl.load" or not name.startswith("tl."):
                read |= set().union(*map(reached, call.args))
        if isinstance(statement, ast.Assign | ast.AugAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            value = statement.value
            is_load = isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.load"
            behind[ast.unparse(target)] = set() if is_load else reached(value)
    return read


def test_what_is_read_is_seen() -> None:
    """The reader itself: through a name, through a helper, and not behind what was loaded."""
    body = ast.parse("a = x + 1\nb = tl.load(a)\nc = y + b\nd = _float(z, m)").body
    assert read_through(body, {"x", "y", "z"}) == {"x", "z"}


def test_rounds_write_nothing_that_is_read_ahead() -> None:
    """Binding checks the same for every node of a start-up; here for all that ship."""
    seen = set()
    for graph in shipped_graphs():
        for node in graph.nodes:
            case = node_case(graph, node)
            ahead = getattr(case.module(), "AHEAD", ()) if case else ()
            check_ahead(graph, node, ahead)
            seen |= {node.op for argument in ahead if argument in node.inputs}
    assert {"gdn_mixer", "gated_attention", "linear_residual_norm", "rope_append"} <= seen


def test_reading_ahead_what_a_segment_writes_is_refused() -> None:
    g = GraphBuilder(GraphKey("finish", "triton", 0, 1, 1, "bfloat16"))
    g.call(
        "count_tokens",
        outputs=g.input("outputs", (1, 1)),
        counts=g.state("counts", ("slots", 4), "int32"),
        slots=g.input("slots", (1,)),
        committed=g.input("committed", (1,)),
    )
    graph = g.build()
    (node,) = graph.nodes
    with pytest.raises(GraphError, match=r"reads 'counts' before it waits"):
        check_ahead(graph, node, ("counts",))
    with pytest.raises(GraphError, match=r"reads 'slots' before it waits"):
        check_ahead(graph, node, ("slots",))  # the first launch of a segment
    check_ahead(graph, node, ("weight",))
