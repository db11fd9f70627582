from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.tensor import ITEM_BYTES, Symbols, TensorSpec, WeightUse


def test_spec() -> None:
    spec = TensorSpec((2, 3, 4), "bfloat16")
    assert spec.is_static
    assert (spec.numel(), spec.nbytes()) == (24, 48)
    assert str(spec) == "bfloat16[2, 3, 4]"
    assert spec == TensorSpec((2, 3, 4), "bfloat16") and hash(spec)
    assert TensorSpec((), "int32").numel() == 1
    assert TensorSpec((5, 0), "int32").nbytes() == 0


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_item_sizes(dtype: str) -> None:
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


def test_unknown_dtype() -> None:
    with pytest.raises(ShapeError, match=r"dtype: expected one of .*'bfloat16'.*got 'half'"):
        TensorSpec((1,), "half")


def test_capacities() -> None:
    spec = TensorSpec(("slots", 3, "pages"), "float32")
    assert not spec.is_static
    assert spec.bind({"slots": 2, "pages": 5, "other": 9}) == (2, 3, 5)
    assert spec.numel({"slots": 2, "pages": 5}) == 30
    assert spec.nbytes({"slots": 2, "pages": 5}) == 120
    assert str(spec) == "float32[slots, 3, pages]"
    with pytest.raises(ShapeError, match=r"capacity 'pages' is not bound; known: \['slots'\]"):
        spec.bind({"slots": 2})
    with pytest.raises(ShapeError, match="capacity 'slots' is not bound"):
        spec.nbytes()


def test_weight_use_is_a_value() -> None:
    spec = TensorSpec((4,), "float32")
    assert WeightUse(("a", "b"), spec) == WeightUse(("a", "b"), spec)
    assert len({WeightUse(("a",), spec), WeightUse(("b",), spec)}) == 2


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("W", 5),
        ("W+1", 6),
        ("W-1", 4),
        ("1-W", -4),
        ("2*W", 10),
        ("2*W*H", 30),
        ("W*H-H", 12),
        ("1+2*H", 7),
        ("W-H-1", 1),
        ("W-H*H+20", 16),
        ("head_dim2*2", 22),
    ],
)
def test_expressions(expression: str, value: int) -> None:
    assert Symbols("op", {"W": 5, "H": 3, "head_dim2": 11}).evaluate(expression) == value


@pytest.mark.parametrize(
    "expression", ["W+", "+W", "W--1", "*W", "W**2", "2*", "W/2", "W 2", "(W)", ""]
)
def test_malformed_expressions(expression: str) -> None:
    with pytest.raises(ShapeError, match="malformed shape expression"):
        Symbols("op", {"W": 5}).evaluate(expression)


def test_first_sight_binds_and_later_sights_agree() -> None:
    symbols = Symbols("op", {"groups": 4})
    symbols.bind("x", "B W H", (2, 5, 12))
    symbols.bind("y", "B W+1 4*groups", (2, 6, 16))
    assert symbols.sizes() == {"groups": 4, "B": 2, "W": 5, "H": 12}
    assert symbols.shape("B W-1 groups 3") == (2, 4, 4, 3)
    assert symbols.shape("") == ()


def test_errors_name_both_places() -> None:
    symbols = Symbols("layer 2", {"groups": 4})
    symbols.bind("x", "B W H", (2, 5, 12))
    for name, expression, shape, message in (
        ("w", "H", (13,), r"^layer 2.w: axis 0 of w must be 12 \(H from axis 2 of x\), got 13$"),
        ("w", "B 2*H", (2, 12), r"^layer 2.w: axis 1 of w must be 24 \(2\*H\), got 12$"),
        ("w", "groups", (5,), r"axis 0 of w must be 4 \(groups from attribute groups\), got 5$"),
        ("w", "B 3", (2, 4), r"axis 1 of w must be 3 \(3\), got 4$"),
        ("w", "B H", (2, 12, 1), r"^layer 2.w: expected 2 axes \[B H\], got 3: \[2, 12, 1\]$"),
        ("w", "B 2*K", (2, 4), "symbol 'K' is bound by no input; bound: .*'W'"),
    ):
        with pytest.raises(ShapeError, match=message):
            symbols.bind(name, expression, shape)


def test_a_symbol_repeated_in_one_shape() -> None:
    Symbols("op").bind("x", "H H", (3, 3))
    with pytest.raises(ShapeError, match=r"axis 1 of x must be 3 \(H from axis 0 of x\), got 4"):
        Symbols("op").bind("x", "H H", (3, 4))


def test_capacities_bind_as_names() -> None:
    symbols = Symbols("op")
    symbols.bind("k", "slots window", ("slots", 8))
    symbols.bind("v", "slots window", ("slots", 8))
    assert symbols.shape("slots window") == ("slots", 8)
    with pytest.raises(ShapeError, match="axis 0 of w must be slots"):
        symbols.bind("w", "slots", ("pages",))
    with pytest.raises(ShapeError, match="capacity 'slots' cannot stand in arithmetic"):
        symbols.evaluate("2*slots")
