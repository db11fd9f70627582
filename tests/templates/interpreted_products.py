"""Products with what stands before and after them, in the interpreter; see `interpreted.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.kernels import kernel_case
from dflash_graph.kernels.products import product_choice
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.testing import F32_REDUCTION, poison_, same_bytes

#: The op of a product, whether its inputs may be cut into parts, and a call of it.
PRODUCTS = {}
SLOTS, WINDOW = 5, 6
KV = {"kv_heads": 2, "head_dim": 10, "rotary_half": 4, "eps": 1e-6}
NORM = {"eps": 1e-6, "offset": True}
#: Twelve groups of channels that no tile divides.
WIDTH, GROUPS, INPUTS = 36, 12, 77


def product(op, *, splits=True):
    def register(make):
        PRODUCTS[op] = (splits, make)
        return make

    return register


def small(split=1, block_o=16):
    default = product_choice(WIDTH, INPUTS, 1, "float32", splits=True)
    tiles = {**default.tiles, "BLOCK_O": block_o, "BLOCK_I": 16, "SPLIT": split}
    return replace(default, tiles=tiles)


def narrow(op):
    """Features of a tile: few, or a whole segment."""
    return 64 if op == "linear_residual_scale" else 16


def normal(rng, *shape, scale=1.0):
    return torch.randn(*shape, generator=rng) * scale


def weight(rng, outputs, inputs):
    return normal(rng, outputs, inputs, scale=inputs**-0.5)


@product("linear")
def linear_case(rng, batch, width, outputs=WIDTH, inputs=INPUTS):
    case = {"x": normal(rng, batch, width, inputs), "weight": weight(rng, outputs, inputs)}
    return case, {"tiled": True}


@product("linear_norm")
def norm_case(rng, batch, width, outputs=WIDTH, inputs=INPUTS):
    case, _ = linear_case(rng, batch, width, outputs, inputs)
    return case | {"norm": normal(rng, outputs)}, NORM


@product("linear_residual_norm")
def residual_case(rng, batch, width, outputs=WIDTH, inputs=INPUTS):
    case, _ = linear_case(rng, batch, width, outputs, inputs)
    made = {
        "y": case["x"],
        "weight": case["weight"],
        "x": normal(rng, batch, width, outputs),
        "norm": normal(rng, outputs),
    }
    return made, NORM | {"offset": False}


@product("linear_conv_residual_norm")
def conv_case(rng, batch, width, groups=GROUPS):
    case, attributes = residual_case(rng, batch, width)
    made = {
        "y": case["y"],
        "weight": case["weight"],
        "base": normal(rng, 2, 2, WIDTH),
        "delta": normal(rng, batch, width, 2, groups),
        "x": case["x"],
        "norm": case["norm"],
    }
    return made, {"groups": groups, **attributes}


@product("swiglu_linear", splits=False)
def swiglu_case(rng, batch, width, ffn_width=21):
    case, _ = linear_case(rng, batch, width, 2 * ffn_width)
    case["weight"][0] *= 40.0  # gates far from zero, on both sides
    return case, {"ffn_width": ffn_width}


@product("gdn_project", splits=False)
def project_case(rng, batch, width, channels=19, value_width=9, heads=3):
    case, _ = linear_case(rng, batch, width, channels + value_width + 2 * heads)
    return case, {"channels": channels, "value_width": value_width, "heads": heads}


def factors(rng, batch, width, segments=2):
    """Sums of squares of rows with very different norms."""
    sizes = 64.0 * 10.0 ** normal(rng, batch, width, 1, scale=0.5)
    return (0.5 + torch.rand(batch, width, segments, generator=rng)) * sizes


@product("linear_residual_scale", splits=False)
def scale_case(rng, batch, width, segments=3):
    case, _ = residual_case(rng, batch, width, 64 * segments)
    return case, {"segments": segments, "offset": True}


@product("scaled_linear", splits=False)
def scaled_case(rng, batch, width, outputs=WIDTH, segments=2):
    case, _ = linear_case(rng, batch, width, outputs, 64 * segments)
    squares = factors(rng, batch, width, segments)
    made = {"z": case["x"], "squares": squares, "weight": case["weight"]}
    return made, {"segments": segments, "eps": 1e-6}


@product("scaled_swiglu_linear", splits=False)
def scaled_swiglu_case(rng, batch, width, ffn_width=21):
    case, attributes = scaled_case(rng, batch, width, 2 * ffn_width)
    return case, {"ffn_width": ffn_width, **attributes}


@product("scaled_gdn_project", splits=False)
def scaled_project_case(rng, batch, width, channels=19, value_width=9, heads=3):
    case, attributes = scaled_case(rng, batch, width, channels + value_width + 2 * heads)
    case = {"x": case["z"], "squares": case["squares"], "weight": case["weight"]}
    widths = {"channels": channels, "value_width": value_width, "heads": heads}
    return case, {**widths, **attributes}


@product("conv_prepare")
def prepare_case(rng, batch, width, groups=GROUPS):
    case = {
        "x": normal(rng, batch, width, WIDTH),
        "projection": weight(rng, 4 * groups, WIDTH),
        "base": normal(rng, 2, 2, WIDTH),
    }
    return case, {"groups": groups}


@product("context_kv")
def context_case(rng, batch, width, **changes):
    heads = KV | changes
    angle = normal(rng, batch, width, heads["rotary_half"], scale=3.0)
    case = {
        "c": normal(rng, batch, width, INPUTS),
        "weight": weight(rng, 2 * heads["kv_heads"] * heads["head_dim"], INPUTS),
        "k_norm": normal(rng, heads["head_dim"]),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    return case, {**heads, "tiled": True}


@product("context_rings")
def rings_case(rng, batch, width, layers=3, lives=None):
    """Rings that hold numbers already; columns that are not live are NaN."""
    case, attributes = context_case(rng, batch, width)
    heads, dim = KV["kv_heads"], KV["head_dim"]
    lives = lives or [width, *[width - 1] * (batch - 1)]

    def rings():
        return [normal(rng, SLOTS, WINDOW, heads, dim) for _ in range(layers)]

    for b, live in enumerate(lives):
        poison_(case["c"][b, live:])
    attributes = {name: value for name, value in attributes.items() if name != "tiled"}
    return {
        "c": case["c"],
        "weights": [weight(rng, 2 * heads * dim, INPUTS) for _ in range(layers)],
        "k_norms": [normal(rng, dim) for _ in range(layers)],
        "cos": case["cos"],
        "sin": case["sin"],
        "k_rings": rings(),
        "v_rings": rings(),
        "slots": torch.randperm(SLOTS, generator=rng)[:batch].to(torch.int32),
        "start": torch.arange(batch, dtype=torch.int32) * 5 + 4,
        "live": torch.tensor(lives, dtype=torch.int32),
    }, {"layers": layers, **attributes}


SPLIT_OPS = [op for op, (splits, _) in PRODUCTS.items() if splits]
#: Arguments with one entry a row: `[B, W, ...]`, or `[B]`.
COLUMNS = ("x", "y", "z", "squares", "delta", "c", "cos", "sin")
REQUESTS = ("slots", "start", "live")


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (3, 5), (1, 17), (2, 16)])
def test_product(rng, check, op, batch, width):
    """Rows about the tile's edge; widths that no tile divides."""
    case, attributes = PRODUCTS[op][1](rng, batch, width)
    check(get_op(op), case, attributes, F32_REDUCTION, choice=small(block_o=narrow(op)))


@pytest.mark.parametrize("op", PRODUCTS)
def test_default_choice(rng, check, op):
    case, attributes = PRODUCTS[op][1](rng, 2, 3)
    check(get_op(op), case, attributes, F32_REDUCTION)


@pytest.mark.parametrize("op", SPLIT_OPS)
@pytest.mark.parametrize("split", [2, 3, 5, 7])
def test_parts(rng, check, op, split):
    """Inputs that the parts do not share alike, and more parts than steps."""
    case, attributes = PRODUCTS[op][1](rng, 2, 3)
    check(get_op(op), case, attributes, F32_REDUCTION, choice=small(split))


def test_parts_of_many_features(rng, check):
    """The second launch of linear takes 1024 features at a time; unrounded sums too."""
    case, attributes = linear_case(rng, 1, 3, outputs=1030)
    check(get_op("linear"), case, attributes, F32_REDUCTION, choice=small(2, block_o=128))
    holes = {"unrounded": True}
    check(get_op("linear"), case, attributes, F32_REDUCTION, choice=small(2), holes=holes)


@pytest.mark.parametrize("groups", [1, 4, 9, 36])
def test_groups(rng, check, groups):
    """Of all channels, of one, of numbers that are no powers of two."""
    for op, make in (("conv_prepare", prepare_case), ("linear_conv_residual_norm", conv_case)):
        case, attributes = make(rng, 2, 3, groups=groups)
        check(get_op(op), case, attributes, F32_REDUCTION, choice=small(2))


@pytest.mark.parametrize("ffn_width", [1, 8, 16, 17])
def test_swiglu_widths(rng, check, ffn_width):
    case, attributes = swiglu_case(rng, 1, 3, ffn_width)
    check(get_op("swiglu_linear"), case, attributes, F32_REDUCTION, choice=small())
    halves = small(block_o=32)
    halves = replace(halves, tiles={**halves.tiles, "HALVES": 1})
    check(get_op("swiglu_linear"), case, attributes, F32_REDUCTION, choice=halves)


@pytest.mark.parametrize(("gate", "silu"), [(200.0, 200.0), (-200.0, 0.0), (0.0, 0.0)])
def test_swiglu_of_extreme_gates(run, gate, silu):
    case = {"x": torch.ones(1, 1, 1), "weight": torch.tensor([[gate], [3.0]])}
    found = run(get_op("swiglu_linear"), case, {"ffn_width": 1}, choice=small())["y"]
    assert found.item() == 3.0 * silu


@pytest.mark.parametrize(
    ("channels", "value_width", "heads"), [(1, 1, 1), (16, 16, 8), (15, 18, 1), (33, 2, 2)]
)
def test_projections_end_anywhere_in_a_tile(rng, check, channels, value_width, heads):
    case, attributes = project_case(rng, 1, 3, channels, value_width, heads)
    check(get_op("gdn_project"), case, attributes, F32_REDUCTION, choice=small())


@pytest.mark.parametrize(("head_dim", "rotary_half"), [(2, 1), (17, 8), (16, 8), (24, 3)])
def test_heads(rng, check, head_dim, rotary_half):
    case, attributes = context_case(rng, 2, 3, head_dim=head_dim, rotary_half=rotary_half)
    check(get_op("context_kv"), case, attributes, F32_REDUCTION, choice=small(2))


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(
    ("width", "lives"), [(1, [1, 0]), (5, [0, 5]), (6, [6, 5]), (7, [7, 6]), (16, [16, 13])]
)
def test_rings(rng, check, layers, width, lives):
    """Nothing live, a window filled, and more columns than a window holds."""
    case, attributes = rings_case(rng, 2, width, layers, lives)
    check(get_op("context_rings"), case, attributes, F32_REDUCTION, choice=small(2))


def test_a_ring_keeps_every_other_byte(rng, run):
    case, attributes = rings_case(rng, 2, 4, lives=[3, 0])
    for name in ("k_rings", "v_rings"):
        for ring in case[name]:
            poison_(ring)
    found = run(get_op("context_rings"), case, attributes, choice=small())
    for name in ("k_rings", "v_rings"):
        for ring in found[name]:
            there = ring.isfinite().all(-1).all(-1)  # [slots, window]
            assert int(there.sum()) == 3
            slot, start = int(case["slots"][0]), int(case["start"][0])
            assert all(bool(there[slot, (start + i) % WINDOW]) for i in range(3))


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("op", PRODUCTS)
def test_bits_do_not_depend_on_company(rng, run, op, split):
    """A request alone, among others, in another row, in other row tiles."""
    splits, make = PRODUCTS[op]
    choice = small(split if splits else 1, narrow(op))
    case, attributes = make(rng, 3, 6)

    def launch(rows, holes=None):
        part = {
            name: value[rows].contiguous() if name in COLUMNS + REQUESTS else value
            for name, value in case.items()
        }
        return run(get_op(op), part, attributes, choice=choice, holes=holes)

    whole = launch([0, 1, 2])
    for rows, holes in (([2, 1, 0], None), ([1], None), ([2, 0], {"BLOCK_R": 32})):
        found = launch(rows, holes)
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                assert same_bytes(value, whole[name][rows]), f"{op}.{name} of {rows}"
                continue
            for ring, expected in zip(value, whole[name], strict=True):
                slots = case["slots"][rows].long()
                assert same_bytes(ring[slots], expected[slots]), f"{op}.{name} of {rows}"


@pytest.mark.parametrize("op", ["linear_residual_norm", "linear_conv_residual_norm"])
def test_the_residual_is_summed_in_place(rng, run, tmp_path, op):
    """Plans let out take the place of x."""
    case, attributes = PRODUCTS[op][1](rng, 2, 3)
    apart = run(get_op(op), case, attributes, choice=small(2))
    specs = {name: spec_of(value) for name, value in case.items()}
    made = kernel_case(op, specs, attributes, choice=small(2))
    out, n = case["x"].clone(), torch.empty_like(case["x"])
    made.module(tmp_path).launch(
        **{**case, "x": out},
        out=out,
        n=n,
        eps=attributes["eps"],
        workspace=torch.empty(made.workspace, dtype=torch.uint8),
        num_warps=4,
        num_stages=2,
    )
    assert same_bytes(out, apart["out"])
    assert same_bytes(n, apart["n"])


def test_sums_of_squares_of_rows_of_any_size(rng, run, check):
    """Nothing, what eps hides, the largest numbers; many small ones beside a large one."""
    case, attributes = scale_case(rng, 1, 6)
    case["y"][:] = 0.0
    case["x"] *= torch.tensor([0.0, 1e-15, 1e-3, 1.0, 1e9, 1.0])[:, None]
    case["x"][0, 5, ::64] = 3e3
    found = check(get_op("linear_residual_scale"), case, attributes, F32_REDUCTION)
    assert not found["squares"][0, 0].any() and found["squares"][0, 4].min() > 1e18
    case["x"][0, 5, 0] = 1e30
    ends = run(get_op("linear_residual_scale"), case, attributes)
    assert ends["squares"][0, 5, 0] == float("inf")


def test_a_branch_that_is_scaled_is_a_norm(rng, run):
    """Both launches of it together are the product over the norm, up to rounding."""
    case, attributes = scale_case(rng, 2, 3)
    ends = run(get_op("linear_residual_scale"), case, attributes)
    after = {"z": ends["z"], "squares": ends["squares"], "weight": weight(rng, WIDTH, 192)}
    scaled = run(get_op("scaled_linear"), after, {"segments": 3, "eps": 1e-6})["y"]
    normed = run(get_op("linear_residual_norm"), case, {"eps": 1e-6, "offset": True})
    plain = {"x": normed["n"], "weight": after["weight"]}
    plain = run(get_op("linear"), plain, {"tiled": True})["y"]
    assert same_bytes(ends["out"], normed["out"])
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["swiglu_linear", "gdn_project"])
def test_products_of_one_launch_have_one_part(rng, run, op):
    case, attributes = PRODUCTS[op][1](rng, 1, 2)
    with pytest.raises(ShapeError, match=f"{op}: expected SPLIT = 1, got 2"):
        run(get_op(op), case, attributes, choice=small(2))


def test_rings_of_other_layers_are_refused(rng, tmp_path):
    case, attributes = rings_case(rng, 1, 2)
    specs = {
        name: spec_of(v) if isinstance(v, torch.Tensor) else tuple(map(spec_of, v))
        for name, v in case.items()
    }
    module = kernel_case("context_rings", specs, attributes, choice=small()).module(tmp_path)
    case["k_norms"] = case["k_norms"][:2]
    with pytest.raises(ShapeError, match=r"context_rings.k_norms: expected 3 tensors, got 2"):
        module.launch(
            **case,
            eps=1e-6,
            table=torch.zeros(12, dtype=torch.int64),
            workspace=torch.empty(4096, dtype=torch.uint8),
            num_warps=4,
            num_stages=2,
        )
