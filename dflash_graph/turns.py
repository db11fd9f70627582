"""turns: a lock that threads take in turn."""

from __future__ import annotations

from threading import RLock, get_ident


class TurnLock:
    """A re-entrant lock that a thread cannot take again while others wait for it.

    A plain lock goes to whoever is quickest, and that is the thread that just gave it back: one
    that steps an engine in a loop would shut all others out.

    A thread that is interrupted while it takes the lock may keep it, but never locks itself out.
    """

    def __init__(self) -> None:
        # Both can be taken again by a signal handler or a finalizer, at any moment.
        self._gate = RLock()  # held by the one thread that is next
        self._turn = RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner == me:
            self._turn.acquire()
        else:
            with self._gate:
                self._turn.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._turn.release()
