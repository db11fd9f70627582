"""Kernels at the shapes of the 27B preset, on a device: formula and bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels import ROW_BUCKETS, row_bucket
from dflash_graph.kernels.products import product_choice
from dflash_graph.ops import get_op, linear_residual_norm
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    BF16_REDUCTION,
    F32_REDUCTION,
    TENSOR_CORE_REDUCTION,
    assert_matches,
    same_bytes,
)

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Tensor]]
ROWS = (1, 8, 16, 32, 64, 128)
#: (O, I) of every product of a round that `linear` computes.
MATRICES = (
    *((34816, 5120), (5120, 17408), (10240, 5120), (6144, 5120), (5120, 6144)),
    *((14336, 5120), (96, 5120), (256, 5120), (5120, 25600), (5120, 4096)),
)


def normal(rng: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=rng) * scale).bfloat16().cuda()


def linear_case(rng: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "x": normal(rng, 1, 128, inputs),
        "weight": normal(rng, outputs, inputs, scale=inputs**-0.5),
    }


@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_linear(rng: torch.Generator, run: Run, check: Run, outputs: int, inputs: int) -> None:
    """The formula, and the same bits for any number of rows, in any row tile and any company."""
    op, case, attributes = get_op("linear"), linear_case(rng, outputs, inputs), {"tiled": True}
    whole = check(op, case, attributes, BF16_REDUCTION)["y"]
    for rows in ROWS:
        cut = {**case, "x": case["x"][:, :rows].contiguous()}
        for bucket in (b for b in ROW_BUCKETS if b >= row_bucket(rows)):
            found = run(op, cut, attributes, holes={"BLOCK_R": bucket})["y"]
            assert same_bytes(found, whole[:, :rows]), f"{rows} rows in tiles of {bucket}"
    for row in (0, 5, 127):
        alone = {**case, "x": case["x"][:, row : row + 1].contiguous()}
        found = run(op, alone, attributes)["y"]
        assert same_bytes(found, whole[:, row : row + 1]), f"row {row} alone"
    turned = run(op, {**case, "x": case["x"].flip(1)}, attributes)["y"]
    assert same_bytes(turned.flip(1), whole), "rows in reverse"


@pytest.mark.parametrize(("outputs", "inputs"), [(5120, 17408), (96, 5120)])
def test_linear_unrounded(rng: torch.Generator, run: Run, outputs: int, inputs: int) -> None:
    case, op = linear_case(rng, outputs, inputs), get_op("linear")
    wide = run(op, case, {"tiled": True}, holes={"unrounded": True})["y"]
    assert same_bytes(wide.bfloat16(), run(op, case, {"tiled": True})["y"])
    oracle = case["x"].double() @ case["weight"].double().t()
    assert_matches(wide, oracle, TENSOR_CORE_REDUCTION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(19, 45), (300, 257), (1, 1)])
def test_linear_odd(
    rng: torch.Generator, check: Run, run: Run, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    case = {k: v.to(dtype) for k, v in linear_case(rng, outputs, inputs).items()}
    tolerance = F32_REDUCTION if dtype is torch.float32 else BF16_REDUCTION
    op, attributes = get_op("linear"), {"tiled": True}
    whole = check(op, case, attributes, tolerance)["y"]
    for rows in (1, 7, 33):
        cut = {**case, "x": case["x"][:, :rows].contiguous()}
        assert same_bytes(run(op, cut, attributes)["y"], whole[:, :rows]), f"{rows} rows"


def scaled_case(rng: torch.Generator, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A product of a round whose rows lack a norm's factor, or what leaves such rows."""
    if name.startswith("linear_residual_scale"):
        width = int(name.split()[1])
        case = {
            "y": normal(rng, 1, 128, width),
            "weight": normal(rng, 5120, width, scale=width**-0.5),
            "x": normal(rng, 1, 128, 5120, scale=3.0),
            "norm": normal(rng, 5120),
        }
        return case, {"segments": 80, "offset": True}
    outputs, attributes = {
        "scaled_linear": (14336, {}),
        "scaled_swiglu_linear": (34816, {"ffn_width": 17408}),
        "scaled_gdn_project": (16480, {"channels": 10240, "value_width": 6144, "heads": 48}),
    }[name]
    rows = normal(rng, 1, 128, 5120, scale=3.0)
    squares = rows.float().square().unflatten(-1, (80, 64)).sum(-1)
    weight = normal(rng, outputs, 5120, scale=5120**-0.5)
    row = "x" if name == "scaled_gdn_project" else "z"
    return {row: rows, "squares": squares, "weight": weight}, {
        **attributes, "segments": 80, "eps": 1e-6,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *("linear_residual_scale 17408", "linear_residual_scale 6144"),
        *("scaled_linear", "scaled_swiglu_linear", "scaled_gdn_project"),
    ],
)
def test_scaled(rng: torch.Generator, run: Run, check: Run, name: str) -> None:
    """The formula, and the same bits in any row tile, with other tiles of 64 and more features."""
    op = get_op(name.split()[0])
    case, attributes = scaled_case(rng, name)
    ends = op.name == "linear_residual_scale"
    columns = {"x", "y", "z", "squares"}
    choice = product_choice(14336, 5120, 128, "bfloat16", splits=False)
    halves = {"HALVES": 0} if name == "scaled_swiglu_linear" else {}
    choice = replace(choice, tiles={**choice.tiles, "BLOCK_O": 64, **halves}, num_stages=2)
    if ends:  # each result from the one before, which was rounded
        whole = run(op, case, attributes, choice=choice)
        sums = linear_residual_norm.reference(**wide(case), eps=1e-6, offset=True)[0]
        assert_matches(whole["out"], sums, BF16_REDUCTION)
        out, scale = whole["out"].double(), 1.0 + case["norm"].double()
        assert_matches(whole["z"], out * scale, BF16_ELEMENTWISE)
        assert_matches(
            whole["squares"], out.square().unflatten(-1, (80, 64)).sum(-1), F32_REDUCTION
        )
    else:
        whole = check(op, case, attributes, BF16_REDUCTION, choice=choice)
    for rows in ROWS:
        cut = {k: v[:, :rows].contiguous() if k in columns else v for k, v in case.items()}
        for bucket in (b for b in ROW_BUCKETS if b >= row_bucket(rows)):
            for block_o in (64,) if ends else (64, 128):
                holes = {"BLOCK_R": bucket, "BLOCK_O": block_o}
                for output, found in run(op, cut, attributes, choice=choice, holes=holes).items():
                    same = same_bytes(found, whole[output][:, :rows])
                    assert same, f"{output}: {rows} rows in tiles of {holes}"


def wide(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in case.items()}


def row_case(rng: torch.Generator, name: str) -> tuple[dict[str, Tensor], dict[str, Any], tuple]:
    """Arguments with 128 rows, attributes, and which arguments have rows."""
    if name == "rms_norm":
        case = {"x": normal(rng, 1, 128, 5120, scale=3.0), "weight": normal(rng, 5120)}
        return case, {"eps": 1e-6, "offset": True}, ("x",)
    angle = torch.randn(1, 128, 32, generator=rng).cuda()
    case = {
        "qkv": normal(rng, 1, 128, 14336),
        "q_norm": normal(rng, 256),
        "k_norm": normal(rng, 256),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    heads = {"query_parts": 2, "q_heads": 24, "kv_heads": 4, "head_dim": 256, "rotary_half": 32}
    return case, {**heads, "eps": 1e-6, "offset": True}, ("qkv", "cos", "sin")


@pytest.mark.parametrize("name", ["rms_norm", "head_norm_rope"])
def test_row_kernels(rng: torch.Generator, run: Run, check: Run, name: str) -> None:
    op = get_op(name)
    case, attributes, columns = row_case(rng, name)
    whole = check(op, case, attributes, BF16_ELEMENTWISE)
    for rows in ROWS:
        cut = {k: v[:, :rows].contiguous() if k in columns else v for k, v in case.items()}
        for output, found in run(op, cut, attributes).items():
            assert same_bytes(found, whole[output][:, :rows]), f"{output}: {rows} rows"
    turned = {k: v.flip(1) if k in columns else v for k, v in case.items()}
    for output, found in run(op, turned, attributes).items():
        assert same_bytes(found.flip(1), whole[output]), f"{output}: rows in reverse"
