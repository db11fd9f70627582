"""Kernels at small geometry in Triton's interpreter, against the float64 references.

`test_interpreter.py` runs this file in a process of its own, since triton decides when it is
imported whether it interprets. The interpreter multiplies the bit patterns of bfloat16 operands, so
products are tested in float32 here and in bfloat16 on devices; it rounds float32 to bfloat16
towards zero.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.kernels.products import product_choice
from dflash_graph.ops import get_op
from dflash_graph.testing import F32_REDUCTION, Tolerance, same_bytes

LINEAR = get_op("linear")
#: One bfloat16 cut (2^-7 relative), as the interpreter makes.
BF16_CUT = Tolerance(1e-6, 8e-3, 8e-3)
DTYPES = [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_CUT)]
DEFAULT = product_choice(19, 45, 1, "float32", splits=False)
SMALL = replace(DEFAULT, tiles={**DEFAULT.tiles, "BLOCK_O": 16, "BLOCK_I": 32})


def normal(rng, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def linear_case(rng, batch, width, inputs, outputs):
    return {
        "x": normal(rng, batch, width, inputs),
        "weight": normal(rng, outputs, inputs, scale=inputs**-0.5),
    }


def test_this_process_interprets():
    assert os.environ["TRITON_INTERPRET"] == "1"
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(triton.jit(normal), InterpretedFunction)


@pytest.mark.parametrize("rows", [*range(1, 41), 127, 128, 129])
def test_linear_rows(rng, check, rows):
    """Every count of rows about each tile, with features that no tile divides."""
    check(LINEAR, linear_case(rng, 1, rows, 45, 19), {"tiled": True}, F32_REDUCTION, choice=SMALL)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (31, 15), (32, 16), (33, 17), (96, 40)])
@pytest.mark.parametrize("block_rows", [16, 32])
def test_linear_widths(rng, check, inputs, outputs, block_rows):
    case = linear_case(rng, 2, 9, inputs, outputs)
    holes = {"BLOCK_R": block_rows}
    check(LINEAR, case, {"tiled": True}, F32_REDUCTION, choice=SMALL, holes=holes)


def test_linear_default_tiles(rng, check):
    check(LINEAR, linear_case(rng, 2, 3, 72, 40), {"tiled": True}, F32_REDUCTION)


def test_linear_unrounded(rng, check):
    case, holes = linear_case(rng, 1, 3, 45, 19), {"unrounded": True}
    found = check(LINEAR, case, {"tiled": True}, F32_REDUCTION, choice=SMALL, holes=holes)
    assert found["y"].dtype is torch.float32


def test_linear_position_invariant(rng, run):
    """A row has the same bits wherever in a tile it stands and whatever stands beside it."""
    case = linear_case(rng, 1, 16, 45, 19)
    whole = run(LINEAR, case, {"tiled": True}, choice=SMALL)["y"]
    turned = run(LINEAR, {**case, "x": case["x"].flip(1)}, {"tiled": True}, choice=SMALL)["y"]
    assert same_bytes(turned.flip(1), whole)
    others = normal(rng, 1, 16, 45, scale=1e3)
    others[:, 5] = case["x"][:, 5]
    company = run(LINEAR, {**case, "x": others}, {"tiled": True}, choice=SMALL)["y"]
    assert same_bytes(company[:, 5], whole[:, 5])
    for rows in range(1, 16):
        cut = {**case, "x": case["x"][:, :rows].contiguous()}
        assert same_bytes(run(LINEAR, cut, {"tiled": True}, choice=SMALL)["y"], whole[:, :rows])


def test_linear_isolates_rows_that_are_not_finite(rng, run):
    case = linear_case(rng, 1, 3, 45, 19)
    clean = run(LINEAR, case, {"tiled": True}, choice=SMALL)["y"]
    case["x"][0, 1] = float("nan")
    found = run(LINEAR, case, {"tiled": True}, choice=SMALL)["y"]
    assert bool(found[0, 1].isnan().all())
    assert same_bytes(found[0, ::2].contiguous(), clean[0, ::2].contiguous())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.half(), "linear.x: expected .* torch.float32"),
        (lambda x: x[..., :-1].contiguous(), r"linear.x: expected \(1, 3, 45\)"),
        (lambda x: x.transpose(0, 1).expand(3, 2, 45).transpose(0, 1), "contiguous"),
        (lambda x: x[:, :0], "expected rows, got none"),
    ],
)
def test_linear_refuses_other_tensors(rng, run, tmp_path, change, message):
    from dflash_graph.kernels import kernel_case
    from dflash_graph.op import spec_of

    case = linear_case(rng, 1, 3, 45, 19)
    specs = {name: spec_of(value) for name, value in case.items()}
    module = kernel_case("linear", specs, {"tiled": True}).module(tmp_path)
    x = change(case["x"])
    y = torch.empty(*x.shape[:-1], 19)
    with pytest.raises(ShapeError, match=message):
        module.launch(x, case["weight"], y, num_warps=4, num_stages=2)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("width", [1, 16, 24, 257])
def test_rms_norm(rng, check, dtype, tolerance, offset, width):
    x = normal(rng, 2, 3, width, dtype=dtype, scale=3.0)
    x[0, 0] = 0.0
    x[0, 1] *= 1e9
    case = {"x": x, "weight": normal(rng, width, dtype=dtype)}
    check(get_op("rms_norm"), case, {"eps": 1e-6, "offset": offset}, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("query_parts", "q_heads", "kv_heads", "head_dim", "half"),
    [(1, 4, 2, 16, 8), (2, 3, 1, 20, 4), (2, 6, 2, 32, 16), (1, 1, 1, 17, 1)],
)
def test_head_norm_rope(
    rng, check, dtype, tolerance, offset, query_parts, q_heads, kv_heads, head_dim, half
):
    angle = normal(rng, 2, 3, half, scale=3.0)
    width = (query_parts * q_heads + 2 * kv_heads) * head_dim
    case = {
        "qkv": normal(rng, 2, 3, width, dtype=dtype),
        "q_norm": normal(rng, head_dim, dtype=dtype),
        "k_norm": normal(rng, head_dim, dtype=dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    attributes = {
        "query_parts": query_parts,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_half": half,
        "eps": 1e-6,
        "offset": offset,
    }
    check(get_op("head_norm_rope"), case, attributes, tolerance)
