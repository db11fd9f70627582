"""Waiting for a device: when the host's own work is done, how often, and whatever it raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash_graph.pace import Pace


class Device:
    """Work with a clock of its own: its last part begins at `near` and takes `last` seconds."""

    def __init__(self, near: float = 14.0, last: float = 0.6) -> None:
        self.now = 0.0
        self.near, self.done = Moment(self, near), Moment(self, near + last)

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Moment:
    def __init__(self, device: Device, at: float) -> None:
        self._device, self._at = device, at

    def query(self) -> bool:
        return self._device.now >= self._at

    def synchronize(self) -> None:
        self._device.now = max(self._device.now, self._at)


def turn(pace: Pace, device: Device, takes: Callable[[], float]) -> list[float]:
    """One wait, from 0 on; when `meanwhile` was called."""
    device.now = 0.0
    called: list[float] = []

    def meanwhile() -> None:
        called.append(device.now)
        device.spend(takes())

    pace.wait(device.near, device.done, meanwhile)
    return called


def test_the_first_turn_only_learns() -> None:
    device = Device()
    assert turn(Pace(device.clock), device, lambda: 0.1) == []
    assert device.now == pytest.approx(14.6)


def test_calls_fill_the_last_part_and_end_before_it() -> None:
    device = Device()
    pace = Pace(device.clock)
    turn(pace, device, lambda: 0.1)
    called = turn(pace, device, lambda: 0.11)
    assert called == pytest.approx([14.0, 14.11, 14.22, 14.33, 14.44])
    assert device.now == pytest.approx(14.6), "another call would have ended after the device"


def test_the_shortest_recent_turn_counts() -> None:
    device = Device(last=0.6)
    pace = Pace(device.clock)
    turn(pace, device, lambda: 0.25)
    device.done = Moment(device, 16.0)
    assert len(turn(pace, device, lambda: 0.25)) == 2
    for _ in range(8):  # the short turn is forgotten
        turn(pace, device, lambda: 0.25)
    assert len(turn(pace, device, lambda: 0.25)) == 7


def test_a_device_that_is_done_early_is_not_waited_for() -> None:
    device = Device(last=2.0)
    pace = Pace(device.clock)
    turn(pace, device, lambda: 0.25)
    device.done = Moment(device, 14.3)
    assert len(turn(pace, device, lambda: 0.25)) == 2
    assert device.now == pytest.approx(14.5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_no_work_behind(error: type[BaseException]) -> None:
    """Buffers that the device still reads are not given back to a caller that goes on."""
    device = Device()
    pace = Pace(device.clock)
    turn(pace, device, lambda: 0.1)

    def fail() -> float:
        raise error

    with pytest.raises(error):
        turn(pace, device, fail)
    assert device.done.query()
    assert len(turn(pace, device, lambda: 0.11)) == 5, "an interrupted turn teaches nothing"
