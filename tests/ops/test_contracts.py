"""What holds for every op, and how good the errors of the contract are."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dflash_graph.ops
from dflash_graph.errors import ShapeError
from dflash_graph.op import Cost, Op, get_op, ints, op_names, tensor, weight
from dflash_graph.ops.conv_finish import OP as CONV_FINISH
from dflash_graph.ops.rms_norm import OP as RMS_NORM
from dflash_graph.ops.stage_features import OP as STAGE_FEATURES
from dflash_graph.tensor import ITEM_BYTES, MODEL_DTYPE, Symbols, TensorSpec

FOLDER = Path(dflash_graph.ops.__path__[0])
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"dflash_graph.ops.{name}")


def test_every_file_declares_the_op_of_its_name() -> None:
    assert FILES
    assert set(FILES) <= set(op_names())
    for name in FILES:
        assert get_op(name) is module_of(name).OP
        assert module_of(name).OP.name == name


@pytest.mark.parametrize("name", FILES)
def test_docstring_states_the_contract(name: str) -> None:
    text = module_of(name).__doc__ or ""
    assert text.startswith(f"{name}: "), "the first line names the op and says what it is"
    heads = [line.split(":")[0] for line in text.splitlines() if line[:1].isupper()]
    for head in ("Math", "Shapes", "Numeric", "Effects", "Source"):
        assert head in heads, f"{head}: is missing; there are {heads}"


LISTS = [(op, name) for op in map(get_op, FILES) for name, given in op.inputs.items() if given.many]


@pytest.mark.parametrize(("op", "name"), LISTS, ids=[f"{op.name}.{name}" for op, name in LISTS])
def test_a_list_is_as_long_as_its_attribute_says(op: Op, name: str) -> None:
    """A graph learns it where the call is declared, not a kernel where it is launched."""
    count = op.inputs[name].many
    attributes = {
        key: 4 if kind is int else 1.0 if kind is float else False
        for key, kind in op.attributes.items()
    }
    attributes |= {count: 3} | ({"rotary_half": 2} if "rotary_half" in attributes else {})
    sizes = Symbols(op.name, {k: v for k, v in attributes.items() if type(v) is int})
    names = {c for given in op.inputs.values() for c in re.findall("[A-Za-z_]+", given.shape)}
    for symbol in names - attributes.keys():
        sizes.bind("sizes", symbol, (4,))
    specs = {}
    for key, given in op.inputs.items():
        dtype = "float32" if given.dtype == MODEL_DTYPE else given.dtype
        spec = TensorSpec(sizes.shape(given.shape), dtype)
        specs[key] = (spec,) * 3 if given.many else spec
    op.bind(specs, attributes)
    for wrong in (0, 2, 4):
        message = rf"^{op.name}\.{name}: expected 3 tensors \({count}\), got {wrong}$"
        with pytest.raises(ShapeError, match=message):
            op.bind({**specs, name: specs[name][:1] * wrong}, attributes)


@pytest.mark.parametrize("name", FILES)
def test_has_a_test_file(name: str) -> None:
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


@pytest.mark.parametrize("name", FILES)
def test_schema_says_what_the_contract_says(name: str) -> None:
    op = get_op(name)
    schema = getattr(torch.ops.dflash_graph, name).default._schema
    assert [argument.name for argument in schema.arguments] == [*op.inputs, *op.attributes]
    for argument in schema.arguments[: len(op.inputs)]:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        assert writes is (argument.name in op.updated), argument.name
    assert len(schema.returns) == len(op.outputs)


@pytest.mark.parametrize("name", FILES)
def test_reference_takes_inputs_then_attributes_by_name(name: str) -> None:
    op = get_op(name)
    parameters = inspect.signature(op.reference).parameters
    assert list(parameters) == [*op.inputs, *op.attributes]
    for attribute in op.attributes:
        assert parameters[attribute].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", FILES)
def test_effects_are_consistent(name: str) -> None:
    op = get_op(name)
    for updated in op.updated:
        assert op.inputs[updated].kind == "state"
        assert updated in op.writes, f"{updated}: how much is written?"
    assert set(op.writes) == set(op.updated)
    for output, source in op.in_place.items():
        given, made = op.inputs[source], op.outputs[output]
        assert given.kind == "tensor" and not given.many, "only an activation gives up its place"
        assert (given.shape, given.dtype) == (made.shape, made.dtype)
    assert op.outputs or op.updated, "an op has an effect"
    for argument in (*op.inputs.values(), *op.outputs.values()):
        assert argument.dtype == MODEL_DTYPE or argument.dtype in ITEM_BYTES
    for argument in op.inputs.values():
        if argument.kind == "state":
            assert argument.shape.split()[0] in ("slots", "pages")


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


NORM = {"x": spec(2, 5, 24), "weight": spec(24)}
EPS = {"eps": 1e-6, "offset": True}


def test_infer() -> None:
    assert RMS_NORM.infer(NORM, EPS) == {"y": spec(2, 5, 24)}
    half = {"x": spec(2, 5, 24, dtype="bfloat16"), "weight": spec(24, dtype="bfloat16")}
    assert RMS_NORM.infer(half, EPS) == {"y": spec(2, 5, 24, dtype="bfloat16")}
    assert RMS_NORM.infer(NORM, {"eps": 1, "offset": False})  # an int is a float, too


def wrong(specs: dict, attributes: dict, *parts: str, op: Op = RMS_NORM, where: str = "") -> None:
    """Both entries raise one message with all of `parts`."""
    for entry in (op.bind, op.infer):
        with pytest.raises(ShapeError) as error:
            entry(specs, attributes, where)
        for part in parts:
            assert part in str(error.value)


def test_wrong_axis_names_both_places() -> None:
    wrong(
        NORM | {"weight": spec(25)},
        EPS,
        "rms_norm.weight",
        "axis 0 of weight must be 24",
        "(H from axis 2 of x)",
        "got 25",
    )
    wrong(NORM | {"weight": spec(25)}, EPS, "layer 3 norm.weight", where="layer 3 norm")
    delta = {"y": spec(1, 4, 8), "base": spec(2, 2, 8), "delta": spec(1, 4, 2, 3)}
    wrong(
        delta,
        {"groups": 2},
        "axis 3 of delta must be 2",
        "(groups from attribute groups)",
        op=CONV_FINISH,
    )
    wrong(
        delta | {"base": spec(2, 3, 8)},
        {"groups": 2},
        "axis 1 of base must be 2",
        "got 3",
        op=CONV_FINISH,
    )


def test_wrong_rank() -> None:
    wrong(NORM | {"x": spec(5, 24)}, EPS, "rms_norm.x", "expected 3 axes [B W H]", "[5, 24]")


def test_wrong_dtype() -> None:
    wrong(
        NORM | {"weight": spec(24, dtype="bfloat16")},
        EPS,
        "rms_norm.weight",
        "expected dtype float32",
        "got bfloat16",
    )
    with pytest.raises(ShapeError, match=r"rms_norm.x: expected dtype bfloat16, got float32"):
        RMS_NORM.infer(NORM, EPS, model_dtype="bfloat16")


def test_missing_and_unknown_arguments() -> None:
    wrong({"x": NORM["x"]}, EPS, "expected arguments ['x', 'weight']", "missing ['weight']")
    wrong(NORM | {"bias": spec(24)}, EPS, "unknown ['bias']")


def test_attributes() -> None:
    wrong(NORM, {"eps": 1e-6}, "expected attributes ['eps', 'offset']", "missing ['offset']")
    wrong(NORM, EPS | {"scale": 1.0}, "unknown ['scale']")
    wrong(NORM, EPS | {"eps": "1e-6"}, "rms_norm.eps: expected float, got str '1e-6'")
    wrong(NORM, EPS | {"offset": 1}, "rms_norm.offset: expected bool, got int 1")
    wrong(NORM, EPS | {"eps": True}, "rms_norm.eps: expected float, got bool True")


def test_lists() -> None:
    one, many = spec(1, 4, 6), (spec(1, 4, 6), spec(1, 4, 6))
    rest = {
        "pending": spec(3, 4, 12),
        "slots": spec(1, dtype="int32"),
        "committed": spec(1, dtype="int32"),
    }
    assert STAGE_FEATURES.infer({"features": many, **rest}, {"blocks": 2}) == {}
    wrong({"features": one, **rest}, {"blocks": 2}, "expected a list", op=STAGE_FEATURES)
    wrong(NORM | {"x": many}, EPS, "rms_norm.x: expected one tensor")


def test_capacities_are_no_numbers() -> None:
    """State has axes that are bound only when the pools are made."""
    specs = {
        "features": (spec(1, 4, 6),),
        "pending": TensorSpec(("slots", 4, 6), "float32"),
        "slots": spec(1, dtype="int32"),
        "committed": spec(1, dtype="int32"),
    }
    assert STAGE_FEATURES.infer(specs, {"blocks": 1}) == {}
    assert STAGE_FEATURES.cost(specs, {"blocks": 1}).write_bytes == 4 * 4 * 6


def test_cost() -> None:
    cost = RMS_NORM.cost(NORM, EPS)
    assert cost == Cost(4 * (240 + 24), 4 * 240, 4 * 240)
    assert cost.bytes == cost.read_bytes + cost.write_bytes
    assert cost + Cost(1, 2, 3) == Cost(cost.read_bytes + 1, cost.write_bytes + 2, cost.flops + 3)


def test_the_registered_op_checks_its_contract() -> None:
    with pytest.raises(ShapeError, match=r"axis 0 of weight must be 24 \(H from axis 2 of x\)"):
        RMS_NORM(x=torch.zeros(2, 5, 24), weight=torch.zeros(25), eps=1e-6, offset=True)
    fake = torch.empty(2, 5, 24, device="meta"), torch.empty(25, device="meta")
    with pytest.raises(ShapeError, match=r"axis 0 of weight must be 24 \(H from axis 2 of x\)"):
        torch.ops.dflash_graph.rms_norm(*fake, 1e-6, True)


def test_unknown_op() -> None:
    with pytest.raises(ShapeError, match=r"op 'rmsnorm' does not exist; there are .*'rms_norm'"):
        get_op("rmsnorm")


def test_a_name_is_declared_once() -> None:
    with pytest.raises(AssertionError, match="op 'rms_norm' is declared twice"):
        Op(
            name="rms_norm",
            inputs={"x": tensor("B W H"), "weight": weight("H"), "ids": ints("B")},
            outputs={"y": tensor("B W H")},
            reference=RMS_NORM.reference,
            flops=lambda n: 0,
        )
    assert get_op("rms_norm") is RMS_NORM
