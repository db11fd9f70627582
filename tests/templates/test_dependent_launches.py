"""Programmatic dependent launches: every kernel waits before it touches what another one wrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dflash_graph.choices import Choices
from dflash_graph.kernels import KernelCase, kernel_ops, shipped_cases
from dflash_graph.rendering import render

WAIT, TRIGGER = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


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
    """What stands before the wait is arithmetic, and tables that a binding made once."""
    case = cases(pdl=True)[op]
    source = render(case.template, dict(case.holes), cache_dir=tmp_path).source
    found = list(kernels(source))
    assert found
    assert source.count(f"{WAIT}\n") == len(found), "each kernel waits once"
    for kernel in found:
        statements = [ast.unparse(node) for node in kernel.body]
        place = statements.index(WAIT)
        for before in statements[:place]:
            assert "tl.store" not in before and "tl.dot" not in before, kernel.name
            assert "tl.load" not in before or "tl.load(table" in before, f"{kernel.name}: {before}"
        assert all(TRIGGER not in text for text in statements[:place]), kernel.name


@pytest.mark.parametrize("op", kernel_ops())
def test_nothing_waits_without_them(op: str, tmp_path: Path) -> None:
    case = cases(pdl=False)[op]
    source = render(case.template, dict(case.holes), cache_dir=tmp_path).source
    assert "gdc_" not in source and "launch_pdl" not in source
