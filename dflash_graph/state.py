"""state: pools of everything that outlives a round, planned from the graphs that use them, and
their allocators.

Slots hold what a request owns alone (recurrent state, convolution history, rings, pending features,
continuation hidden); pages hold paged K/V. What is planned and printed is what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import torch
from torch import Tensor

from dflash_graph.errors import ContextError, PlanError, RequestError
from dflash_graph.graph import Value
from dflash_graph.models.pair import PAGE_SIZE
from dflash_graph.op import dtype_of
from dflash_graph.planner import ALIGNMENT

#: Kinds of state that no image holds: context catches up first, and the tokens imply the counts.
DERIVED: Final = ("draft.pending_features", "target.token_counts")


@dataclass(frozen=True)
class Capacities:
    """Numbers bound to capacity names.

    Args:
        slots: requests that hold state at once.
        context: positions one request may have, tokens.
        pages: pages of each paged pool; by default enough for every slot at full context.
    """

    slots: int
    context: int
    pages: int = 0

    @property
    def request_pages(self) -> int:
        """Entries of one request's page table."""
        return -(-self.context // PAGE_SIZE)

    def bindings(self) -> dict[str, int]:
        """Capacity name -> number."""
        return {
            "slots": self.slots,
            "pages": self.pages or self.slots * self.request_pages,
            "request_pages": self.request_pages,
        }


@dataclass(frozen=True)
class PoolSpec:
    """One state tensor: its name, bound shape, dtype and bytes, and the bytes of one slot or
    page.
    """

    name: str
    kind: str
    unit: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def unit_bytes(self) -> int:
        return self.nbytes // self.shape[0]


@dataclass(frozen=True)
class StatePlan:
    """Every pool, in declaration order."""

    pools: tuple[PoolSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, each aligned as it will be allocated."""
        return sum(-(-pool.nbytes // ALIGNMENT) * ALIGNMENT for pool in self.pools)

    def kinds(self) -> dict[str, tuple[str, int, int]]:
        """Kind of state -> (unit, bytes of one unit over all layers, bytes in all)."""
        totals: dict[str, tuple[str, int, int]] = {}
        for pool in self.pools:
            unit, one, everything = totals.get(pool.kind, (pool.unit, 0, 0))
            totals[pool.kind] = (unit, one + pool.unit_bytes, everything + pool.nbytes)
        return totals


def plan_state(values: Iterable[Value], capacities: Capacities) -> StatePlan:
    """Plan pools for the state values of some graphs; values of one name are one pool.

    Raises:
        PlanError: two graphs disagree about a state.
    """
    pools: dict[str, PoolSpec] = {}
    bindings = capacities.bindings()
    for value in values:
        kind = _kind(value.name)
        unit = str(value.spec.shape[0]).removesuffix("s")
        pool = PoolSpec(
            value.name,
            kind,
            unit,
            value.spec.bind(bindings),
            value.spec.dtype,
            value.spec.nbytes(bindings),
        )
        if pools.setdefault(value.name, pool) != pool:
            raise PlanError(
                f"state {value.name!r}: declared as {pools[value.name].shape} and as {pool.shape}"
            )
    return StatePlan(tuple(pools.values()))


def _kind(name: str) -> str:
    owner, *_, leaf = name.split(".")
    leaf = leaf.removeprefix("k_").removeprefix("v_") if leaf[:2] in ("k_", "v_") else leaf
    return f"{owner}.{leaf}"


class StatePools:
    """The allocated pools of a plan, each a view of one aligned allocation.

    Args:
        plan: what to allocate.
        device: where.
    """

    def __init__(self, plan: StatePlan, device: str | torch.device = "cpu") -> None:
        self.plan = plan
        self.storage = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        self.tensors: dict[str, Tensor] = {}
        cursor = 0
        for pool in plan.pools:
            part = self.storage[cursor : cursor + pool.nbytes]
            self.tensors[pool.name] = part.view(dtype_of(pool.dtype)).view(pool.shape)
            cursor += -(-pool.nbytes // ALIGNMENT) * ALIGNMENT
        self._slotted = [
            self.tensors[pool.name]
            for pool in plan.pools
            if pool.kind in ("target.gdn_state", "target.conv_history")
        ]
        self._units = {pool.name: pool.unit for pool in plan.pools}

    def reset_slot(self, slot: int) -> None:
        """Give a slot to a new request: recurrent state and convolution history start at zero.

        Rings, pages and pending features need nothing: what lies outside their live extents is
            unreachable.
        """
        for pool in self._slotted:
            pool[slot].zero_()

    def count(self, slot: int, tokens: Iterable[int]) -> None:
        """Set a slot's token counts to those of `tokens`, everything its request has generated."""
        counts = self.tensors["target.token_counts"][slot].zero_()
        ids = torch.tensor(list(tokens), dtype=torch.long, device=counts.device)
        counts.index_put_((ids,), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)

    def image(self, slot: int, pages: list[int], length: int) -> dict[str, Tensor]:
        """Copies of everything a request at `length` processed positions owns, by pool name.

        Pending features and token counts are left out (`DERIVED`). Bytes that no
        position reaches (the tail of the last page, entries of a ring not yet written) are zero.
        """
        images: dict[str, Tensor] = {}
        for pool in self.plan.pools:
            if pool.kind in DERIVED:
                continue
            source = self.tensors[pool.name]
            if pool.unit == "slot":
                image = source[slot].clone()
                if pool.kind.endswith("ring") and length < image.shape[0]:
                    image[length:] = 0
            else:
                image = source[pages[: -(-length // PAGE_SIZE)]].clone()
                if length % PAGE_SIZE:
                    image[-1, :, length % PAGE_SIZE :] = 0
            images[pool.name] = image
        return images

    def require_image(self, images: Mapping[str, Tensor], length: int) -> None:
        """Raise ContextError unless `images` are what `image` makes at `length` positions."""
        expected = {pool.name: pool for pool in self.plan.pools if pool.kind not in DERIVED}
        for name in sorted(expected.keys() ^ images.keys()):
            what = "an image of it, got none" if name in expected else "no image of this name"
            raise ContextError(f"checkpoint: {name}: expected {what}")
        for name, pool in expected.items():
            lead = () if pool.unit == "slot" else (-(-length // PAGE_SIZE),)
            shape, dtype = (*lead, *pool.shape[1:]), dtype_of(pool.dtype)
            found = images[name]
            if tuple(found.shape) != shape or found.dtype != dtype:
                raise ContextError(
                    f"checkpoint: {name}: expected {dtype} {list(shape)} (at {length} positions), "
                    f"got {found.dtype} {list(found.shape)}"
                )

    def load_image(self, images: Mapping[str, Tensor], slot: int, pages: list[int]) -> None:
        """Write an image, which the caller has checked, into a slot and pages."""
        for name, image in images.items():
            target = self.tensors[name]
            if self._units[name] == "slot":
                target[slot].copy_(image)
            else:
                target[pages[: image.shape[0]]] = image.to(target.device)


class FreeList:
    """Indices `0..count-1`, handed out lowest first; used for slots and for pages.

    Example:
        >>> slots = FreeList("slot", 2)
        >>> slots.take(), slots.take(), slots.free
        (0, 1, 0)
    """

    def __init__(self, what: str, count: int) -> None:
        self._what = what
        self.count = count
        self._free = list(range(count))  # a heap
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free index; raises RequestError when there is none."""
        if not self._free:
            raise RequestError(f"no free {self._what} of {self.count}; wait for a request to end")
        index = heappop(self._free)
        self._taken.add(index)
        return index

    def give(self, index: int) -> None:
        """Return an index."""
        assert index in self._taken, f"{self._what} {index} is not taken"
        self._taken.remove(index)
        heappush(self._free, index)
