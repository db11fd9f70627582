from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.join_features import OP
from dflash_graph.testing import EXACT, check_op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "columns", "blocks"), [(1, 1, 1), (3, 5, 2), (1, 16, 8), (3, 2, 1)]
)
def test_join_features(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int, blocks: int
) -> None:
    features = [torch.randn(batch, columns, 6, generator=rng).to(dtype) for _ in range(blocks)]
    expected = torch.empty(batch, columns, blocks * 6, dtype=torch.float64)
    for block in range(blocks):
        for channel in range(6):
            expected[..., block * 6 + channel] = features[block][..., channel].double()
    check_op(
        OP,
        {"features": features},
        {"blocks": blocks},
        EXACT,
        oracle={"out": expected},
        opcheck=batch == 3,
    )


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    features = [torch.randn(2, 5, 6, generator=rng) for _ in range(3)]
    traced = torch.compile(
        lambda *args: OP.reference(args, blocks=3), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(traced(*features), OP.reference(features, blocks=3))


def test_contract(rng: torch.Generator) -> None:
    features = [torch.randn(3, 8, 6, generator=rng).bfloat16() for _ in range(2)]
    with pytest.raises(
        ShapeError, match=r"join_features.features: expected 3 tensors \(blocks\), got 2"
    ):
        OP(features=features, blocks=3)
    specs = tuple(spec_of(f) for f in features)
    with pytest.raises(ShapeError, match=r"features: axis 2 .* must be 6 \(H .*\), got 5"):
        odd = spec_of(torch.empty(3, 8, 5, dtype=torch.bfloat16))
        OP.infer({"features": (specs[0], odd)}, {"blocks": 2})
    cost = OP.cost({"features": specs}, {"blocks": 2})
    assert (cost.read_bytes, cost.write_bytes) == (2 * 3 * 8 * 12, 2 * 3 * 8 * 12)
