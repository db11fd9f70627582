from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.head_scores import OP
from dflash_graph.testing import F32_REDUCTION, check_op

PLAIN = {"multiplier": 1.0, "softcap": 0.0, "tiled": True}
DTYPES = [torch.float32, torch.bfloat16]


def head_case(
    rng: torch.Generator, dtype: torch.dtype, batch: int, columns: int
) -> dict[str, torch.Tensor]:
    x = torch.randn(batch, columns, 24, generator=rng)
    x[0, 0] = 0.0
    return {"x": x.to(dtype), "weight": torch.randn(53, 24, generator=rng).to(dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 0.3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_head_scores(
    rng: torch.Generator, dtype: torch.dtype, multiplier: float, softcap: float
) -> None:
    """Float32 tolerances in bfloat16 too: scores are never rounded to the model dtype."""
    for batch, columns in ((1, 1), (3, 5), (1, 16)):
        case = head_case(rng, dtype, batch, columns)
        x, weight = case["x"].double(), case["weight"].double()
        scores = multiplier * (x.unsqueeze(2) * weight).sum(-1)
        if softcap:
            e = torch.exp(2 * scores / softcap)
            scores = softcap * (1 - 2 / (e + 1))
        attributes = {"multiplier": multiplier, "softcap": softcap, "tiled": True}
        for tiled in (True, False):
            check_op(
                OP,
                case,
                attributes | {"tiled": tiled},
                F32_REDUCTION,
                oracle={"scores": scores},
                opcheck=batch == 3 and tiled,
            )


def test_softcap_of_extreme_scores() -> None:
    x = torch.tensor([[[1.0]]])
    weight = torch.tensor([[0.0], [1e30], [-1e30], [torch.inf], [-torch.inf], [torch.nan], [1e-30]])
    found = OP(x=x, weight=weight, multiplier=1.0, softcap=30.0, tiled=True)[0, 0]
    assert found[:5].tolist() == [0.0, 30.0, -30.0, 30.0, -30.0]
    assert found[5].isnan()
    assert found[6] == torch.tensor(1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = head_case(rng, dtype, 3, 16)
    for attributes in (PLAIN, {"multiplier": 0.7, "softcap": 3.0, "tiled": True}):
        whole = OP.reference(**case, **attributes)
        for b, start, end in ((0, 0, 1), (1, 3, 4), (2, 15, 16), (1, 2, 7), (2, 0, 8), (0, 1, 16)):
            part = OP.reference(case["x"][b : b + 1, start:end], case["weight"], **attributes)
            assert torch.equal(part, whole[b : b + 1, start:end])


def test_traces_as_one_graph(rng: torch.Generator) -> None:
    case = head_case(rng, torch.bfloat16, 2, 5)
    attributes = {"multiplier": 0.7, "softcap": 3.0, "tiled": True}
    traced = torch.compile(
        lambda *args: OP.reference(*args, **attributes), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(traced(*case.values()), OP.reference(**case, **attributes))


def test_contract(rng: torch.Generator) -> None:
    specs = {n: spec_of(v) for n, v in head_case(rng, torch.bfloat16, 3, 8).items()}
    with pytest.raises(ShapeError, match=r"softcap must be 0 .* got -1.0"):
        OP.infer(specs, PLAIN | {"softcap": -1.0})
    cost = OP.cost(specs, PLAIN)
    assert cost.read_bytes == 2 * (3 * 8 * 24 + 53 * 24)
    assert cost.write_bytes == 4 * 3 * 8 * 53
    assert cost.flops == 2 * 3 * 8 * 53 * 24
