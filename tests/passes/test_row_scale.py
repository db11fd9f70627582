"""row_scale: norms that become factors of rows, and those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_graph.graph import Graph, GraphBuilder, GraphKey, Value
from dflash_graph.lowering.segment import bind_op
from dflash_graph.op import dtype_of
from dflash_graph.passes.check import check
from dflash_graph.passes.row_scale import row_scale

B, W, WIDTH = 2, 3, 128


def declared(reader: str, *, width: int = WIDTH, **changes: Any) -> Graph:
    """A branch's end, and what reads its norm."""
    g = GraphBuilder(GraphKey("forward", "triton", W - 1, B, W, "float32"))
    x = g.input("x", (B, W, width), "float32")
    weight = g.weight("down", ("target/down",), (width, width))
    norm = g.weight("norm", ("target/norm",), (width,))
    out, n = g.call(
        "linear_residual_norm", "end", y=x, weight=weight, x=x, norm=norm, eps=0.5, offset=True
    )
    if changes.pop("kept", False):
        g.retain(n)
    read(g, reader, n, **changes)
    if changes.get("twice"):
        read(g, reader, n, name="again")
    g.output(out)
    return g.build()


def read(g: GraphBuilder, reader: str, n: Value, name: str = "read", **changes: Any) -> None:
    attributes: dict[str, Any] = {
        "linear": {"tiled": changes.get("tiled", True)},
        "swiglu_linear": {"ffn_width": 20},
        "gdn_project": {"channels": 20, "value_width": 16, "heads": 2},
        "residual_add": {},
    }[reader]
    if reader == "residual_add":
        g.output(g.call("residual_add", name, x=n, y=n))
        return
    weight = g.weight(f"{name}.weight", (f"target/{name}",), (40, int(n.spec.shape[-1])))
    made = g.call(reader, name, x=n, weight=weight, **attributes)
    for value in made if isinstance(made, tuple) else (made,):
        g.output(value)


def run(graph: Graph, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = dict(values)
    for node in graph.nodes:
        tensors.update(zip(node.outputs.values(), bind_op(node, tensors)(), strict=True))
    return {value.name: tensors[value.name] for value in graph.by_role("output")}


def numbers(value: Value, rng: torch.Generator) -> torch.Tensor:
    """Of a size that products keep, so that one tolerance fits all of them."""
    shape = value.spec.bind({})
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
    return (scale * torch.randn(*shape, generator=rng)).to(dtype_of(value.spec.dtype))


@pytest.mark.parametrize("reader", ["linear", "swiglu_linear", "gdn_project"])
def test_a_norm_becomes_a_factor(rng: torch.Generator, reader: str) -> None:
    before = declared(reader)
    after = row_scale(before)
    check(after)
    assert [node.op for node in after.nodes] == ["linear_residual_scale", f"scaled_{reader}"]
    assert [node.name for node in after.nodes] == [node.name for node in before.nodes]
    assert {v.name for v in after.by_role("output")} == {v.name for v in before.by_role("output")}
    values = {
        value.name: numbers(value, rng)
        for value in before.values.values()
        if value.role in ("input", "weight")
    }
    found, expected = run(after, values), run(before, values)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("reader", "changes"),
    [
        ("residual_add", {}),
        ("linear", {"tiled": False}),
        ("linear", {"twice": True}),
        ("linear", {"kept": True}),
        ("linear", {"width": 96}),
    ],
)
def test_a_norm_that_must_stay(reader: str, changes: dict[str, Any]) -> None:
    """Other readers, products over all rows, a norm that is kept, channels that are no segments."""
    graph = declared(reader, **changes)
    assert row_scale(graph) is graph
