from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.stage_features import OP
from dflash_graph.testing import same_bytes

DTYPES = [torch.float32, torch.bfloat16]


def draw(rng: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=rng).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_stage_features(
    rng: torch.Generator, dtype: torch.dtype, blocks: int, columns: int
) -> None:
    """Byte for byte, NaN and -0.0 too, also in what is not to be touched."""
    features = [draw(rng, dtype, 3, columns, 6) for _ in range(blocks)]
    features[0][1, 0, :2] = torch.tensor([-0.0, torch.nan])
    pending = draw(rng, dtype, 5, columns, blocks * 6)
    pending[4] = torch.nan
    slots, committed = ints(3, 0, 2), [columns, max(1, columns // 2), 0]
    expected = pending.clone()
    for b in range(3):
        for j in range(committed[b]):
            row = [value for feature in features for value in feature[b, j]]
            expected[slots[b], j] = torch.stack(row)
    given = [feature.clone() for feature in features]
    OP(features=features, pending=pending, slots=slots, committed=ints(*committed), blocks=blocks)
    assert same_bytes(pending, expected)
    assert all(same_bytes(a, b) for a, b in zip(features, given, strict=True))


def test_registration(rng: torch.Generator) -> None:
    features = [draw(rng, torch.float32, 2, 4, 6) for _ in range(2)]
    pending = draw(rng, torch.float32, 3, 4, 12)
    torch.library.opcheck(
        torch.ops.dflash_graph.stage_features.default,
        (features, pending, ints(2, 0), ints(4, 1), 2),
    )


def test_contract(rng: torch.Generator) -> None:
    features = [draw(rng, torch.bfloat16, 3, 8, 6) for _ in range(2)]
    pending = draw(rng, torch.bfloat16, 5, 8, 12)
    slots = ints(0, 1, 2)
    with pytest.raises(
        ShapeError, match=r"stage_features.features: expected 2 tensors \(blocks\), got 1"
    ):
        OP(features=features[:1], pending=pending, slots=slots, committed=slots, blocks=2)
    specs = {
        "features": tuple(spec_of(f) for f in features),
        "pending": spec_of(pending),
        "slots": spec_of(slots),
        "committed": spec_of(slots),
    }
    with pytest.raises(ShapeError, match=r"pending: axis 2 .* must be 18 \(blocks\*H\), got 12"):
        OP.infer(specs | {"features": (spec_of(features[0]),) * 3}, {"blocks": 3})
    with pytest.raises(ShapeError, match="features: expected a list"):
        OP.infer(specs | {"features": spec_of(features[0])}, {"blocks": 2})
    assert OP.infer(specs, {"blocks": 2}) == {}
    cost = OP.cost(specs, {"blocks": 2})
    assert cost.read_bytes == 2 * 2 * 3 * 8 * 6 + 4 * 6
    assert cost.write_bytes == 2 * 3 * 8 * 12
