"""Cards: which devices a run is shared over, and what is said of those that cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash_graph.autotune import device
from dflash_graph.autotune.cards import VARIABLE, Card, card_uuid, find_cards, parse_indices
from dflash_graph.errors import OptionError
from dflash_graph.profile_store import device_identity


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """Devices by name and capability; the current one is the first."""
    found = [("A Device 1", (9, 0)), ("A Device 1", (9, 0)), ("Another", (12, 0))]
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("dflash_graph.profile_store._driver_version", lambda: "1.0")
    for name, value in {
        "is_available": lambda: bool(found),
        "device_count": lambda: len(found),
        "current_device": lambda: 0,
        "get_device_name": lambda index=None: found[index or 0][0],
        "get_device_capability": lambda index=None: found[index or 0][1],
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


@pytest.mark.parametrize(
    ("text", "indices"), [("0", (0,)), ("0,1", (0, 1)), (" 2, 0 ", (2, 0)), ("10,007", (10, 7))]
)
def test_indices_are_read(text: str, indices: tuple[int, ...]) -> None:
    assert parse_indices(text) == indices


@pytest.mark.parametrize("text", ["", ",", "0,", "0 1", "-1", "0,x", "cuda:0", "1.0", "²", "0-3"])
def test_what_is_no_list_of_indices_is_said(text: str) -> None:
    with pytest.raises(OptionError, match=r"devices: expected indices .* such as 0,1, got "):
        parse_indices(text)


@pytest.mark.parametrize(("text", "twice"), [("0,0", "0"), ("2,1,2,01", "1, 2")])
def test_an_index_that_is_there_twice_is_named(text: str, twice: str) -> None:
    with pytest.raises(OptionError, match=f"expected each device once, got {twice} more than once"):
        parse_indices(text)


def test_cards_are_found(machine: list[object]) -> None:
    cards, identity = find_cards((1, 0))
    assert cards == (Card(1, "1", "uuid-1"), Card(0, "0", "uuid-0"))
    assert identity == device_identity(1) and identity.device == "A Device 1"


@pytest.mark.parametrize("named", ["5,3", " GPU-aa , GPU-bb", "MIG-a,MIG-b,-1,9"])
def test_a_worker_sees_what_this_process_sees_under_its_index(
    named: str, machine: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, named)
    (card,), _ = find_cards((1,))
    assert card.visible == named.split(",")[1].strip()


def test_an_index_that_is_not_here_is_named(machine: list[object]) -> None:
    with pytest.raises(OptionError, match=r"that are here \(0 to 2\), got 3"):
        find_cards((0, 3))
    del machine[1:]
    with pytest.raises(OptionError, match=r"that are here \(only 0\), got 1"):
        find_cards((0, 1))
    machine.clear()
    with pytest.raises(OptionError, match="torch sees no CUDA device"):
        find_cards((0, 1))


def test_devices_of_two_kinds_are_named(machine: list[object]) -> None:
    with pytest.raises(
        OptionError,
        match=r"of one kind, got 0 \(A Device 1, sm_90\) and 2 \(Another, sm_120\); tune each",
    ):
        find_cards((0, 1, 2))


def test_a_worker_measures_on_the_card_that_is_meant(
    machine: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CudaMeasurer", lambda *given: given)
    identity = device_identity()
    given = {"context": 20, "workers": 2, "identity": identity}
    assert device.measurer_on(Card(1, "1", "uuid-0"), **given) == (20, 2)
    with pytest.raises(OptionError, match=r"device 1: expected A Device 1 uuid-1 .* got .* uuid-0"):
        device.measurer_on(Card(1, "1", "uuid-1"), **given)


@pytest.mark.gpu
def test_a_real_card_is_what_a_worker_finds() -> None:
    (card,), identity = find_cards((0,))
    assert card.uuid == card_uuid(0) and identity == device_identity(0)
