"""The op contract: typed arguments, state effects, inference, cost, and its `torch.library`
registration.

An op is declared once, in its file under `ops/`, as one `Op` value. Everything else reads that
value: graphs infer shapes from it, the planner learns which outputs may take an input's place,
lowerings run its reference or bind a kernel, profiles count its bytes and flops, and users get
`torch.ops.dflash_graph.<name>` with a fake implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from dflash_graph.errors import ShapeError
from dflash_graph.tensor import ITEM_BYTES, MODEL_DTYPE, Symbols, TensorSpec

ArgumentKind = Literal["tensor", "weight", "state"]
Attribute = int | float | bool | str | tuple[int, ...]
#: What `Op.infer` takes for one argument: a spec, or several for a variadic argument.
Specs = TensorSpec | tuple[TensorSpec, ...]

_SCHEMA_TYPES: Mapping[type, str] = MappingProxyType(
    {bool: "bool", int: "int", float: "float", str: "str", tuple: "int[]"}
)


@dataclass(frozen=True)
class Argument:
    """One typed argument of an op.

    Args:
        shape: shape expression, see `dflash_graph.tensor`.
        dtype: a dtype name, or ``"model"`` for the graph's model dtype.
        kind: ``"tensor"`` (activation or frame field), ``"weight"`` or ``"state"``.
        updates: for state: the op changes it in place.
        many: of a list of tensors of this shape, the attribute that says how many; empty for one.
    """

    shape: str
    dtype: str = MODEL_DTYPE
    kind: ArgumentKind = "tensor"
    updates: bool = False
    many: str = ""


def tensor(shape: str, dtype: str = MODEL_DTYPE, *, many: str = "") -> Argument:
    """An activation, or a list of them."""
    return Argument(shape, dtype, many=many)


def ints(shape: str) -> Argument:
    """An int32 tensor: ids, slots, positions, counts."""
    return Argument(shape, "int32")


def weight(shape: str, dtype: str = MODEL_DTYPE) -> Argument:
    """A weight of the model."""
    return Argument(shape, dtype, kind="weight")


def state(shape: str, dtype: str = MODEL_DTYPE, *, updates: bool = False) -> Argument:
    """State that outlives a round; `updates` if the op writes it."""
    return Argument(shape, dtype, kind="state", updates=updates)


class Sizes(dict[str, Any]):
    """Sizes of one call as attributes: bound symbols, op attributes, and `context` (tokens before
    the block).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"size {name!r} is not bound; bound: {sorted(self)}") from None


@dataclass(frozen=True)
class Cost:
    """Exact traffic of one call: bytes read and written, floating-point operations."""

    read_bytes: int = 0
    write_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
            self.flops + other.flops,
        )

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


Count = Callable[[Sizes], int]


@dataclass(frozen=True)
class Op:
    """The contract of one op.

    Args:
        name: the file name and the name under `torch.ops.dflash_graph`.
        inputs: arguments in order.
        outputs: results in order; an op whose only effect is on state has none.
        attributes: name -> type (`int`, `float`, `bool`, `str`, or `tuple` of ints).
        reference: the definition, in plain torch. It returns fresh tensors (never an alias of an
            input), one per output, and updates state arguments in place. Fed float64 it is the
            oracle.
        flops: floating-point operations of a call.
        reads: elements of an argument that a call reads, where that is not the whole argument
            (gathers, state).
        writes: elements of an updated state argument that a call writes.
        check: further conditions on sizes; returns a sentence for what is wrong, or None.
        in_place: output -> input whose buffer it may take when nothing else needs that input.
        opaque: a lowering that traces references calls the op whole instead of tracing into it.
    """

    name: str
    inputs: Mapping[str, Argument]
    outputs: Mapping[str, Argument]
    reference: Callable[..., Any]
    flops: Count
    attributes: Mapping[str, type] = field(default_factory=dict)
    reads: Mapping[str, Count] = field(default_factory=dict)
    writes: Mapping[str, Count] = field(default_factory=dict)
    check: Callable[[Sizes], str | None] | None = None
    in_place: Mapping[str, str] = field(default_factory=dict)
    opaque: bool = False

    def __post_init__(self) -> None:
        if self.name in _OPS:
            raise AssertionError(f"op {self.name!r} is declared twice")
        for output, source in self.in_place.items():
            assert self.outputs[output].dtype == self.inputs[source].dtype, (self.name, output)
        for argument in (*self.reads, *self.writes):
            assert argument in self.inputs, (self.name, argument)
        for name, entry in self.inputs.items():
            assert not entry.many or self.attributes[entry.many] is int, (self.name, name)
        _OPS[self.name] = self
        _register(self)

    @property
    def updated(self) -> tuple[str, ...]:
        """State arguments that a call changes."""
        return tuple(name for name, argument in self.inputs.items() if argument.updates)

    def bind(
        self,
        specs: Mapping[str, Specs],
        attributes: Mapping[str, Attribute],
        where: str = "",
        model_dtype: str | None = None,
    ) -> tuple[Symbols, str]:
        """Match a call against the contract.

        Args:
            specs: argument -> spec.
            attributes: attribute -> value; exactly the declared ones.
            where: name of the node, for messages; the op's name if empty.
            model_dtype: the model dtype where no argument shows it.

        Returns:
            The bound symbols and the model dtype of the call.

        Raises:
            ShapeError: an argument, dtype or attribute is outside the contract.
        """
        where = where or self.name
        _same_names(where, "arguments", self.inputs, specs)
        _same_names(where, "attributes", self.attributes, attributes)
        for name, kind in self.attributes.items():
            value = attributes[name]
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise ShapeError(
                    f"{where}.{name}: expected {kind.__name__}, "
                    f"got {type(value).__name__} {value!r}"
                )
        numbers = {name: value for name, value in attributes.items() if type(value) is int}
        symbols = Symbols(where, numbers)
        for name, argument in self.inputs.items():
            given = specs[name]
            if bool(argument.many) is isinstance(given, TensorSpec):
                raise ShapeError(
                    f"{where}.{name}: expected {'a list' if argument.many else 'one tensor'}"
                )
            each = (given,) if isinstance(given, TensorSpec) else given
            if argument.many and len(each) != attributes[argument.many]:
                raise ShapeError(
                    f"{where}.{name}: expected {attributes[argument.many]} tensors "
                    f"({argument.many}), got {len(each)}"
                )
            for spec in each:
                symbols.bind(name, argument.shape, spec.shape)
                expected = argument.dtype
                if expected == MODEL_DTYPE:
                    expected = model_dtype = model_dtype or spec.dtype
                if spec.dtype != expected:
                    raise ShapeError(f"{where}.{name}: expected dtype {expected}, got {spec.dtype}")
        if model_dtype is None:
            model_dtype = "float32"
        if self.check is not None:
            problem = self.check(Sizes({**attributes, **symbols.sizes()}))
            if problem:
                raise ShapeError(f"{where}: {problem}")
        return symbols, model_dtype

    def infer(
        self,
        specs: Mapping[str, Specs],
        attributes: Mapping[str, Attribute],
        where: str = "",
        model_dtype: str | None = None,
    ) -> dict[str, TensorSpec]:
        """Specs of the outputs of a call; arguments and errors as in `bind`."""
        symbols, model_dtype = self.bind(specs, attributes, where, model_dtype)
        return {
            name: TensorSpec(
                symbols.shape(output.shape),
                model_dtype if output.dtype == MODEL_DTYPE else output.dtype,
            )
            for name, output in self.outputs.items()
        }

    def cost(
        self,
        specs: Mapping[str, Specs],
        attributes: Mapping[str, Attribute],
        *,
        context: int = 0,
        model_dtype: str | None = None,
    ) -> Cost:
        """Exact bytes and flops of a call with `context` tokens before the block in every
        request.
        """
        symbols, model_dtype = self.bind(specs, attributes, model_dtype=model_dtype)
        sizes = Sizes({**attributes, **symbols.sizes(), "context": context})
        read = write = 0
        for name, argument in self.inputs.items():
            given = specs[name]
            many = (given,) if isinstance(given, TensorSpec) else given
            item = ITEM_BYTES[many[0].dtype]
            if name in self.reads:
                read += self.reads[name](sizes) * item
            elif not argument.updates:
                read += sum(spec.nbytes() for spec in many)
            if argument.updates:
                write += self.writes[name](sizes) * item
        for spec in self.infer(specs, attributes, model_dtype=model_dtype).values():
            write += spec.nbytes()
        return Cost(read, write, self.flops(sizes))

    def __call__(self, **arguments: Any) -> Any:
        """Run the registered custom op (`torch.ops.dflash_graph.<name>`), which checks the
        contract.
        """
        return getattr(torch.ops.dflash_graph, self.name)(
            *(arguments[name] for name in (*self.inputs, *self.attributes))
        )


_OPS: dict[str, Op] = {}


def get_op(name: str) -> Op:
    """The op declared under `name`; raises ShapeError listing what exists."""
    try:
        return _OPS[name]
    except KeyError:
        raise ShapeError(f"op {name!r} does not exist; there are {sorted(_OPS)}") from None


def op_names() -> tuple[str, ...]:
    """Names of all declared ops, sorted."""
    return tuple(sorted(_OPS))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`."""
    return getattr(torch, name)


def spec_of(value: torch.Tensor) -> TensorSpec:
    """The spec of a tensor."""
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _same_names(
    where: str, what: str, expected: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    if expected.keys() != found.keys():
        missing, extra = (
            sorted(expected.keys() - found.keys()),
            sorted(found.keys() - expected.keys()),
        )
        raise ShapeError(
            f"{where}: expected {what} {list(expected)}; missing {missing}, unknown {extra}"
        )


def _schema(op: Op) -> str:
    """The op's signature in torch's schema language."""
    fields = []
    for index, (name, argument) in enumerate(op.inputs.items()):
        tag = f"(a{index}!)" if argument.updates else ""
        fields.append(f"Tensor{tag}{'[]' if argument.many else ''} {name}")
    fields += [f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in op.attributes.items()]
    results = ", ".join("Tensor" for _ in op.outputs)
    return f"({', '.join(fields)}) -> {results if len(op.outputs) == 1 else f'({results})'}"


def _register(op: Op) -> None:
    names = (*op.inputs, *op.attributes)

    def split(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        values = dict(zip(names, arguments, strict=True))
        attributes: dict[str, Any] = {name: values.pop(name) for name in op.attributes}
        for name, kind in op.attributes.items():
            if kind is tuple:
                attributes[name] = tuple(attributes[name])
        return values, attributes

    def specs(values: Mapping[str, Any]) -> dict[str, Specs]:
        return {
            name: spec_of(value)
            if isinstance(value, torch.Tensor)
            else tuple(spec_of(v) for v in value)
            for name, value in values.items()
        }

    def real(*arguments: Any) -> Any:
        values, attributes = split(arguments)
        op.bind(specs(values), attributes)
        return op.reference(**values, **attributes)

    def fake(*arguments: Any) -> Any:
        values, attributes = split(arguments)
        first = next(iter(values.values()))
        device = (first if isinstance(first, torch.Tensor) else first[0]).device
        made = tuple(
            torch.empty(spec.bind({}), dtype=dtype_of(spec.dtype), device=device)
            for spec in op.infer(specs(values), attributes).values()
        )
        return made[0] if len(made) == 1 else (made or None)

    custom = torch.library.custom_op(
        f"dflash_graph::{op.name}", real, mutates_args=op.updated, schema=_schema(op)
    )
    custom.register_fake(fake)
