"""Cards: the CUDA devices that a run is shared over, by what tells one from another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dflash_graph.errors import OptionError
from dflash_graph.profile_store import Identity, device_identity

#: What a process sees of the machine's devices, and in which order.
VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Card:
    """One device of this machine.

    Args:
        index: among the devices that torch sees in this process.
        visible: the value of `VARIABLE` with which a process sees this one alone.
        uuid: its own.
    """

    index: int
    visible: str
    uuid: str


def parse_indices(text: str) -> tuple[int, ...]:
    """The indices of ``"0,1"``.

    Raises:
        OptionError: it is no list of indices, or has one twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise OptionError(
            f"devices: expected indices of CUDA devices with commas between, such as 0,1, got "
            f"{text!r}"
        )
    indices = tuple(map(int, parts))
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise OptionError(
            f"devices: expected each device once, got {', '.join(map(str, twice))} more than once "
            f"in {text!r}"
        )
    return indices


def find_cards(indices: Sequence[int]) -> tuple[tuple[Card, ...], Identity]:
    """Devices by index, and what all of them are.

    Raises:
        OptionError: torch sees none, or not these; or they are not of one kind, so that what one
            measures says nothing of another.
    """
    device_identity()  # there is one
    count = torch.cuda.device_count()
    identities = {}
    for index in indices:
        if index >= count:
            known = "only 0" if count == 1 else f"0 to {count - 1}"
            raise OptionError(
                f"devices: expected CUDA devices that are here ({known}), got {index}"
            )
        identities[index] = device_identity(index)
    first = identities[indices[0]]
    for index, identity in identities.items():
        if identity != first:
            raise OptionError(
                f"devices: expected devices of one kind, got {indices[0]} ({_kind(first)}) and "
                f"{index} ({_kind(identity)}); tune each kind in a run of its own"
            )
    named = os.environ.get(VARIABLE)
    visible = named.split(",") if named else [str(index) for index in range(max(indices) + 1)]
    cards = (Card(index, visible[index].strip(), card_uuid(index)) for index in indices)
    return tuple(cards), first


def card_uuid(index: int) -> str:
    """A device's own identifier."""
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.uuid)


def _kind(identity: Identity) -> str:
    return f"{identity.device}, sm_{identity.capability}"
