"""replace_embeddings: chosen columns are replaced, others keep their bits."""

from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.replace_embeddings import OP
from dflash_graph.testing import EXACT, check_op, same_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns(rng: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 6, generator=rng).to(dtype)
    given = torch.randn(2, 5, 6, generator=rng)
    replaced = torch.randint(0, 2, (2, 5), generator=rng).int()
    given[replaced == 0] = float("nan")  # what does not replace is never read
    oracle = torch.where(replaced.bool().unsqueeze(-1), given.to(dtype), x)
    found = check_op(
        OP, {"x": x, "given": given, "replaced": replaced}, {}, EXACT, oracle={"y": oracle}
    )
    assert same_bytes(found["y"][replaced == 0], x[replaced == 0])


def test_contract() -> None:
    x, given = torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)
    specs = {"x": spec_of(x), "given": spec_of(given), "replaced": spec_of(torch.zeros(1, 2).int())}
    with pytest.raises(ShapeError, match="axis 2 of given must be 4"):
        OP.infer(specs, {})
    specs["given"] = spec_of(x)
    assert OP.cost(specs, {}).bytes == 2 * 4 * 8 + 2 * 4 + 2 * 4 * 4
