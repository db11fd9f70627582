"""block_ids: the draft's input block, the anchor and then mask tokens.

Math:     ids[b] = [anchor[b], MASK, ..., MASK]
Shapes:   anchor [B] int32; ids [B, columns] int32
Numeric:  exact
Effects:  writes all of ids
Raises:   ShapeError if columns < 1 or mask_token_id < 0
Source:   spec "The round" (Propose)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dflash_graph.op import Op, Sizes, ints


def reference(anchor: Tensor, *, columns: int, mask_token_id: int) -> Tensor:
    return functional.pad(anchor.unsqueeze(1), (0, columns - 1), value=mask_token_id)


def _check(n: Sizes) -> str | None:
    if n.columns < 1:
        return f"a block has at least the anchor's column, got columns {n.columns}"
    if n.mask_token_id < 0:
        return f"mask_token_id must not be negative, got {n.mask_token_id}"
    return None


OP = Op(
    name="block_ids",
    inputs={"anchor": ints("B")},
    outputs={"ids": ints("B columns")},
    attributes={"columns": int, "mask_token_id": int},
    reference=reference,
    flops=lambda n: 0,
    check=_check,
)
