"""pace: waiting for a device, with something to do in the last moments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

#: Turns that an expectation stands on.
_TURNS: Final = 8


class Moment(Protocol):
    """What a device comes to, such as a `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Pace:
    """Waits for work of one kind, whose last part has taken about as long in its last turns.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._taken: deque[float] = deque(maxlen=_TURNS)

    def wait(self, near: Moment, done: Moment, meanwhile: Callable[[], object]) -> None:
        """Return when the work is done, also where `meanwhile` raises.

        From `near` on, `meanwhile` is called until too little time is left for another call. The
        waits before and after leave the interpreter's lock to others.

        Args:
            near: where the last part of the work begins.
            done: where it ends.
            meanwhile: called any number of times; the work does not wait for it.
        """
        try:
            near.synchronize()
            began = now = self._clock()
            due, took = began + min(self._taken, default=0.0), 0.0
            while now + took < due and not done.query():
                meanwhile()
                took, now = self._clock() - now, self._clock()
        finally:
            done.synchronize()
        self._taken.append(self._clock() - began)
