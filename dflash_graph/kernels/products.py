"""Kernels of products of rows with a weight, alone and with what stands before and after them.

A choice fixes SPLIT for a weight, and by default BLOCK_O, BLOCK_I and the number of warps too: they
order its sums, but for tensor cores, whose instruction does. Stages and the row tile follow the
number of rows: they overlap loads and leave sums alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import (
    SHARED_BUDGET,
    Kernel,
    power_of_two,
    register,
    registered,
    row_bucket,
)
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue

#: Programs that keep a large device's memory busy: a few for each multiprocessor.
_PROGRAMS = 256
#: How a launch meets its neighbours, see templates/common/product.py.jinja.
_LAUNCH = {"TRIGGER": 1, "PREFETCH": 0}


def product_choice(
    outputs: int, inputs: int, rows: int, dtype: str, *, splits: bool, block_o: int = 0
) -> Choice:
    """Enough programs to fill a device, and tens of kilobytes in flight for each.

    64 features are the M of a warp group's instruction on Hopper. A product with few features is
    cut along its inputs where a second launch follows anyway, else into narrower tiles. float32 has
    no tensor cores and takes small tiles, since the operands of a step stand in registers.

    Args:
        outputs, inputs: of the weight.
        rows: of the round.
        dtype: the model dtype.
        splits: sums of parts can be added by a later launch.
        block_o: features of a tile, where only some will do.
    """
    if dtype == "float32":
        tiles = {"BLOCK_O": block_o or 32, "BLOCK_I": 32, "SPLIT": 1, **_LAUNCH}
        return Choice(tiles, num_warps=4, num_stages=3)
    if not block_o and splits:
        block_o = 64
    elif not block_o:
        block_o = 64 if outputs >= 64 * 128 else 32 if outputs >= 32 * 128 else 16
    block_i = min(power_of_two(inputs), 128)
    steps = -(-inputs // block_i)
    programs = -(-outputs // block_o)
    split = max(1, min(-(-_PROGRAMS // programs), steps // 4)) if splits else 1
    block_r = row_bucket(rows)
    step = 2 * (block_o + block_r) * block_i  # bytes
    # Beside 64 sums a thread, compute capability 12.0 has registers for the operands of two stages.
    most = 2 if block_o * block_r >= 64 * 128 else 4
    num_stages = min(most, -(-steps // split), max(2, 1 + SHARED_BUDGET // step))
    tiles = {"BLOCK_O": block_o, "BLOCK_I": block_i, "SPLIT": split, **_LAUNCH}
    return Choice(tiles, num_warps=4, num_stages=num_stages)


def partial_bytes(outputs: int, rows: int, choice: Choice) -> int:
    """Bytes of the float32 sums of all parts."""
    return 4 * choice.tiles["SPLIT"] * rows * outputs


def _holes(outputs: int, inputs: int, n: Sizes) -> dict[str, HoleValue]:
    return {"O": outputs, "I": inputs, "BLOCK_R": row_bucket(n.B * n.W)}


def _register_branch_end(op: str, branch: str, extra: Callable[[Sizes], int]) -> None:
    def holes(n: Sizes) -> Mapping[str, HoleValue]:
        block = power_of_two(n.O)
        return {
            **_holes(n.O, n.I, n),
            "branch": branch,
            "groups": extra(n),
            "offset": n.offset,
            "BLOCK_H": block,
            "ROW_WARPS": min(4, max(1, block // 256)),
        }

    register(
        Kernel(
            op=op,
            template="linear_norm",
            holes=holes,
            choose=lambda n, dtype: product_choice(n.O, n.I, n.B * n.W, dtype, splits=True),
            scalars=("eps",),
            workspace=lambda n, choice: partial_bytes(n.O, n.B * n.W, choice),
        )
    )


_register_branch_end("linear_norm", "none", lambda n: 1)
_register_branch_end("linear_residual_norm", "residual", lambda n: 1)
_register_branch_end("linear_conv_residual_norm", "conv", lambda n: n.groups)

register(
    Kernel(
        op="linear",
        holes=lambda n: {**_holes(n.O, n.I, n), "unrounded": False, "scaled": False},
        choose=lambda n, dtype: product_choice(
            n.O, n.I, n.B * n.W, dtype, splits=n.O <= 64 * 32 and n.I >= 1024
        ),
        # Without tiles it is prefill's product over all rows, a library call.
        takes=lambda n: n.tiled,
        workspace=lambda n, choice: (
            partial_bytes(n.O, n.B * n.W, choice) if choice.tiles["SPLIT"] > 1 else 0
        ),
    )
)


def _swiglu_choice(n: Sizes, dtype: str) -> Choice:
    found = product_choice(2 * n.ffn_width, n.I, n.B * n.W, dtype, splits=False)
    return replace(found, tiles={**found.tiles, "HALVES": 0})


register(
    Kernel(
        op="swiglu_linear",
        holes=lambda n: {**_holes(2 * n.ffn_width, n.I, n), "scaled": False},
        choose=_swiglu_choice,
    )
)
register(
    Kernel(
        op="gdn_project",
        holes=lambda n: {
            **_holes(n.channels + n.value_width + 2 * n.heads, n.H, n),
            "N1": n.channels,
            "N2": n.value_width,
            "scaled": False,
        },
        choose=lambda n, dtype: product_choice(
            n.channels + n.value_width + 2 * n.heads, n.H, n.B * n.W, dtype, splits=False
        ),
    )
)


def _scale_choice(n: Sizes, dtype: str) -> Choice:
    """Tiles of one segment, whatever the rows."""
    found = product_choice(64 * n.segments, n.I, n.B * n.W, dtype, splits=False, block_o=64)
    return replace(found, num_warps=_scaling_warps(dtype))


def _scaling_warps(dtype: str) -> int:
    """More in float32: beside sums and operands, rows' squares stand in registers."""
    return 8 if dtype == "float32" else 4


register(
    Kernel(
        op="linear_residual_scale",
        holes=lambda n: {**_holes(64 * n.segments, n.I, n), "offset": n.offset},
        choose=_scale_choice,
    )
)


def _scaled_sizes(n: Sizes) -> Sizes:
    """Sizes of the op whose rows have no factors."""
    return Sizes({**n, "I": 64 * n.segments, "H": 64 * n.segments})


def _register_scaled(op: str, of: str, outputs: Callable[[Sizes], int]) -> None:
    kernel = registered(of)

    def choose(n: Sizes, dtype: str) -> Choice:
        found = product_choice(outputs(n), 64 * n.segments, n.B * n.W, dtype, splits=False)
        tiles = {**kernel.choose(_scaled_sizes(n), dtype).tiles, **found.tiles}
        return replace(found, tiles=tiles, num_warps=_scaling_warps(dtype))

    register(
        Kernel(
            op=op,
            template=of,
            holes=lambda n: {**kernel.holes(_scaled_sizes(n)), "scaled": True},
            choose=choose,
            scalars=("eps",),
        )
    )


_register_scaled("scaled_linear", "linear", lambda n: n.O)
_register_scaled("scaled_swiglu_linear", "swiglu_linear", lambda n: 2 * n.ffn_width)
_register_scaled(
    "scaled_gdn_project",
    "gdn_project",
    lambda n: n.channels + n.value_width + 2 * n.heads,
)


def _prepare_holes(n: Sizes) -> Mapping[str, HoleValue]:
    width = power_of_two(n.H // n.groups, least=1)
    return {
        **_holes(4 * n.groups, n.H, n),
        "H": n.H,
        "groups": n.groups,
        "BLOCK_G": max(1, min(64, 1024 // width)),
        "BLOCK_J": width,
    }


register(
    Kernel(
        op="conv_prepare",
        holes=_prepare_holes,
        choose=lambda n, dtype: product_choice(4 * n.groups, n.H, n.B * n.W, dtype, splits=True),
        workspace=lambda n, choice: partial_bytes(4 * n.groups, n.B * n.W, choice),
    )
)


def _register_context(op: str, *, rings: bool) -> None:
    def layers(n: Sizes) -> int:
        return n.layers if rings else 1

    def width(n: Sizes) -> int:
        return 2 * n.kv_heads * n.head_dim

    register(
        Kernel(
            op=op,
            template="context_kv",
            holes=lambda n: {
                **_holes(width(n), n.H, n),
                "layers": layers(n),
                "rings": rings,
                "KV_HEADS": n.kv_heads,
                "D": n.head_dim,
                "R": n.rotary_half,
                "BLOCK_D": power_of_two(n.head_dim),
            },
            # As one product over the features of all layers.
            choose=lambda n, dtype: product_choice(
                layers(n) * width(n), n.H, n.B * n.W, dtype, splits=True
            ),
            scalars=("eps",),
            takes=lambda n: rings or n.tiled,
            workspace=lambda n, choice: layers(n) * partial_bytes(width(n), n.B * n.W, choice),
        )
    )


_register_context("context_kv", rings=False)
_register_context("context_rings", rings=True)
